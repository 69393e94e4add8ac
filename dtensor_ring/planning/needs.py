"""The columns of keys that ranks see of one another, by which routes decide."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dtensor_ring.planning.span import NOTHING, Span, length

NUM_PROBES = 4
"""Evenly spaced ranks that are looked at before all are."""

BLOCK = 2**21
"""Pairs of pieces of shards that are compared at once, about 16 MiB for each array of them."""


class Sights(NamedTuple):
    """Columns that ranks see of sources: arrays, one entry for each sight, none of them empty."""

    sources: np.ndarray
    viewers: np.ndarray
    firsts: np.ndarray
    """First column of the source's shard."""
    ends: np.ndarray
    """One after the last column."""

    def reduced(self, world_size: int) -> Sights:
        """One entry for each source and viewer, the hull of all columns; in ascending order."""
        # One sort groups all sights of a pair of ranks; stable, so that it is quick on sorted
        # input.
        ids = self.sources * world_size + self.viewers
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        starts = np.flatnonzero(np.append(True, ids[1:] != ids[:-1])) if ids.size else ids
        if not starts.size:
            return Sights(*(x[:0] for x in self))
        firsts = np.minimum.reduceat(self.firsts[order], starts)
        ends = np.maximum.reduceat(self.ends[order], starts)
        return Sights(ids[starts] // world_size, ids[starts] % world_size, firsts, ends)


class _DirectTraffic(NamedTuple):
    """Arrays of columns by rank, and of how many pairs of ranks are at each distance."""

    sent: np.ndarray
    received: np.ndarray
    distances: np.ndarray


class Needs(ABC):
    """The columns of each source's shard that each other rank sees.

    A rank needs nothing of itself. Columns are the hull over all batch rows.
    """

    world_size: int

    @abstractmethod
    def seen_by(self, rank: int) -> dict[int, Span]:
        """The columns that `rank` sees, by source; nothing empty."""

    @abstractmethod
    def seen_of(self, source: int) -> dict[int, Span]:
        """The columns of the shard of `source` that others see, by rank; nothing empty."""

    @property
    @abstractmethod
    def hulls(self) -> list[Span]:
        """By source: from the first column that another rank sees to the last."""

    @property
    @abstractmethod
    def reaches(self) -> list[int]:
        """By source: distance on the ring to the last rank that sees any of its columns."""

    @abstractmethod
    def sights(self) -> Iterator[Sights]:
        """All there is, in blocks; all entries of a source are in one block."""

    @property
    def num_bytes(self) -> int:
        """Memory that this takes, in bytes."""
        return 200 * self.world_size

    @cached_property
    def ring_load(self) -> int:
        """Columns that the busiest rank receives, or sends, if hulls go around the ring."""
        reaches, (firsts, ends) = np.array(self.reaches), np.array(self.hulls).T
        sources = np.arange(self.world_size)
        # A packet comes to the `reach` ranks after its source: an interval, counted by its ends,
        # on two laps as it may pass rank 0. What a rank sends is what the next one receives.
        change = np.zeros(2 * self.world_size + 1, dtype=np.int64)
        np.add.at(change, sources + 1, ends - firsts)
        np.add.at(change, sources + reaches + 1, firsts - ends)
        laps = np.cumsum(change[:-1]).reshape(2, self.world_size)
        return int(laps.sum(0).max())

    @cached_property
    def direct_halves_load(self) -> bool:
        """Whether the busiest rank moves less than half as much directly as around the ring."""
        # Rounded up, so that a load below it is less than half.
        half = -(-self.ring_load // 2)
        # Most often a few ranks tell: one that needs half of the sequence settles it.
        probes = range(0, self.world_size, -(-self.world_size // NUM_PROBES))
        if any(self._direct_load(rank) >= half for rank in {*probes, self.world_size - 1}):
            return False
        return bool(max(self._direct.sent.max(), self._direct.received.max()) < half)

    @cached_property
    def distances(self) -> list[int]:
        """All numbers of ranks that lie between a source and one that sees it; ascending."""
        return np.flatnonzero(self._direct.distances).tolist()

    @cached_property
    def _direct(self) -> _DirectTraffic:
        """Traffic if all goes directly; computed in one pass, as it may take all pairs of ranks."""
        result = _DirectTraffic(*np.zeros((3, self.world_size), dtype=np.int64))
        for block in self.sights():
            np.add.at(result.sent, block.sources, block.ends - block.firsts)
            np.add.at(result.received, block.viewers, block.ends - block.firsts)
            result.distances[(block.viewers - block.sources) % self.world_size] += 1
        return result

    def _direct_load(self, rank: int) -> int:
        """Columns that a rank receives, or sends, if each goes directly to those who see it."""
        return max(
            sum(map(length, spans.values())) for spans in (self.seen_by(rank), self.seen_of(rank))
        )


def source_blocks(owners: np.ndarray, num_pairs: np.ndarray) -> Iterator[np.ndarray]:
    """Indices of keys in blocks of about `BLOCK` pairs; all keys of a source are in one block.

    Args:
        owners: the source of each key.
        num_pairs: how many queries each key is compared with.
    """
    order = np.argsort(owners, kind="stable")
    # A source must not be split: sights are reduced to one hull for each pair within a block.
    last = np.flatnonzero(np.diff(owners[order], append=-1))
    block = np.cumsum(num_pairs[order])[last] // BLOCK
    # A block ends with the last source before the running count passes a multiple of BLOCK.
    cuts = last[np.flatnonzero(np.diff(block, append=-1))] + 1
    for begin, end in pairwise([0, *cuts.tolist()]):
        yield order[begin:end]


def spans_by(ranks: np.ndarray, sights: Sights) -> dict[int, Span]:
    """The columns of each entry, by these ranks."""
    columns = zip(sights.firsts.tolist(), sights.ends.tolist(), strict=True)
    return dict(zip(ranks.tolist(), columns, strict=True))


def spans_of(firsts: np.ndarray, ends: np.ndarray) -> list[Span]:
    """Spans, `NOTHING` where they are empty."""
    pairs = zip(firsts.tolist(), ends.tolist(), strict=True)
    return [(first, end) if end > first else NOTHING for first, end in pairs]
