"""A partition of the sequence into pieces, each on one rank, and how it is built."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dtensor_ring.balanced.work import AttentionWork, Units
from dtensor_ring.planning.layout import Layout, Run, shard_length


class Partition(NamedTuple):
    """The pieces of a sequence, in the order of positions. Adjacent pieces are on different ranks.

    Attributes:
        begins: first position of each piece.
        ends: position after the last one of each piece.
        owners: the rank that holds each piece.
    """

    begins: np.ndarray
    ends: np.ndarray
    owners: np.ndarray

    @classmethod
    def of(cls, pieces: list[tuple[int, int, int]]) -> Partition:
        """Build a partition from (begin, end, owner) in any order; empty pieces are dropped.

        >>> Partition.of([(4, 6, 0), (0, 2, 1), (2, 4, 1), (2, 2, 0)]).ends
        array([4, 6])
        """
        filled = sorted(piece for piece in pieces if piece[0] < piece[1])
        begins, ends, owners = np.array(filled, dtype=np.int64).reshape(-1, 3).T
        is_other = owners[1:] != owners[:-1]
        first, last = (np.flatnonzero(np.insert(is_other, at, True)) for at in (0, len(is_other)))
        return (
            cls(begins[first], ends[last], owners[first]) if filled else cls(begins, ends, owners)
        )

    @classmethod
    def of_layout(cls, layout: Layout, world_size: int, seq_len: int) -> Partition:
        """Build the partition of a layout whose runs have stride 1."""
        return cls.of(
            [
                (run.start, run.start + run.length, rank)
                for rank in range(world_size)
                for run in layout.runs(rank, world_size, seq_len)
            ]
        )

    @property
    def max_runs(self) -> int:
        """The largest number of pieces that a rank holds."""
        return int(np.bincount(self.owners, minlength=1).max())

    def runs(self, world_size: int) -> tuple[tuple[Run, ...], ...]:
        """Return the runs of each rank."""
        runs: list[list[Run]] = [[] for _ in range(world_size)]
        for begin, end, owner in zip(*(x.tolist() for x in self), strict=True):
            runs[owner].append(Run(begin, end - begin))
        return tuple(map(tuple, runs))


# Fraction of a shard (1/64) filled last, in the order of positions, so that all shards end up full.
RESERVE = 64

# Area per token is compared in 16ths. Integers make the result the same on every machine.
FINE = 16

# A part above 19/20 of a shard leaves its rank no room for other units to balance it.
FULLEST = 20

# The largest number of entries compared to find neighbouring ranks for the parts of a unit.
MAX_CANDIDATES = 2**20


class Packer:
    """Assign units to ranks so that areas are even and each rank gets its number of tokens."""

    def __init__(
        self, work: AttentionWork, world_size: int, seq_len: int, reserve: int = RESERVE
    ) -> None:
        self._work, self._world_size = work, world_size
        self._mean = -(-work.total // world_size)
        full = np.array([shard_length(rank, world_size, seq_len) for rank in range(world_size)])
        kept = -(-full // reserve) if reserve else np.zeros_like(full)
        self._room, self._kept = full - kept, kept.tolist()
        self._loads = [0] * world_size
        self._pieces: list[tuple[int, int, int]] = []
        self._left: list[tuple[int, int]] = []

    def pack_parts(self, units: Units, num_parts: np.ndarray) -> None:
        """Assign parts of equal area to neighbours on the ring, beginning with the largest unit.

        A part sees keys of the ranks just before its own, so waits are short and few tokens travel.
        If a part is too long for a shard, parts hold an early and a late piece each, as in zigzag.
        """
        if not len(num_parts):
            return
        edges = self._work.cuts(units, num_parts)
        for index in np.lexsort((units.begins, -units.areas)).tolist():
            begin, end = int(units.begins[index]), int(units.ends[index])
            longest = max(1, int(self._room.max()))
            parts = np.stack([edges[index][:-1], edges[index][1:]], axis=1)[:, None]
            if FULLEST * (parts[..., 1] - parts[..., 0]).max() > (FULLEST - 1) * longest:
                num_folded = max(int(num_parts[index]), -((begin - end) // longest))
                parts = _folded(begin, end, min(num_folded, self._world_size))
            if not self._place_parts(parts):
                self._left.append((begin, end))

    def pack_units(self, units: Units) -> None:
        """Assign each unit to one rank, beginning with the largest area per token.

        A unit goes to the rank that lacks the most area per token, which evens out the ranks.
        """
        densities = FINE * units.areas // (units.ends - units.begins)
        lacks = np.array([self._lack(rank) for rank in range(self._world_size)], densities.dtype)
        lowest = -FINE * self._work.total - 1
        order = np.lexsort((units.begins, -densities))
        for begin, end, area in zip(*(x[order].tolist() for x in units), strict=True):
            rank = int(np.where(self._room >= end - begin, lacks, lowest).argmax())
            if self._room[rank] < end - begin:
                self._left.append((begin, end))
                continue
            self._assign(begin, end, rank, area)
            lacks[rank] = self._lack(rank)

    def _lack(self, rank: int) -> int:
        """Return the area that a rank lacks, per token that it lacks, in units of 1/`FINE`."""
        num_tokens = max(1, int(self._room[rank]) + self._kept[rank])
        return FINE * (self._mean - self._loads[rank]) // num_tokens

    def partition(self) -> Partition:
        """Return all pieces. Units left over fill rank after rank, in the order of positions."""
        rooms = [x + y for x, y in zip(self._room.tolist(), self._kept, strict=True)]
        rank = 0
        for begin, end in sorted(self._left):
            while begin < end:
                while not rooms[rank]:
                    rank += 1
                length = min(end - begin, rooms[rank])
                rooms[rank] -= length
                self._pieces.append((begin, begin + length, rank))
                begin += length
        return Partition.of(self._pieces)

    def _place_parts(self, parts: np.ndarray) -> bool:
        """Assign parts `(M, pieces, 2)` to the least busy neighbours; return whether they fit."""
        num_parts, num_pieces, _ = parts.shape
        lengths = (parts[..., 1] - parts[..., 0]).sum(1)
        found = self._work.areas(*parts.reshape(-1, 2).T).reshape(num_parts, num_pieces)
        starts = np.arange(0, self._world_size, -(-self._world_size * num_parts // MAX_CANDIDATES))
        candidates = (starts[:, None] + np.arange(num_parts)) % self._world_size
        fits = np.flatnonzero((self._room[candidates] >= lengths).all(1))
        if not fits.size:
            return False
        loads = (np.array(self._loads, found.dtype)[candidates[fits]] + found.sum(1)).max(1)
        ranks = candidates[fits[np.argmin(loads)]]
        for rank, part, areas in zip(ranks.tolist(), parts.tolist(), found.tolist(), strict=True):
            for (begin, end), area in zip(part, areas, strict=True):
                self._assign(begin, end, rank, area)
        return True

    def _assign(self, begin: int, end: int, rank: int, area: int) -> None:
        self._room[rank] -= end - begin
        self._loads[rank] += area
        self._pieces.append((begin, end, rank))


def _folded(begin: int, end: int, num_parts: int) -> np.ndarray:
    """Return parts of equal length with an early and a late piece each, `(M, 2, 2)`."""
    edges = begin + (end - begin) * np.arange(2 * num_parts + 1) // (2 * num_parts)
    pieces = np.stack([edges[:-1], edges[1:]], axis=1)
    # The last rank gets the latest piece. Ranks all around the ring see early pieces, only the next
    # ones see late pieces, so packets shrink as they travel.
    return np.stack([pieces[num_parts - 1 :: -1], pieces[num_parts:]], axis=1)
