"""Memory that ranks of a host lend each other: what is read, and when it is used again."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from dtensor_ring.transport.shared_memory import MAX_IDLE, MAX_SPARES, SharedMemory


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


def test_memory_serves_again_once_it_was_read() -> None:
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
    assert loan.is_first
    assert not zero.lend(1, first, 0).is_first


def test_a_loan_that_was_never_read_holds_nothing_for_good() -> None:
    """As after an error that all ranks had alike."""
    zero, one = _two()
    lost = zero.allocate(8)
    zero.lend(1, lost, 0)
    zero.free(lost)
    assert _lent(zero, one, [5]) == [5]
    zero.borrow(1, one.lend(0, None, 0), 0)
    assert lost in [zero.allocate(8) for _ in range(2)]


def _num_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_few_segments_are_kept() -> None:
    zero, one = _two()
    before = _num_files()
    for size in range(1, MAX_IDLE + 20):
        assert _lent(zero, one, [7] * 100 * size) == [7] * 100 * size
        zero.borrow(1, one.lend(0, None, 0), 0)
    assert _num_files() - before <= MAX_SPARES + 1, "and one that was lent"
    assert len(one._peers[0].mapped) == MAX_IDLE + 1  # type: ignore[union-attr]
    for _ in range(MAX_IDLE):
        _lent(zero, one, [7])
        zero.borrow(1, one.lend(0, None, 0), 0)
    assert len(one._peers[0].mapped) <= MAX_SPARES + 1  # type: ignore[union-attr]
    del zero
    assert _num_files() == before


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
        loan = loan._replace(inode=loan.inode + 1)  # another one has its file descriptor
    with pytest.raises(RuntimeError, match="its memory is closed"):
        one.borrow(0, loan, 8)


def test_no_more_memory_is_an_error() -> None:
    """Not the end of the process, once it is written to."""
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        SharedMemory().allocate(1 << 50)
