"""The hands of the ranks while a sequence is dealt: what they hold, and what fits."""

from __future__ import annotations

import numpy as np

from dtensor_ring.planning.run import shard_length
from dtensor_ring.planning.work import Units, Work
from dtensor_ring.planning.worth import Pieces

RESERVE = 64
"""Of a shard, the part that is dealt last, in the order of positions: so all shards get full."""

FINE = 16
"""Steps in which areas per token are compared, by token: they are integers, alike everywhere."""

FULLEST = 20
"""A part of a unit that takes more than 19 of 20 tokens of a shard leaves no room to even it out."""

MAX_SEATS = 2**20
"""Numbers that are compared to find neighbouring ranks for the parts of a unit."""


class Hands:
    """Deals units to ranks so that areas get even and each rank gets its number of tokens."""

    def __init__(self, work: Work, world_size: int, seq_len: int, reserve: int = RESERVE) -> None:
        self._work, self._world_size = work, world_size
        self._mean = -(-work.total // world_size)
        full = np.array([shard_length(rank, world_size, seq_len) for rank in range(world_size)])
        self._kept = np.minimum(full, -(-full // reserve)) if reserve else np.zeros_like(full)
        self._room = full - self._kept
        self._loads = np.zeros(world_size, dtype=work.table.dtype)
        self._pieces: list[tuple[int, int, int]] = []
        self._left: list[tuple[int, int]] = []

    def deal_parted(self, units: Units, num_parts: np.ndarray) -> None:
        """Deal each unit in parts of equal areas to neighbours on the ring, the largest unit first.

        A part sees what the ranks before it hold, so nobody waits long, and little travels. Where a
        part is too long for a shard, parts hold an early and a late piece each, as zigzag's do.
        """
        edges = self._work.cuts(units, num_parts)
        longest = int(self._room.max())
        for index in np.lexsort((units.begins, -units.areas)).tolist():
            begin, end = int(units.begins[index]), int(units.ends[index])
            bounds = edges[index]
            if FULLEST * int(np.diff(bounds).max()) <= (FULLEST - 1) * longest:
                parts = np.stack([bounds[:-1], bounds[1:]], axis=1)[:, None]
            else:
                parts = _folded(begin, end, max(int(num_parts[index]), -((begin - end) // max(1, longest))), self._world_size)
            if not self._seat(parts):
                self._left.append((begin, end))

    def deal_whole(self, units: Units) -> None:
        """Deal units to one rank each, those that see most per token first.

        Each goes to the rank that lacks most area per token: at the end all lack the same.
        """
        lengths = units.ends - units.begins
        densities = FINE * units.areas // lengths
        for index in np.lexsort((units.begins, -densities)).tolist():
            begin, end = int(units.begins[index]), int(units.ends[index])
            fits = np.flatnonzero(self._room >= end - begin)
            if not fits.size:
                self._left.append((begin, end))
                continue
            lacks = FINE * (self._mean - self._loads[fits]) // (self._room + self._kept)[fits]
            rank = int(fits[np.argmax(lacks)])
            self._give(begin, end, rank)
            self._loads[rank] += units.areas[index]

    def dealt(self) -> Pieces:
        """All pieces, with what is left dealt in the order of positions until all ranks are full."""
        rooms = (self._room + self._kept).tolist()
        rank = 0
        for begin, end in sorted(self._left):
            while begin < end:
                while not rooms[rank]:
                    rank += 1
                length = min(end - begin, rooms[rank])
                rooms[rank] -= length
                self._pieces.append((begin, begin + length, rank))
                begin += length
        return Pieces.of(self._pieces)

    def _seat(self, parts: np.ndarray) -> bool:
        """Give the parts, `(M, pieces, 2)`, to those neighbours who are least busy then."""
        num_parts, num_pieces, _ = parts.shape
        lengths = (parts[..., 1] - parts[..., 0]).sum(1)
        found = self._work.areas(*parts.reshape(-1, 2).T).reshape(num_parts, num_pieces).sum(1)
        starts = np.arange(0, self._world_size, -(-self._world_size * num_parts // MAX_SEATS))
        seats = (starts[:, None] + np.arange(num_parts)) % self._world_size
        fits = np.flatnonzero((self._room[seats] >= lengths).all(1))
        if not fits.size:
            return False
        loads = (self._loads[seats[fits]] + found).max(1)
        ranks = seats[fits[np.argmin(loads)]]
        for rank, part, area in zip(ranks.tolist(), parts.tolist(), found, strict=True):
            for begin, end in part:
                self._give(begin, end, rank)
            self._loads[rank] += area
        return True

    def _give(self, begin: int, end: int, rank: int) -> None:
        self._room[rank] -= end - begin
        self._pieces.append((begin, end, rank))


def _folded(begin: int, end: int, num_parts: int, world_size: int) -> np.ndarray:
    """Parts of equal lengths with an early and a late piece each, `(M, 2, 2)`."""
    num_parts = min(num_parts, world_size)
    edges = begin + (end - begin) * np.arange(2 * num_parts + 1) // (2 * num_parts)
    pieces = np.stack([edges[:-1], edges[1:]], axis=1)
    return np.stack([pieces[:num_parts], pieces[: num_parts - 1 : -1]], axis=1)
