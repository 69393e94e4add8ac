"""The laboratory counts the messages of sums in a fixed order as rings send them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from dtensor_ring import Mask, TransferPolicy, compare_strategies, simulate_attention
from dtensor_ring.all_to_all.ulysses import is_exchanged, ulysses_attention
from dtensor_ring.ops.options import flatten
from dtensor_ring.ops.ring_op import ring_op
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.transport.transport import P2P, Work
from tests.played_group import PlayedGroup, play_group
from tests.rings import Case, Ring, local

FIXED = TransferPolicy(order="fixed", block=16)
SEQ_LEN = 64
CASES = [
    ("whole_blocks:16", "ring", 4),
    ("contiguous", "ring", 2),
    ("zigzag", "all_gather", 3),
    ("striped", "ring", 2),
    ("zigzag", "ulysses:2", 4),
]


@pytest.mark.parametrize(("layout", "strategy", "world_size"), CASES)
def test_bytes_are_those_that_are_sent(layout: str, strategy: str, world_size: int) -> None:
    ring = Ring(as_layout(layout), world_size, SEQ_LEN, Mask.causal(), strategy=strategy)
    case = Case(ring, torch.float32, (4, 4), (32, 32), batch=1, policy=FIXED)
    sent = _played(case)
    (row,) = compare_strategies(
        *(Mask.causal(), SEQ_LEN, world_size, (4, 4), 32),
        layout=layout,
        dtype=torch.float32,
        policy=FIXED,
        strategies=[strategy],
    ).rows
    assert (row.forward.sent, row.backward.sent) == tuple(map(max, zip(*sent, strict=True)))


def _played(case: Case) -> list[list[int]]:
    """The bytes that each rank sends forward, and backward."""
    ring = Ring(case.ring.layout, case.ring.world_size, SEQ_LEN, Mask.causal())

    def run(group: PlayedGroup) -> list[int]:
        counts, start = [0], group.transport.start

        def counting(receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
            counts[-1] += sum(x.flat.nbytes for x in sends)
            return start(receives, sends)

        group.transport.start = counting  # type: ignore[method-assign]
        own = ring.positions(group.rank())
        shards = [local(x, own).detach().requires_grad_() for x in case.inputs()]
        call = case.call(None, group.group_name)
        if is_exchanged(call):
            out, _ = ulysses_attention(*shards, call, with_lse=False)
        else:
            out, _ = ring_op(*shards, *flatten(call))
        counts.append(0)
        torch.autograd.grad(out, shards, local(case.grads()[0], own))
        return counts

    return play_group(ring.world_size, run)


def test_what_is_not_counted_is_refused() -> None:
    with pytest.raises(ValueError, match="simulate_attention has no sums in a fixed order"):
        simulate_attention(Mask.causal(), SEQ_LEN, 2, (4, 4), 32, policy=FIXED)
