"""The closed form of the cost against plans, and against pairs that are counted one by one."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_ring.balanced import balanced as costs
from dtensor_ring.balanced.balanced import TOKEN, busiest_load, cost, ring_makespan
from dtensor_ring.balanced.work import AttentionWork, Partition
from dtensor_ring.lab.schedule import Schedule
from dtensor_ring.planning.layout import shard_length
from dtensor_ring.planning.plan import plan
from dtensor_ring.planning.run_table import RunTable
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.tile import FULL
from tests.slices import shown, slices

SEQ_LEN = 14


@st.composite
def sharded(draw: st.DrawFn) -> tuple[Slices, int, list[int]]:
    """Slices, ranks, and the owner of each position."""
    world_size = draw(st.integers(1, 4))
    owners = [r for r in range(world_size) for _ in range(shard_length(r, world_size, SEQ_LEN))]
    found = draw(slices((SEQ_LEN, SEQ_LEN), draw(st.integers(1, 2)), 5))
    return found, world_size, draw(st.permutations(owners))


def partition_of(owners: list[int]) -> Partition:
    return Partition.of([(at, at + 1, owner) for at, owner in enumerate(owners)])


def num_received(found: Slices, owners: list[int]) -> int:
    """Tokens of one row: any row may need them."""
    pairs = sum(shown(table, (SEQ_LEN, SEQ_LEN)) for table in found)
    held = np.array(owners)
    return sum(int((pairs[held == rank].any(0) & (held != rank)).sum()) for rank in set(owners))


def schedule(found: Slices, world_size: int, partition: Partition) -> Schedule:
    """Of the plans, around the ring."""
    runs, seq_len = partition.runs(world_size), int(partition.ends[-1])
    layout = RunTable(tuple(tuple((run.start, run.length) for run in row) for row in runs))
    plans = tuple(
        plan(layout, FULL, rank, world_size, seq_len, strategy="around", slices=found)
        for rank in range(world_size)
    )
    return Schedule(layout, FULL, seq_len, None, plans)


@settings(deadline=None)
@given(sharded())
def test_cost_is_that_of_the_plans(case: tuple[Slices, int, list[int]]) -> None:
    found, world_size, owners = case
    work, partition = AttentionWork(found), partition_of(owners)
    planned = schedule(found, world_size, partition)
    loads = [sum(steps) for steps in planned.areas]
    assert busiest_load(work, partition, world_size) == max(loads)
    travels = TOKEN * len(found) * num_received(found, owners)
    makespan = round(planned.makespan * sum(loads) / world_size)
    assert cost(work, partition, world_size) == world_size * makespan + travels
    with patch.object(costs, "MAX_PAIRS", -1):
        assert cost(work, partition, world_size) == world_size * max(loads) + travels


WAITS = {
    "for whom it sends to": ([(2, 2, 4), (2, 0, 1), (1, 2, 2)], 16 + 8),
    "for whom it receives from": ([(0, 0, 4), (1, 2, 2)], 16 + 8),
    "for nobody, where nothing is sent": ([(2, 2, 4), (1, 0, 1), (1, 2, 2)], 16),
}
"""Three ranks of 4 tokens: who sees whose keys, by how many queries; the makespan, in pairs."""


@pytest.mark.parametrize(("seen", "makespan"), WAITS.values(), ids=list(WAITS))
def test_ranks_wait(seen: list[tuple[int, int, int]], makespan: int) -> None:
    """Around the ring: what comes from two ranks back passes the rank between, a step later."""
    ranges = [((4 * q, 4 * q + count), (4 * k, 4 * k + 4)) for q, k, count in seen]
    found = Slices(*zip(*ranges, strict=True), [(None, None)] * len(ranges))
    viewers, sources, counts = np.array(seen).T
    assert ring_makespan(viewers, sources, 4 * counts, 3) == makespan
    planned = schedule(found, 3, partition_of([0] * 4 + [1] * 4 + [2] * 4))
    assert round(planned.makespan * sum(map(sum, planned.areas)) / 3) == makespan


def test_partition_joins_neighbours() -> None:
    partition = Partition.of([(4, 6, 0), (0, 2, 1), (2, 4, 1), (3, 3, 0)])
    assert [x.tolist() for x in partition] == [[0, 4], [4, 6], [1, 0]]
    assert partition.max_runs == 1
    assert [x.tolist() for x in Partition.of([])] == [[], [], []]
    assert Partition.of([]).max_runs == 0
