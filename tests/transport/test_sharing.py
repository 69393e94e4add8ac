"""Which ranks lend each other memory, and exchanges between those that do and those that do not."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from dtensor_ring import RingError, Striped, ZigZag
from dtensor_ring.ops.autograd import exchange_op
from dtensor_ring.ops.exchange_options import flatten_trade
from dtensor_ring.transport import delivery, exchange, shared_memory, sharing
from dtensor_ring.transport.process_group import ProcessGroupTransport, set_transport
from dtensor_ring.transport.segment import Gone
from dtensor_ring.transport.session import session_of
from dtensor_ring.transport.shared_memory import MAX_SPARES, Loan, SharedMemory
from dtensor_ring.transport.sharing import Card
from tests.ops.test_exchange import CASES, Case
from tests.pool import Pool

MET_BYTES = torch.tensor(Card(0, 0, 0, 0, 0)).nbytes + 1
LOAN_BYTES = Loan(0).message().nbytes


@contextmanager
def _hosts(names: str) -> Iterator[Counter[int]]:
    """As if each rank were on the host of that letter; counts the bytes that leave, by peer."""
    rank, sent, start = dist.get_rank(), Counter[int](), ProcessGroupTransport.start

    def counting(self: Any, receives: Any, sends: Any) -> Any:
        for x in sends:
            sent[x.peer] += x.flat.nbytes
        return start(self, receives, sends)

    with ExitStack() as stack:
        stack.enter_context(patch.object(ProcessGroupTransport, "start", counting))
        if names[rank] == "-":  # it has no such memory
            stack.enter_context(patch.object(os, "memfd_create", side_effect=OSError("none")))
        host = ord(names[rank])
        stack.enter_context(patch.object(sharing, "host_of_process", return_value=host))
        yield sent


def _options(case: Case) -> tuple[Any, ...]:
    group = dist.group.WORLD
    assert group is not None
    return flatten_trade(case.trade(group.group_name))


def _check_turn(case: Case, turn: int) -> None:
    """There and back, with content that no other turn has."""
    rank = dist.get_rank()
    inputs, expected = case.before(rank), case.after(rank)
    for x in inputs:
        x.requires_grad_(x.is_floating_point())
    results = exchange_op([x * turn for x in inputs], *_options(case))
    for found, wanted in zip(results, expected, strict=True):
        assert torch.equal(found, wanted * turn)
    used = [(i, x) for i, x in enumerate(results) if x.requires_grad]
    grads = torch.autograd.grad(
        [x for _, x in used], [inputs[i] for i, _ in used], [x.detach() for _, x in used]
    )
    for (i, _), grad in zip(used, grads, strict=True):
        by_hand = inputs[i] * turn * case.copies(i) * turn
        assert torch.equal(grad, by_hand.to(grad.dtype).detach())


def _exchange_on_hosts(case: Case, hosts: str) -> dict[int, int]:
    """The bytes that leave this rank in three turns."""
    with _hosts(hosts) as sent:
        for turn in range(1, 4):  # memory serves again
            _check_turn(case, turn)
    return dict(sent)


def _share(hosts: str, one: int, other: int) -> bool:
    return hosts[one] == hosts[other] != "-"


MIXED = "uneven heads", "uneven tokens", "empty ranks", "runs to a layout", "a layout to runs"
EXCHANGED = [(name, "aaaa") for name, case in CASES.items() if case.world_size in (2, 4)]
EXCHANGED += [(name, hosts) for name in MIXED for hosts in ("aabb", "abab", "aa--", "----")]


@pytest.mark.parametrize(("name", "hosts"), EXCHANGED)
def test_ranks_of_some_hosts_exchange(pool: Pool, name: str, hosts: str) -> None:
    case = CASES[name]
    for rank, sent in enumerate(pool.run(case.world_size, _exchange_on_hosts, case, hosts)):
        assert set(sent) <= set(range(case.world_size)) - {rank}
        if name == "uneven heads":  # everybody sends to everybody
            assert set(sent) == set(range(case.world_size)) - {rank}
        for peer, num_bytes in sent.items():
            # Ranks meet once. Then six loans, and an answer to the first of a segment, or content.
            extra = num_bytes - MET_BYTES - 6 * LOAN_BYTES
            if _share(hosts, rank, peer):
                assert 0 <= extra <= 6
            elif name == "uneven heads":
                assert extra > 6


def _peers_in_turns() -> None:
    cases = [
        Case(ZigZag(), ZigZag(), 2, 4, 24),
        Case(ZigZag(), Striped(), 1, 4, 24),
        Case(ZigZag(), ZigZag(), 4, 4, 24),
    ]
    for turn in range(1, 7):
        for case in cases:
            _check_turn(case, turn)
    group = dist.group.WORLD
    assert group is not None
    assert len(session_of(group).memory._spares) <= MAX_SPARES + 3, "and one lent to each peer"


def test_exchanges_with_other_peers_take_turns(pool: Pool) -> None:
    pool.run(4, _peers_in_turns)


def _slow_reader() -> None:
    """Rank 1 reads late; rank 0 has gone on by then."""
    unpack = exchange._unpack

    def late(*args: Any) -> None:
        time.sleep(0.05 if dist.get_rank() else 0)
        unpack(*args)

    with patch.object(exchange, "_unpack", late):
        for turn in range(1, 7):
            _check_turn(CASES["zigzag to zigzag, 2 of 2"], turn)


def test_memory_is_not_written_to_before_it_was_read(pool: Pool) -> None:
    pool.run(2, _slow_reader)


def _end_at_once() -> None:
    """Rank 0 forgets all that it lends as soon as its exchange is over, when rank 1 reads."""
    case, rank, group = CASES["zigzag to zigzag, 2 of 2"], dist.get_rank(), dist.group.WORLD
    assert group is not None
    unpack = exchange._unpack

    def late(*args: Any) -> None:
        time.sleep(0.2 if rank else 0)
        unpack(*args)

    with patch.object(exchange, "_unpack", late):
        results = exchange_op(case.before(rank), *_options(case))
    if rank == 0:
        session_of(group).memory = SharedMemory()
    for found, wanted in zip(results, case.after(rank), strict=True):
        assert torch.equal(found, wanted)


def test_a_rank_may_end_while_another_one_reads(pool: Pool) -> None:
    pool.run(2, _end_at_once)


def _raise_alike() -> None:
    """All ranks fail before they send, as without memory; the next call is as ever."""
    case = CASES["zigzag to zigzag, 2 of 4"]
    for turn in range(1, 4):
        with (
            patch.object(delivery, "pack", side_effect=MemoryError("none")),
            pytest.raises(MemoryError),
        ):
            exchange_op(case.before(dist.get_rank()), *_options(case))
        _check_turn(case, turn)


def test_an_error_of_all_ranks_leaves_the_group_as_it_is(pool: Pool) -> None:
    pool.run(4, _raise_alike, timeout=60)


class Own(ProcessGroupTransport):
    """As a user's, which sends in its own way."""


def _failing(how: str) -> tuple[str, int | None]:
    """The error of an exchange between three ranks, and the rank it is of."""
    case = CASES["two key heads on three"]
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    with ExitStack() as stack:
        if rank == 1 and how == "gone":
            gone = patch.object(shared_memory, "segment_of", side_effect=Gone("no such file"))
            stack.enter_context(gone)
        if rank == 1 and how == "transport":
            set_transport(group, Own(group))
        try:
            for _ in range(3):
                exchange_op(case.before(rank), *_options(case))
        except RingError as error:
            return str(error), error.peer
    raise AssertionError("no error came")


def test_memory_that_is_gone_in_a_call_is_told_to_all(pool: Pool) -> None:
    found = pool.run(3, _failing, "gone")
    assert all("its memory is closed: no such file" in text for text, _ in found), found
    assert found[1][1] in (0, 2), "the rank whose memory it was"


def test_ranks_with_other_transports_are_told(pool: Pool) -> None:
    """Else one would take the other's content for a loan."""
    for text, _ in pool.run(3, _failing, "transport"):
        assert "they differ in transport" in text, text
