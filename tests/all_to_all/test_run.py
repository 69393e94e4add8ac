"""Exchanges between processes, one after another, and what of them fails on all ranks."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from dtensor_ring import RingError, Striped, ZigZag
from dtensor_ring.all_to_all import run
from dtensor_ring.all_to_all.op import all_to_all_op, flatten_all_to_all
from dtensor_ring.transport.transport import ProcessGroupTransport, set_transport
from tests.all_to_all.test_op import CASES, Case
from tests.pool import Pool, on_ranks


def _options(case: Case) -> tuple[Any, ...]:
    group = dist.group.WORLD
    assert group is not None
    return flatten_all_to_all(case.args(group.group_name))


def _check_turn(case: Case, turn: int) -> None:
    """There and back, with content that no other turn has."""
    rank = dist.get_rank()
    inputs, expected = case.before(rank), case.after(rank)
    for x in inputs:
        x.requires_grad_(x.is_floating_point())
    results = all_to_all_op([x * turn for x in inputs], *_options(case))
    for found, wanted in zip(results, expected, strict=True):
        assert torch.equal(found, wanted * turn)
    used = [(i, x) for i, x in enumerate(results) if x.requires_grad]
    grads = torch.autograd.grad(
        [x for _, x in used], [inputs[i] for i, _ in used], [x.detach() for _, x in used]
    )
    for (i, _), grad in zip(used, grads, strict=True):
        by_hand = inputs[i] * turn * case.copies(i) * turn
        assert torch.equal(grad, by_hand.to(grad.dtype).detach())


def _three_turns(case: Case) -> None:
    for turn in range(1, 4):  # memory serves again
        _check_turn(case, turn)


# Threads do so in tests/all_to_all/test_op.py, in all cases.
@pytest.mark.parametrize("name", [x for x, c in CASES.items() if c.world_size in (2, 4)][::3])
def test_processes_exchange(pool: Pool, name: str) -> None:
    pool.run(CASES[name].world_size, _three_turns, CASES[name])


@on_ranks(4)
def test_exchanges_with_other_peers_take_turns() -> None:
    cases = [
        Case(ZigZag(), ZigZag(), 2, 4, 24),
        Case(ZigZag(), Striped(), 1, 4, 24),
        Case(ZigZag(), ZigZag(), 4, 4, 24),
    ]
    for turn in range(1, 7):
        for case in cases:
            _check_turn(case, turn)


@on_ranks(2)
def test_memory_is_not_written_to_before_it_was_read() -> None:
    """Rank 1 reads late; rank 0 has gone on by then."""
    unpack = run._unpack

    def late(*args: Any) -> None:
        time.sleep(0.05 if dist.get_rank() else 0)
        unpack(*args)

    with patch.object(run, "_unpack", late):
        for turn in range(1, 7):
            _check_turn(CASES["zigzag to zigzag, 2 of 2"], turn)


@on_ranks(4, timeout=60)
def test_an_error_of_all_ranks_leaves_the_group_as_it_is() -> None:
    """All ranks fail before they send, as without memory; the next call is as ever."""
    case = CASES["zigzag to zigzag, 2 of 4"]
    for turn in range(1, 4):
        with patch.object(run, "pack", side_effect=MemoryError("none")), pytest.raises(MemoryError):
            all_to_all_op(case.before(dist.get_rank()), *_options(case))
        _check_turn(case, turn)


class Own(ProcessGroupTransport):
    """As a user's, which sends in its own way."""


@on_ranks(3)
def test_ranks_with_other_transports_are_reported() -> None:
    case = CASES["two key heads on three"]
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    if rank == 1:
        set_transport(group, Own(group))
    with pytest.raises(RingError) as found:
        all_to_all_op(case.before(rank), *_options(case))
    text = str(found.value)
    assert "they differ in transport" in text, text
