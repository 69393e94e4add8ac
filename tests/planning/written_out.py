"""What each route moves, written out from a table of key demand.

A new route gets a row in `HOPS` and in `COLUMNS`.
"""

from __future__ import annotations

from collections.abc import Callable

from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.route import (
    AllGatherRoute,
    AroundRoute,
    DirectRoute,
    Hop,
    Route,
    Transfer,
)
from tests.columns import cols_of, indices_of
from tests.planning.test_demand import Table, stages_written_out

Written = tuple[list[int], list[Hop], list[Hop]]
"""The sources of a rank's steps, and the hops of shards and of sums."""


def around(table: Table, rank: int) -> Written:
    """Of a rank that gets everything from the rank before it."""
    size = len(table)
    held = [[*stages_written_out(row), Cols()] for row in table]
    last_hops = max((i for row in held for i, cols in enumerate(row) if cols), default=0)
    sources, shards, sums = [(rank - i) % size for i in range(1 + last_hops)], [], []
    before, after = (rank - 1) % size, (rank + 1) % size
    for step, source in enumerate(sources):
        coming = (rank - 1 - step) % size
        passed = [Transfer(source, held[source][step + 1], after)]
        received = [Transfer(coming, held[coming][step + 1], before)]
        shards.append(hop_of(passed, received))
        # What is not passed on goes home.
        passed.append(Transfer(source, left_behind(held[source], step), source))
        received.append(Transfer(rank, left_behind(held[rank], step), (rank + step) % size))
        sums.append(hop_of(passed, received) if step else Hop())
    return sources, shards, sums


def left_behind(held: list[Cols], distance: int) -> Cols:
    """Columns that a packet holds at that distance, and no longer afterwards."""
    return cols_of({*indices_of(held[distance])} - {*indices_of(held[distance + 1])})


def hop_of(sends: list[Transfer], receives: list[Transfer]) -> Hop:
    """Nothing empty travels."""
    return Hop(*(tuple(x for x in side if x.cols) for side in (sends, receives)))


def direct(table: Table, rank: int) -> Written:
    """Of a rank that gets everything from its source."""
    sources, shards, sums = [rank], [], [Hop()]
    for distance in range(1, len(table)):
        source, target = (rank - distance) % len(table), (rank + distance) % len(table)
        sends = [Transfer(rank, table[rank][distance], target)]
        receives = [Transfer(source, table[source][distance], source)]
        hop = hop_of(sends, receives)
        if any(row[distance] for row in table):
            sources.append(source)
            shards.append(hop)
            sums.append(Hop(hop.receives, hop.sends))
    return sources, [*shards, Hop()], sums


def all_gather(table: Table, rank: int) -> Written:
    """Of a rank that gets everything at once."""
    sources, shards, sums = direct(table, rank)
    at_once = Hop(*(sum((hop[side] for hop in shards), ()) for side in (0, 1)))
    return sources, [at_once, *(Hop() for _ in shards[1:])], sums


HOPS: dict[type[Route], Callable[[Table, int], Written]] = {
    AroundRoute: around,
    DirectRoute: direct,
    AllGatherRoute: all_gather,
}
COLUMNS: dict[type[Route], Callable[[tuple[Cols, ...]], list[Cols]]] = {
    AroundRoute: stages_written_out,
    DirectRoute: list,
    AllGatherRoute: list,
}
"""From what each rank sees of a source, by distance: what it gets."""
