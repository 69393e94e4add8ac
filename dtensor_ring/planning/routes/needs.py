"""The columns of keys that ranks see of one another, by which routes decide."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dtensor_ring.planning.routes.columns import Cols, cols_by
from dtensor_ring.planning.routes.reach import Leg, Reach, legs_of
from dtensor_ring.planning.values.ranges import united

ONE_IN = 5
"""The direct route has to save one in so many of the load: see `ring_unless_sparse`."""

NUM_PROBES = 8
"""Evenly spaced ranks that are looked at before all are."""

ONE_IN_PROBED = 6
"""Those have to save one in so many: less than all must, as they are no more than a sample."""

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

    def united(self, world_size: int) -> Sights:
        """The same columns in as few entries as there can be, by source, then viewer, ascending."""
        ids, *spans = united(self.sources * world_size + self.viewers, self.firsts, self.ends)
        return Sights(ids // world_size, ids % world_size, *spans)


class _DirectTraffic(NamedTuple):
    """Arrays of columns by rank, and of how many pairs of ranks are at each distance."""

    received: np.ndarray
    sent: np.ndarray
    distances: np.ndarray


class Needs(ABC):
    """The columns of each source's shard that each other rank sees, in any row of the batch.

    A rank needs nothing of itself.
    """

    world_size: int

    @abstractmethod
    def sights(self) -> Iterator[Sights]:
        """All there is, united, in blocks; all entries of a source are in one block."""

    @abstractmethod
    def sights_by(self, rank: int) -> Sights:
        """What `rank` sees, united."""

    @abstractmethod
    def sights_of(self, source: int) -> Sights:
        """What is seen of the shard of `source`, united."""

    @property
    @abstractmethod
    def reach(self) -> Reach:
        """All columns that any other rank sees, with how far around the ring they are seen."""

    @cached_property
    def legs(self) -> list[tuple[Leg, ...]]:
        """By source: the way of its packet around the ring, see `legs_of`."""
        return legs_of(self.reach, self.world_size)

    def leg(self, source: int, distance: int) -> Leg:
        """The leg of a packet at that distance from its source; an empty one if it ends before."""
        return next((leg for leg in self.legs[source] if leg.last >= distance), Leg())

    def seen_by(self, rank: int) -> dict[int, Cols]:
        """The columns that `rank` sees, by source; nothing empty."""
        sources, _, *spans = self.sights_by(rank)
        return cols_by(sources, *spans)

    def seen_of(self, source: int) -> dict[int, Cols]:
        """The columns of the shard of `source` that others see, by rank; nothing empty."""
        _, *spans = self.sights_of(source)
        return cols_by(*spans)

    @property
    def num_bytes(self) -> int:
        """Memory that this takes, in bytes."""
        return 200 * self.world_size

    @cached_property
    def ring_load(self) -> Fraction:
        """Columns of the busiest rank plus the mean if all goes around the ring."""
        # A packet comes to the ranks after the last of the one before it, up to its own last: an
        # interval, counted by its ends, on two laps as it may pass rank 0. What a rank sends is
        # what the next one receives.
        change = np.zeros(2 * self.world_size + 1, dtype=np.int64)
        for source, legs in enumerate(self.legs):
            first = source + 1
            for leg in legs:
                change[first] += len(leg.cols)
                first = source + leg.last + 1
                change[first] -= len(leg.cols)
        received = np.cumsum(change[:-1]).reshape(2, self.world_size).sum(0)
        return _load(received, received)

    @cached_property
    def direct_is_lighter(self) -> bool:
        """Whether the load is less by more than a fifth if all goes directly."""
        # Most often a few ranks tell; all of them take as long as there are pairs of ranks.
        num_probes = min(NUM_PROBES, self.world_size)
        probes = [(2 * i + 1) * self.world_size // (2 * num_probes) for i in range(num_probes)]
        sample = [
            [int((x.ends - x.firsts).sum()) for x in (self.sights_by(rank), self.sights_of(rank))]
            for rank in probes
        ]
        if _load(*np.array(sample).T) >= (1 - Fraction(1, ONE_IN_PROBED)) * self.ring_load:
            return False
        received, sent, _ = self._direct
        return _load(received, sent) < (1 - Fraction(1, ONE_IN)) * self.ring_load

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


def _load(received: np.ndarray, sent: np.ndarray) -> Fraction:
    """By what routes are compared: columns of the busiest rank, plus those of a rank in the mean.

    Args:
        received: columns that come to each rank.
        sent: columns that leave it.
    """
    # Exact, as ranks must decide alike.
    mean = Fraction(int(received.sum() + sent.sum()), len(received) + len(sent))
    return mean + int(max(received.max(), sent.max()))


def source_blocks(owners: np.ndarray, num_pairs: np.ndarray) -> Iterator[np.ndarray]:
    """Indices of keys in blocks of about `BLOCK` pairs; all keys of a source are in one block.

    Args:
        owners: the source of each key.
        num_pairs: how many queries each key is compared with.
    """
    order = np.argsort(owners, kind="stable")
    # A source must not be split: sights are united for each pair of ranks within a block.
    last = np.flatnonzero(np.diff(owners[order], append=-1))
    block = np.cumsum(num_pairs[order])[last] // BLOCK
    # A block ends with the last source before the running count passes a multiple of BLOCK.
    cuts = last[np.flatnonzero(np.diff(block, append=-1))] + 1
    for begin, end in pairwise([0, *cuts.tolist()]):
        yield order[begin:end]
