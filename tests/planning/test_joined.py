"""What groups hold together: all tokens of their ranks, in the order of positions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtensor_ring import Balanced, Mask, Striped, ZigZag
from dtensor_ring.planning.layout import Joined, Layout, Run
from dtensor_ring.planning.run_table import shard_table
from tests.planning.test_layout import shard_tables


@given(shard_tables(), st.integers(1, 4), st.booleans())
def test_groups_hold_what_their_ranks_hold(
    sharding: tuple[Layout, int, int], heads: int, balanced: bool
) -> None:
    layout, num_groups, seq_len = sharding
    world_size = num_groups * heads
    if isinstance(layout, Striped):
        seq_len *= heads
    if balanced:
        layout = Balanced(Mask.causal(), seq_len, world_size, None, 3)
    joined = Joined(layout, heads)
    for group in range(num_groups):
        ranks = range(group * heads, (group + 1) * heads)
        held = sorted(x for rank in ranks for x in layout.positions(rank, world_size, seq_len))
        assert joined.positions(group, num_groups, seq_len) == held
        assert joined.num_tokens(group, num_groups, seq_len) == len(held)
    # The planner finds no fault with the runs, of which it promises that neighbours are one.
    sharded = shard_table(joined, num_groups, seq_len)
    assert sharded.shards == tuple(
        joined.runs(group, num_groups, seq_len) for group in range(num_groups)
    )


@pytest.mark.parametrize("layout", [ZigZag(), Striped()])
def test_a_group_of_all_ranks_has_one_run(layout: Layout) -> None:
    assert Joined(layout, 4).runs(0, 1, 32) == (Run(0, 32),)
