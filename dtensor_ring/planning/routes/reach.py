"""How far around the ring columns are seen, and what a packet holds on each leg of its way."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dtensor_ring.planning.routes.columns import Cols, cols_by
from dtensor_ring.planning.values.ranges import numbered, united

ONE_OFF = 8
"""A packet leaves columns behind where they are one in so many of it, or more.

It costs a copy of the others, and a message that takes the sum of their gradients home. So a packet
holds at most a seventh more than is seen further on, and stays whole under a plain causal mask.
"""


class Reach(NamedTuple):
    """Columns that other ranks see, each once: arrays, by source, ascending, none of them empty."""

    sources: np.ndarray
    firsts: np.ndarray
    """First column of the source's shard."""
    ends: np.ndarray
    """One after the last column."""
    distances: np.ndarray
    """From the source to the last rank on the ring that sees them."""


class Leg(NamedTuple):
    """A part of the way around the ring on which a packet holds the same columns."""

    last: int = 0
    """Distance from the source to the last rank that gets these columns."""
    cols: Cols = Cols()
    ending: Cols = Cols()
    """Those that go no further."""


def legs_of(reach: Reach, world_size: int) -> list[tuple[Leg, ...]]:
    """By source: the legs of its packet, each with what is seen from its first rank on.

    A packet begins with all columns that any rank sees. On its way it leaves those behind that
    nobody further on sees, where they are enough, see `ONE_OFF`.
    """
    stops = _stops(reach, world_size)
    # Legs are numbered through. Columns are on all legs of their source up to where they end.
    ids = np.arange(world_size) * world_size
    begins, keys = np.searchsorted(stops, ids), reach.sources * world_size + reach.distances
    last = np.searchsorted(stops, keys)
    whose, number = numbered(1 + last - begins[reach.sources])
    legs = begins[reach.sources[whose]] + number
    spans = reach.firsts, reach.ends
    cols = cols_by(*united(legs, *(x[whose] for x in spans)))
    ending = cols_by(*united(last, *spans))
    all_legs = [Leg(x % world_size, cols[i], ending[i]) for i, x in enumerate(stops.tolist())]
    bounds = pairwise([*begins.tolist(), len(stops)])
    return [tuple(all_legs[begin:end]) for begin, end in bounds]


def _stops(reach: Reach, world_size: int) -> np.ndarray:
    """Where packets leave columns behind: `source * world_size + distance`, ascending."""
    keys, which = np.unique(reach.sources * world_size + reach.distances, return_inverse=True)
    counts, left = np.zeros(len(keys), dtype=np.int64), np.zeros(world_size, dtype=np.int64)
    np.add.at(counts, which, reach.ends - reach.firsts)
    np.add.at(left, keys // world_size, counts)
    stops, sizes, left = [], left.tolist(), left.tolist()
    for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
        source = key // world_size
        left[source] -= count
        if ONE_OFF * (sizes[source] - left[source]) >= sizes[source]:
            stops.append(key)
            sizes[source] = left[source]
    return np.array(stops, dtype=np.int64)
