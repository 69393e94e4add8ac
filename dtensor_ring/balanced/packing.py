"""A sequence cut into pieces, each of one rank, and which of them fit a rank."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dtensor_ring.balanced.work import Units, Work
from dtensor_ring.planning.layout import Layout, Run, shard_length


class Partition(NamedTuple):
    """The pieces of a sequence, by position: arrays. Neighbours are of different ranks."""

    begins: np.ndarray
    ends: np.ndarray
    owners: np.ndarray
    """The rank that holds the piece."""

    @classmethod
    def of(cls, pieces: list[tuple[int, int, int]]) -> Partition:
        """Of begins, ends and owners, in any order; some may be empty.

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
    def dealt(cls, layout: Layout, world_size: int, seq_len: int) -> Partition:
        """That of a layout whose runs are of neighbouring tokens."""
        return cls.of(
            [
                (run.start, run.start + run.length, rank)
                for rank in range(world_size)
                for run in layout.runs(rank, world_size, seq_len)
            ]
        )

    @property
    def max_runs(self) -> int:
        """The most pieces that any rank holds."""
        return int(np.bincount(self.owners, minlength=1).max())

    def runs(self, world_size: int) -> tuple[tuple[Run, ...], ...]:
        """The runs of each rank."""
        runs: list[list[Run]] = [[] for _ in range(world_size)]
        for begin, end, owner in zip(*(x.tolist() for x in self), strict=True):
            runs[owner].append(Run(begin, end - begin))
        return tuple(map(tuple, runs))


RESERVE = 64
"""Of a shard, the part that is dealt last, in the order of positions: so all shards get full."""

FINE = 16
"""Steps in which areas per token are compared, by token: they are integers, alike everywhere."""

FULLEST = 20
"""A part that takes more than 19 of 20 tokens of a shard leaves no room to even its rank out."""

MAX_SEATS = 2**20
"""Numbers that are compared to find neighbouring ranks for the parts of a unit."""


class Hands:
    """Deals units to ranks so that areas get even and each rank gets its number of tokens."""

    def __init__(self, work: Work, world_size: int, seq_len: int, reserve: int = RESERVE) -> None:
        self._work, self._world_size = work, world_size
        self._mean = -(-work.total // world_size)
        full = np.array([shard_length(rank, world_size, seq_len) for rank in range(world_size)])
        kept = -(-full // reserve) if reserve else np.zeros_like(full)
        self._room, self._kept = full - kept, kept.tolist()
        self._loads = [0] * world_size
        self._pieces: list[tuple[int, int, int]] = []
        self._left: list[tuple[int, int]] = []

    def deal_parted(self, units: Units, num_parts: np.ndarray) -> None:
        """Deal each unit in parts of equal areas to neighbours on the ring, the largest unit first.

        A part sees what the ranks before it hold, so nobody waits long, and little travels. Where a
        part is too long for a shard, parts hold an early and a late piece each, as zigzag's do.
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
            if not self._seat(parts):
                self._left.append((begin, end))

    def deal_whole(self, units: Units) -> None:
        """Deal units to one rank each, those that see most per token first.

        Each goes to the rank that lacks most area per token: at the end all lack the same.
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
            self._give(begin, end, rank, area)
            lacks[rank] = self._lack(rank)

    def _lack(self, rank: int) -> int:
        """Area that a rank lacks for each token that it lacks."""
        num_tokens = max(1, int(self._room[rank]) + self._kept[rank])
        return FINE * (self._mean - self._loads[rank]) // num_tokens

    def dealt(self) -> Partition:
        """All pieces. What is left fills rank after rank, in the order of positions."""
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

    def _seat(self, parts: np.ndarray) -> bool:
        """Give the parts, `(M, pieces, 2)`, to those neighbours who are least busy then."""
        num_parts, num_pieces, _ = parts.shape
        lengths = (parts[..., 1] - parts[..., 0]).sum(1)
        found = self._work.areas(*parts.reshape(-1, 2).T).reshape(num_parts, num_pieces)
        starts = np.arange(0, self._world_size, -(-self._world_size * num_parts // MAX_SEATS))
        seats = (starts[:, None] + np.arange(num_parts)) % self._world_size
        fits = np.flatnonzero((self._room[seats] >= lengths).all(1))
        if not fits.size:
            return False
        loads = (np.array(self._loads, found.dtype)[seats[fits]] + found.sum(1)).max(1)
        ranks = seats[fits[np.argmin(loads)]]
        for rank, part, areas in zip(ranks.tolist(), parts.tolist(), found.tolist(), strict=True):
            for (begin, end), area in zip(part, areas, strict=True):
                self._give(begin, end, rank, area)
        return True

    def _give(self, begin: int, end: int, rank: int, area: int) -> None:
        self._room[rank] -= end - begin
        self._loads[rank] += area
        self._pieces.append((begin, end, rank))


def _folded(begin: int, end: int, num_parts: int) -> np.ndarray:
    """Parts of equal lengths with an early and a late piece each, `(M, 2, 2)`."""
    edges = begin + (end - begin) * np.arange(2 * num_parts + 1) // (2 * num_parts)
    pieces = np.stack([edges[:-1], edges[1:]], axis=1)
    # The latest piece goes to the last rank: early ones are seen all around the ring, late ones by
    # the next ranks only, so that packets get smaller on their way.
    return np.stack([pieces[num_parts - 1 :: -1], pieces[num_parts:]], axis=1)
