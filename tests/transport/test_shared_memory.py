"""Memory that ranks of a host lend each other: what is read, when it is used again, who shares."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from dtensor_ring import RingError
from dtensor_ring.ops.autograd import exchange_op
from dtensor_ring.ops.exchange_options import flatten_trade
from dtensor_ring.transport import shared_memory, sharing
from dtensor_ring.transport.process_group import ProcessGroupTransport
from dtensor_ring.transport.shared_memory import MAX_MAPPED, MAX_SPARES, SharedMemory, new_loan
from dtensor_ring.transport.sharing import Card
from tests.ops.test_exchange import CASES, Case
from tests.pool import Pool

LOAN_BYTES = new_loan().nbytes


def _two() -> tuple[SharedMemory, SharedMemory]:
    """Two ranks, 0 and 1, in this process."""
    zero, one = SharedMemory(), SharedMemory()
    zero.meet({1: os.getpid()})
    one.meet({0: os.getpid()})
    return zero, one


def _lent(lender: SharedMemory, borrower: SharedMemory, content: list[int]) -> list[int]:
    """What rank 1 reads of a segment of rank 0, which rank 0 has given back by then."""
    segment = lender.allocate(8 + len(content))
    segment.memory[8 : 8 + len(content)] = torch.tensor(content, dtype=torch.uint8)
    loan = lender.lend(1, segment, 8)
    lender.free(segment)
    return borrower.borrow(0, loan, len(content)).tolist()


def test_a_loan_is_read_where_it_lies() -> None:
    zero, one = _two()
    assert _lent(zero, one, [1, 2, 3]) == [1, 2, 3]
    assert one.borrow(0, zero.lend(1, None, 0), 0).tolist() == []


def test_memory_serves_again_once_its_loan_is_over() -> None:
    zero, one = _two()
    first = zero.allocate(8)
    loan = zero.lend(1, first, 0)
    zero.free(first)
    assert zero.allocate(8) is not first, "it is lent"
    zero.borrow(1, one.lend(0, None, 0), 0)
    assert zero.allocate(8) is not first, "what was sent before it was read says nothing of it"
    one.borrow(0, loan, 8)
    zero.borrow(1, one.lend(0, None, 0), 0)
    assert zero.allocate(8) is first


def test_a_loan_that_was_never_read_holds_nothing_for_good() -> None:
    """As after an error that all ranks had alike."""
    zero, one = _two()
    lost = zero.allocate(8)
    zero.lend(1, lost, 0)
    zero.free(lost)
    assert _lent(zero, one, [5]) == [5]
    zero.borrow(1, one.lend(0, None, 0), 0)
    assert lost in [zero.allocate(8) for _ in range(2)]


def test_few_segments_are_kept() -> None:
    def num_files() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    zero, one = _two()
    before = num_files()
    for size in range(1, 40):
        assert _lent(zero, one, [7] * 1000 * size) == [7] * 1000 * size
        zero.borrow(1, one.lend(0, None, 0), 0)
    assert num_files() - before <= MAX_SPARES + 1, "and one that was lent"
    assert len(one._peers[0].mapped) == MAX_MAPPED  # type: ignore[union-attr]
    del zero
    assert num_files() == before


def test_the_smallest_that_fits_is_taken() -> None:
    memory = SharedMemory()
    segments = [memory.allocate(size) for size in (300, 100, 200)]
    for segment in segments:
        memory.free(segment)
    assert memory.allocate(150) is segments[2]


@pytest.mark.parametrize("gone", ["process", "segment"])
def test_memory_that_is_gone_is_told(gone: str) -> None:
    zero, one = _two()
    segment = zero.allocate(8)
    loan = zero.lend(1, segment, 0)
    if gone == "process":
        one.meet({0: 2**22 + 1})  # more than there are
    else:
        loan[2] += 1  # another segment has its file descriptor
    with pytest.raises(RuntimeError, match="its memory is closed"):
        one.borrow(0, loan, 8)


@contextmanager
def _hosts(names: str) -> Iterator[Counter[int]]:
    """As if each rank were on the host of that letter; counts the bytes that leave, by peer."""
    rank, sent, start = dist.get_rank(), Counter[int](), ProcessGroupTransport.start

    def counting(self: Any, receives: Any, sends: Any) -> Any:
        sent.update({x.peer: 0 for x in sends})
        for x in sends:
            sent[x.peer] += x.flat.nbytes
        return start(self, receives, sends)

    with ExitStack() as stack:
        stack.enter_context(patch.object(ProcessGroupTransport, "start", counting))
        if names[rank] == "-":  # none has its kind of memory
            stack.enter_context(patch.object(os, "memfd_create", side_effect=OSError("none")))
        host = ord(names[rank])
        stack.enter_context(patch.object(sharing, "host_of_process", return_value=host))
        yield sent


def _exchange_there_and_back(case: Case, hosts: str) -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    trade = case.trade(group.group_name)
    inputs, expected = case.before(rank), case.after(rank)
    for x in inputs:
        x.requires_grad_(x.is_floating_point())
    with _hosts(hosts) as sent:
        for turn in range(3):  # memory serves again
            results = exchange_op([x * (turn + 1) for x in inputs], *flatten_trade(trade))
            for found, wanted in zip(results, expected, strict=True):
                assert torch.equal(found, wanted * (turn + 1))
            used = [(i, x) for i, x in enumerate(results) if x.requires_grad]
            grads = torch.autograd.grad(
                [x for _, x in used], [inputs[i] for i, _ in used], [x.detach() for _, x in used]
            )
            for (i, _), grad in zip(used, grads, strict=True):
                by_hand = inputs[i] * (turn + 1) * case.copies(i) * (turn + 1)
                assert torch.equal(grad, by_hand.to(grad.dtype).detach())
        near = {x for x in sent if hosts[x] == hosts[rank] != "-"}
        # Each meets once, in two messages, and gets a loan in each of six exchanges.
        met = torch.tensor(Card(0, 0, 0, 0, 0)).nbytes + 1
        assert all(sent[peer] == met + 6 * LOAN_BYTES for peer in near)
        if 0 not in expected[0].shape and case.layout == case.to == CASES["six ranks"].layout:
            assert all(sent[peer] > met + 6 * LOAN_BYTES for peer in set(sent) - near)


MIXED = "uneven heads", "uneven tokens", "empty ranks", "runs to a layout", "a layout to runs"
EXCHANGED = [(name, "aaaa") for name, case in CASES.items() if case.world_size in (2, 4)]
EXCHANGED += [(name, hosts) for name in MIXED for hosts in ("aabb", "abab", "aa--", "----")]


@pytest.mark.parametrize(("name", "hosts"), EXCHANGED)
def test_ranks_of_some_hosts_exchange(pool: Pool, name: str, hosts: str) -> None:
    pool.run(CASES[name].world_size, _exchange_there_and_back, CASES[name], hosts)


def test_memory_that_is_gone_in_a_call_is_told_to_all(pool: Pool) -> None:
    for rank, (text, peer) in enumerate(pool.run(3, _lose_memory)):
        assert "rank 1" in text, text
        assert "its connection is closed" in text, text
        assert peer == 0 or rank != 1


def _lose_memory() -> tuple[str, int | None]:
    """Rank 1 finds nothing where others lent; its error, and the rank it is of."""
    case = CASES["two key heads on three"]
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    options = flatten_trade(case.trade(group.group_name))
    with ExitStack() as stack:
        if rank == 1:
            gone = patch.object(shared_memory, "segment_of", side_effect=OSError("no such file"))
            stack.enter_context(gone)
        try:
            for _ in range(3):
                exchange_op(case.before(rank), *options)
        except RingError as error:
            return str(error), error.peer
    raise AssertionError("no error came")
