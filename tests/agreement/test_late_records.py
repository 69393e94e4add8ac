"""Records that no host waits for: what is sent, what is compared, and who is told of what."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch.distributed as dist

from dtensor_ring.agreement import late_records
from dtensor_ring.agreement.call_record import CallRecord, CallSite
from dtensor_ring.agreement.late_records import Failed, LateRecords, PostedCall

DEADLINE = 30.0
"""Seconds after which something hangs."""
ONE, OTHER = CallRecord({"scale": "0.5"}), CallRecord({"scale": "0.25"})
SITE = CallSite("a.py:1 in f", "layer 0", "R, S(2)")
FEW = 37
"""Bytes of a record whose kind is known."""


class Rank(LateRecords):
    """A rank of a ring in this process; knows what it sent, and why it failed."""

    def __init__(self, group: dist.ProcessGroupGloo, size: int) -> None:
        self.sizes: list[int] = []
        self.failures: list[Failed] = []
        self.number = 0
        super().__init__(group, tuple(range(size)), self._note)

    def _note(self, failed: Failed) -> None:
        self.failures.append(failed)
        self.abort()

    def _send(self, message: bytes, seconds: float = 0.0) -> None:
        self.sizes.append(len(message))
        super()._send(message, seconds)

    def call(self, record: CallRecord = ONE, site: tuple[str, str, str] = SITE) -> None:
        self.number += 1
        self.post(PostedCall(record, self.number, 0, site, "forward", time.monotonic()))

    def failure(self) -> Failed:
        """Why it fails, soon."""
        until(lambda: bool(self.failures))
        (failed,) = self.failures
        return failed


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < end, "this takes too long"
        time.sleep(0.005)


@contextmanager
def ring(size: int) -> Iterator[list[Rank]]:
    """The ranks of a ring, which end with the context."""
    store, limit = dist.HashStore(), timedelta(seconds=DEADLINE)
    with ThreadPoolExecutor(size) as threads:
        make = lambda rank: dist.ProcessGroupGloo(store, rank, size, limit)  # noqa: E731
        groups = list(threads.map(make, range(size)))
    ranks = [Rank(group, size) for group in groups]
    yield ranks
    for rank in ranks:
        rank.close()
    # A receive that is left would come back from gloo while the interpreter ends, and abort it. A
    # send to a rank that closes at this moment may stay there until the limit of the group.
    assert not any(thread.is_alive() for rank in ranks for thread in rank._threads[1:])


@pytest.mark.parametrize("size", [2, 3])
def test_equal_calls_are_confirmed(size: int) -> None:
    with ring(size) as ranks:
        for record in (ONE, OTHER, ONE):
            for rank in ranks:
                rank.call(record)
        assert all(rank.confirm(DEADLINE) for rank in ranks)
    assert not any(rank.failures for rank in ranks)


def test_a_rank_may_be_far_ahead() -> None:
    with ring(2) as (first, last):
        for _ in range(50):
            first.call()
        assert not first.confirm(0.1), "the other rank has not called yet"
        for _ in range(50):
            last.call()
        assert first.confirm(DEADLINE)
        assert last.confirm(DEADLINE)


def test_a_kind_is_sent_in_full_once() -> None:
    records = [CallRecord({"scale": str(i)}) for i in range(3)]
    with patch.object(late_records, "MAX_KINDS", 2), ring(2) as ranks:
        for i in (0, 0, 1, 0, 2, 0):  # the last one was dropped for the one before it
            for rank in ranks:
                rank.call(records[i])
        assert all(rank.confirm(DEADLINE) for rank in ranks)
        until(lambda: len(ranks[0].sizes) == 6)
    is_full = [size > FEW for size in ranks[0].sizes[:6]]
    assert is_full == [True, False, True, False, True, True]
    assert ranks[0].sizes[1] == FEW


def test_a_difference_is_named_though_only_a_hash_was_sent() -> None:
    with ring(2) as ranks:
        for record in (ONE, OTHER):
            for rank in ranks:
                rank.call(record)
        ranks[0].call(ONE)
        ranks[1].call(OTHER)
        failures = [rank.failure() for rank in ranks]
        # A rank that is told first need not have sent its third record.
        assert {size for rank in ranks for size in rank.sizes[2:]} == {FEW}
    # One may be told by the closed connection of the other, which was first.
    text = next(failed.text for failed in failures if "they differ" in failed.text)
    assert "scale: 0.5 on rank 0, 0.25 on rank 1" in text or "0.25 on rank 1, 0.5 on rank" in text
    assert "in forward, call 3 of the group, a.py:1 in f" in text


def test_call_sites_are_compared_if_both_are_known() -> None:
    unknown, other = CallSite(layer="layer 0"), SITE._replace(line="b.py:2 in g")
    with ring(2) as ranks:
        for rank, site in zip(ranks, (SITE, unknown), strict=True):
            rank.call(site=site)
        assert all(rank.confirm(DEADLINE) for rank in ranks)
        for rank, site in zip(ranks, (SITE, other), strict=True):
            rank.call(site=site)
        texts = [rank.failure().text for rank in ranks]
    assert any("they differ in call site: " in text for text in texts)


def test_a_rank_that_ends_says_goodbye() -> None:
    with ring(2) as (first, last):
        for rank in (first, last):
            rank.call()
        assert last.confirm(DEADLINE)
        first.close()
        until(lambda: last._last_of_previous == 1)
        assert not last.failures, "it made all calls"
        last.call()
        text = last.failure().text
    assert "rank 1 got no answer of rank 0, in forward, call 2 of the group" in text
    assert "it ended, or destroyed its group, after call 1" in text


def test_the_next_rank_may_leave_first() -> None:
    """It made all calls: that the last record does not reach it any more is no failure."""
    with ring(3) as ranks:
        for rank in ranks:
            rank.call()
        assert all(rank.confirm(DEADLINE) for rank in ranks)
        ranks[1].close()
        until(lambda: ranks[2]._last_of_previous == 1)
        ranks[0].call()
        assert not ranks[0].confirm(0.2)
        assert not ranks[0].failures


def test_a_rank_that_ends_too_early() -> None:
    with ring(2) as (first, last):
        last.call()
        assert not last.confirm(0.05)
        first.close()
        assert "after call 0" in last.failure().text


def test_a_lost_connection_is_told_around_the_ring() -> None:
    with ring(3) as ranks:
        for rank in ranks:
            rank.call()
        assert all(rank.confirm(DEADLINE) for rank in ranks)
        ranks[1].abort()
        failures = [ranks[i].failure() for i in (2, 0)]
    assert [failed.peer for failed in failures] == [1, 2]
    assert "rank 2 got no answer of rank 1" in failures[0].text
    assert "after call 1 of the group: its connection is closed" in failures[0].text


def test_a_record_that_does_not_come() -> None:
    with ring(2) as (first, last):
        last.call()
        now = time.monotonic()
        last.check_time(now + 4, 5.0)
        assert not last.failures
        last.check_time(now + 6, 5.0)
        assert "the time limit of the group is over" in last.failure().text
        assert "in forward, call 1 of the group" in last.failure().text
        assert "closed" in first.failure().text


def test_a_forked_process_closes_nothing() -> None:
    with ring(2) as ranks:
        with patch.object(os, "getpid", return_value=-1):
            ranks[0].close()
        for rank in ranks:
            rank.call()
        assert all(rank.confirm(DEADLINE) for rank in ranks)
