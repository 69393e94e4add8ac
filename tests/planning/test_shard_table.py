"""Layouts are sharded as they promise: broken promises are refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtensor_ring import Mask
from dtensor_ring.planning.layout import Layout, Run, shard_length
from dtensor_ring.planning.plan import plan
from dtensor_ring.planning.run_table import shard_table
from tests.planning.test_layout import positions, shard_tables


@dataclass(frozen=True)
class Written(Layout):
    """Whatever runs one writes down."""

    shards: tuple[tuple[Run, ...], ...]
    name = "written"

    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        return self.shards[rank]


@given(shard_tables())
def test_shard_table_has_all_runs(sharding: tuple[Layout, int, int]) -> None:
    layout, world_size, seq_len = sharding
    sharded = shard_table(layout, world_size, seq_len)
    assert shard_table(layout, world_size, seq_len) is sharded, "once"
    columns = zip(sharded.starts, sharded.lengths, sharded.owners, sharded.cols, strict=True)
    for start, run_length, owner, col in columns:
        expected = [start + i * sharded.stride for i in range(run_length)]
        held = layout.positions(owner, world_size, seq_len)
        assert held[col : col + run_length] == expected
    assert sum(sharded.lengths) == seq_len
    assert [sharded.num_local(rank) for rank in range(world_size)] == [
        shard_length(rank, world_size, seq_len) for rank in range(world_size)
    ]


BROKEN = [
    ([[(2, 2), (0, 2)], [(4, 4)]], "the runs of rank 0 do not ascend, Run(start=0"),
    ([[(0, 2), (1, 2)], [(4, 4)]], "the runs of rank 0 do not ascend, Run(start=1"),
    ([[(0, 3, 2), (3, 1, 2)], [(1, 4, 2)]], "the runs of rank 0 do not ascend, Run(start=3"),
    ([[(0, 0), (0, 4)], [(4, 4)]], "rank 0 has an empty run, Run(start=0, length=0"),
    ([[(0, 4)], [(4, 4, 0)]], "rank 1 has an empty run, Run(start=4, length=4, stride=0"),
    ([[(0, 3)], [(3, 5)]], "rank 0 has 3 tokens, but its shard has 4"),
    ([[], [(0, 8)]], "rank 0 has 0 tokens, but its shard has 4"),
    ([[(0, 4)], [(3, 4)]], "rank 1 has Run(start=3, length=4, stride=1), so that position 3 is"),
    ([[(1, 4)], [(5, 3), (8, 1)]], "rank 1 has Run(start=8, length=1, stride=1), outside of the"),
    ([[(0, 3), (7, 1)], [(4, 4)]], "rank 1 has Run(start=4, length=4, stride=1), so that posit"),
    ([[(0, 4)], [(5, 4)]], "rank 1 has Run(start=5, length=4, stride=1), outside of the sequence"),
    ([[(-1, 4)], [(3, 4)]], "rank 0 has Run(start=-1, length=4, stride=1), outside of the seq"),
    ([[(0, 4, 2)], [(1, 4)]], "rank 1 has a run of stride 1, others have stride 2"),
    ([[(0, 4, 2)], [(0, 4, 2)]], "rank 1 has Run(start=0, length=4, stride=2), so that position"),
    ([[(0, 4, 2)], [(3, 3, 2), (9, 1, 2)]], "rank 1 has Run(start=9, length=1, stride=2), outs"),
]


@pytest.mark.parametrize(("shards", "message"), BROKEN)
def test_broken_promises(shards: list[list[tuple[int, ...]]], message: str) -> None:
    layout = Written(tuple(tuple(Run(*run) for run in shard) for shard in shards))
    for refuse in (lambda: shard_table(layout, 2, 8), lambda: plan(layout, Mask.causal(), 0, 2, 8)):
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            refuse()
        prefix = f"{layout!r} breaks the promise of Layout.runs for 8 tokens on 2 ranks: rank "
        assert str(caught.value).replace("the runs of rank", "rank").startswith(prefix)


@given(st.data())
def test_no_broken_promise_passes(data: st.DataObject) -> None:
    """Runs drawn at random either shard every position once, in order, or are refused."""
    stride = data.draw(st.integers(1, 3))
    run = st.builds(Run, st.integers(-1, 9), st.integers(0, 4), st.just(stride))
    shards = data.draw(st.lists(st.lists(run, max_size=3).map(tuple), min_size=2, max_size=2))
    layout = Written(tuple(shards))
    sharded = positions(layout, 2, 6)
    lasts = [(a.last, b.start) for shard in shards for a, b in pairwise(shard)]
    keeps = (
        sorted(chain.from_iterable(sharded)) == list(range(6))
        and [len(shard) for shard in sharded] == [3, 3]
        and all(run.length for shard in shards for run in shard)
        and all(last < start for last, start in lasts)
    )
    assert is_accepted(layout) == keeps


def is_accepted(layout: Layout) -> bool:
    try:
        shard_table(layout, 2, 6)
    except ValueError:
        return False
    return True
