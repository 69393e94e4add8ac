"""What a dealing is worth: how even it is, how long ranks wait for one another, what has to travel."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dtensor_ring.planning.areas import areas
from dtensor_ring.planning.work import Work, expanded

MAX_PAIRS = 2**20
"""Pairs of pieces that steps are computed for, in about 0.2 s."""

TOKEN = 2048
"""Pairs that are computed while the key and value of one token travel.

With 32 query heads and 8 key heads of 128 in 16 bits: 16 Kflop and 4 KiB, at 500 Tflop/s and 50 GB/s.
"""


class Pieces(NamedTuple):
    """The whole sequence in pieces, by position, and the rank that holds each: arrays."""

    begins: np.ndarray
    ends: np.ndarray
    owners: np.ndarray

    @classmethod
    def of(cls, pieces: list[tuple[int, int, int]]) -> Pieces:
        """Of begin, end and owner in any order, without empty ones; neighbours of one rank as one."""
        table = np.array(sorted(x for x in pieces if x[0] < x[1]), dtype=np.int64).reshape(-1, 3)
        begins, ends, owners = table.T
        first = np.flatnonzero(np.append(len(owners) > 0, owners[1:] != owners[:-1]))
        last = np.append(first[1:], len(owners)) - 1 if len(first) else first
        return cls(begins[first], ends[last], owners[first])


class Worth(NamedTuple):
    """What a dealing is worth."""

    busiest: int
    """Pairs of the rank that computes most."""
    makespan: int
    """Pairs that could be computed until the last rank is done, see `_makespan`."""
    num_received: int
    """Tokens that come to all ranks together: keys that a rank sees and does not hold."""

    def is_even(self, total: int, world_size: int) -> bool:
        """Whether the busiest rank is within a twentieth of the mean."""
        return 20 * world_size * self.busiest <= 21 * total

    def cost(self, world_size: int) -> int:
        """Pairs that all ranks together could compute in the time that this takes."""
        return world_size * self.makespan + TOKEN * self.num_received


def worth_of(work: Work, pieces: Pieces, world_size: int) -> Worth:
    """What it is worth to deal these pieces, without building a tile."""
    loads = np.zeros(world_size, dtype=work.table.dtype)
    np.add.at(loads, pieces.owners, work.areas(pieces.begins, pieces.ends))
    busiest = int(loads.max())
    ranges, slices, first, end = work.seen(pieces.begins, pieces.ends)
    viewers = pieces.owners[ranges]
    num_received = _num_received(pieces, viewers, first, end) * work.num_rows
    key_first = np.searchsorted(pieces.ends, first, "right")
    key_end = np.searchsorted(pieces.begins, end, "left")
    if (key_end - key_first).sum() > MAX_PAIRS:
        return Worth(busiest, busiest, num_received)  # as if nobody waited
    pair, key = expanded(key_first, key_end)
    table = work.table[slices[pair]]
    table[:, 2] = np.maximum(table[:, 2], pieces.begins[key])
    table[:, 3] = np.minimum(table[:, 3], pieces.ends[key])
    found = areas(table, pieces.begins[ranges[pair]], pieces.ends[ranges[pair]])
    makespan = _makespan(viewers[pair], pieces.owners[key], found, world_size)
    return Worth(busiest, makespan, num_received)


def _num_received(
    pieces: Pieces, viewers: np.ndarray, first: np.ndarray, end: np.ndarray
) -> int:
    """Positions that ranks see and do not hold, each once for every rank that sees it."""
    if not len(pieces.ends):
        return 0
    # One line of positions for each rank: a union of what it sees and holds, less what it holds.
    line = int(pieces.ends[-1]) + 1
    begins = np.concatenate([viewers * line + first, pieces.owners * line + pieces.begins])
    ends = np.concatenate([viewers * line + end, pieces.owners * line + pieces.ends])
    order = np.argsort(begins, kind="stable")
    ends = np.maximum.accumulate(ends[order])
    covered = ends - np.maximum(begins[order], np.append(0, ends[:-1]))
    return int(np.maximum(covered, 0).sum()) - int((pieces.ends - pieces.begins).sum())


def _makespan(
    viewers: np.ndarray, sources: np.ndarray, found: np.ndarray, world_size: int
) -> int:
    """When the last rank is done, if shards go around the ring and messages take no time.

    A step of a rank begins when its step before is done, and both neighbours that it exchanges
    messages with meanwhile have begun theirs.
    """
    ranks, distances = np.arange(world_size), (viewers - sources) % world_size
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
        # The packet of a rank goes on to the last that sees any of it.
        sends = reaches[(ranks - step) % world_size] > step
        done = np.maximum(done, np.where(sends, np.roll(begun, -1), 0))
        begun = np.maximum(done, np.where(np.roll(sends, 1), np.roll(begun, 1), 0))
    return int(begun.max())
