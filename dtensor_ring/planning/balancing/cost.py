"""What it costs to deal a sequence in some way, in closed form: work, waiting, and what travels."""

from __future__ import annotations

import numpy as np

from dtensor_ring.planning.balancing.areas import areas
from dtensor_ring.planning.balancing.work import Work
from dtensor_ring.planning.layouts.partition import Partition
from dtensor_ring.planning.values.ranges import expanded

MAX_PAIRS = 2**20
"""Pairs of pieces that steps are computed for, in about 0.2 s; of more, no waiting is counted."""

TOKEN = 2048
"""Pairs that a rank computes while the key and value of one token travel.

With 32 query heads and 8 key heads of 128 in 16 bits: 16 Kflop and 4 KiB, at 500 Tflop/s and
50 GB/s.
"""


def busiest_load(work: Work, partition: Partition, world_size: int) -> int:
    """Pairs that the queries of the busiest rank see."""
    loads = np.zeros(world_size, dtype=work.table.dtype)
    np.add.at(loads, partition.owners, work.areas(partition.begins, partition.ends))
    return int(loads.max())


def cost(work: Work, partition: Partition, world_size: int) -> int:
    """Pairs that all ranks together could compute until the ring is done and all has travelled."""
    makespan, num_received = ring_cost(work, partition, world_size)
    return world_size * makespan + TOKEN * work.num_rows * num_received


def ring_cost(work: Work, partition: Partition, world_size: int) -> tuple[int, int]:
    """When the last rank is done, in pairs, and the positions that all ranks receive."""
    begins, ends, owners = partition
    ranges, slices, first, end = work.seen(begins, ends)
    num_received = _num_received(partition, owners[ranges], first, end)
    # The pieces that have any of the keys follow one another.
    key_first, key_end = np.searchsorted(ends, first, "right"), np.searchsorted(begins, end, "left")
    if (key_end - key_first).sum() > MAX_PAIRS:
        makespan = busiest_load(work, partition, world_size)
    else:
        pair, key = expanded(key_first, key_end)
        table, queries = work.table[slices[pair]], ranges[pair]
        table[:, 2] = np.maximum(table[:, 2], begins[key])
        table[:, 3] = np.minimum(table[:, 3], ends[key])
        found = areas(table, begins[queries], ends[queries])
        makespan = ring_makespan(owners[queries], owners[key], found, world_size)
    return makespan, num_received


def ring_makespan(
    viewers: np.ndarray, sources: np.ndarray, found: np.ndarray, world_size: int
) -> int:
    """When the last rank is done, in pairs, if keys go around the ring and messages take no time.

    A step of a rank begins when its step before is done, and the neighbours that it exchanges
    messages with meanwhile have begun theirs.

    Args:
        viewers: ranks whose queries see pairs; one for each entry, in any order.
        sources: the ranks that hold the keys.
        found: how many pairs.
        world_size: ranks on the ring.
    """
    ranks, distances = np.arange(world_size), (viewers - sources) % world_size
    after, before = (ranks + 1) % world_size, ranks - 1
    reaches = np.zeros(world_size, dtype=np.int64)
    np.maximum.at(reaches, sources, np.where(found > 0, distances, 0))
    num_steps = int(reaches.max()) + 1
    order = np.argsort(distances, kind="stable")
    bounds = np.searchsorted(distances[order], np.arange(num_steps + 1))
    begun = np.zeros(world_size, dtype=found.dtype)
    for step in range(num_steps):
        part = order[bounds[step] : bounds[step + 1]]
        done = begun.copy()
        np.add.at(done, viewers[part], found[part])
        # A packet goes on to the last rank that sees any of it.
        sends = reaches[(ranks - step) % world_size] > step
        done = np.maximum(done, np.where(sends, begun[after], 0))
        begun = np.maximum(done, np.where(sends[before], begun[before], 0))
    return int(begun.max())


def _num_received(
    partition: Partition, viewers: np.ndarray, first: np.ndarray, end: np.ndarray
) -> int:
    """Positions that ranks see and do not hold: each once for every rank that sees it."""
    if not len(partition.ends):
        return 0
    # One line of positions for each rank: the union of what it sees and holds, less what it holds.
    line = int(partition.ends[-1]) + 1
    owners = partition.owners
    begins = np.concatenate([viewers * line + first, owners * line + partition.begins])
    ends = np.concatenate([viewers * line + end, owners * line + partition.ends])
    order = np.argsort(begins, kind="stable")
    ends = np.maximum.accumulate(ends[order])
    covered = ends - np.maximum(begins[order], np.append(0, ends[:-1]))
    return int(np.maximum(covered, 0).sum() - (partition.ends - partition.begins).sum())
