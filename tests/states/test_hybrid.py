"""What layouts cost hybrids, against positions counted one by one and the plans of all ranks."""

from __future__ import annotations

import pytest

from dtensor_ring import Contiguous, Mask, describe_schedule
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.states.hybrid import (
    PAIR,
    Hybrid,
    HybridCost,
    compare_hybrid_layouts,
    relayout_tokens,
    stays_from,
)

MASKS = Mask.causal(), Mask.sliding(20), Mask.full()
HYBRID = Hybrid(stateful=3, attention=2, hidden_size=10, heads=(4, 2), head_dim=8, itemsize=4)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_tokens_that_change_their_rank(layout: str, world_size: int) -> None:
    found = as_layout(layout)
    stays = sum(
        len(
            {*found.positions(rank, world_size, 48)}
            & {*Contiguous().positions(rank, world_size, 48)}
        )
        for rank in range(world_size)
    )
    assert relayout_tokens(found, 48, world_size) == 48 - stays


def num_seen(layout: str, mask: Mask, world_size: int) -> int:
    """Keys that ranks see and do not hold, one by one."""
    held = [as_layout(layout).positions(rank, world_size, 48) for rank in range(world_size)]
    return sum(
        key not in own and any(mask.sees(query, key) for query in own)
        for own in held
        for key in range(48)
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_costs_are_those_of_the_plans(mask: Mask, world_size: int) -> None:
    found = compare_hybrid_layouts(HYBRID, mask, 48, world_size)
    for row in found.rows:
        schedule = describe_schedule(row.layout, mask, 48, world_size)
        moved = relayout_tokens(as_layout(row.layout), 48, world_size)
        assert row.relayouts == 2 * 3 * moved * 10 * 4
        assert row.keys == 2 * num_seen(row.layout, mask, world_size) * 2 * (2 * 8) * 4
        total = sum(map(sum, schedule.areas))
        waiting = 2 * (schedule.makespan - 1) * total * PAIR * (4 * 8)
        assert row.waiting == pytest.approx(waiting, abs=1)


@pytest.mark.parametrize(
    ("changes", "mask", "seq_len", "strategy", "best"),
    [
        ({}, Mask.causal(), 4096, "ring", "contiguous"),
        ({}, Mask.causal(), 131072, "ring", "zigzag"),
        ({"attention": 1}, Mask.causal(), 65536, "ring", "contiguous"),
        ({"stateful": 3}, Mask.causal(), 16384, "ring", "zigzag"),
        ({}, Mask.sliding(1024), 131072, "ring", "contiguous"),
        ({}, Mask.full(), 131072, "ring", "contiguous"),
        ({}, Mask.causal(), 131072, "ulysses:8", "contiguous"),
        ({}, Mask.causal(), 131072, "ulysses:4", "zigzag"),
        ({"attention": 0}, Mask.causal(), 131072, "ring", "contiguous"),
    ],
)
def test_which_costs_least(
    changes: dict[str, int], mask: Mask, seq_len: int, strategy: str, best: str
) -> None:
    """Short sequences, and few layers of attention, are not worth dealing tokens again."""
    hybrid = Hybrid(**{"stateful": 36, "attention": 12, "hidden_size": 2048} | changes)
    found = compare_hybrid_layouts(hybrid, mask, seq_len, 8, strategy)
    assert found.best == best, str(found)
    assert f"least: {best}" in str(found)


@pytest.mark.parametrize("world_size", [2, 4, 8, 12])
def test_tokens_stay_where_two_maps_cost_less(world_size: int) -> None:
    """And the bytes of both are counted, of convolutions, too."""
    hybrid = HYBRID._replace(maps=(1000, 10))
    shortest = stays_from(hybrid, as_layout("zigzag"), world_size)
    assert shortest is not None
    step, order = 2 * world_size, {x.layout: x for x in _rows(hybrid, shortest, world_size)}
    assert order["zigzag"].relayouts == 0
    before = {x.layout: x for x in _rows(hybrid, shortest - step, world_size)}
    assert before["zigzag"].states == order["contiguous"].states
    more = order["zigzag"].states - order["contiguous"].states
    assert order["zigzag"].states > more > before["zigzag"].relayouts > 0
    moved = relayout_tokens(as_layout("zigzag"), shortest, world_size)
    assert more <= 2 * 3 * moved * 10 * 4
    for layout in ("contiguous", "striped"):
        assert stays_from(hybrid, as_layout(layout), world_size) is None


def _rows(hybrid: Hybrid, seq_len: int, world_size: int) -> tuple[HybridCost, ...]:
    return compare_hybrid_layouts(hybrid, Mask.causal(), seq_len, world_size).rows


def test_lengths_are_padded_and_bad_numbers_refused() -> None:
    assert compare_hybrid_layouts(HYBRID, Mask.causal(), 9, 4).seq_len == 16
    with pytest.raises(ValueError, match="world_size"):
        compare_hybrid_layouts(HYBRID, Mask.causal(), 9, 0)
    with pytest.raises(ValueError, match="groups of 3 ranks"):
        compare_hybrid_layouts(HYBRID, Mask.causal(), 9, 4, "ulysses:3")
