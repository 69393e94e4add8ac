"""Who sees what of whom, against visibility written out."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_ring import BlockCyclic, Contiguous, Mask, Striped, ZigZag
from dtensor_ring.planning import demand
from dtensor_ring.planning import demand as demand_module
from dtensor_ring.planning.demand import (
    Cols,
    KeyDemand,
    LastHop,
    PacketStage,
    PairwiseDemand,
    Visibility,
)
from dtensor_ring.planning.mask import as_documents
from dtensor_ring.planning.plan import checked_slices
from dtensor_ring.planning.ranges import Span, length, moved
from dtensor_ring.planning.run_table import RunTable, shard_table
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.sweep import SortedDemand, WaveletMatrix
from tests.columns import cols_of, indices_of, union
from tests.drawn import examples
from tests.planning.test_plan import cross_rings, rings
from tests.rings import Ring
from tests.slices import shown, slices

Table = tuple[tuple[Cols, ...], ...]
"""By source, then by distance: the columns that the rank so many ranks on sees."""


class TableDemand(KeyDemand):
    """Needs written out."""

    def __init__(self, table: Table) -> None:
        self.table, self.world_size = table, len(table)

    def cols(self, source: int, rank: int) -> Cols:
        return self.table[source][(rank - source) % self.world_size]

    def seen_by(self, rank: int) -> dict[int, Cols]:
        seen = {source: self.cols(source, rank) for source in range(self.world_size)}
        return {source: cols for source, cols in seen.items() if cols}

    def seen_of(self, source: int) -> dict[int, Cols]:
        seen = {rank: self.cols(source, rank) for rank in range(self.world_size)}
        return {rank: cols for rank, cols in seen.items() if cols}

    def visible_to(self, rank: int) -> Visibility:
        return visibility_of({(source, rank): cols for source, cols in self.seen_by(rank).items()})

    def visibility_of(self, source: int) -> Visibility:
        return visibility_of({(source, rank): cols for rank, cols in self.seen_of(source).items()})

    @property
    def last_hops(self) -> LastHop:
        rows = []
        for source, row in enumerate(self.table):
            furthest = {i: distance for distance, cols in enumerate(row) for i in indices_of(cols)}
            rows += [(source, i, i + 1, furthest[i]) for i in sorted(furthest)]
        return LastHop(*np.array(rows, dtype=np.int64).reshape(-1, 4).T)

    def visibility(self) -> Iterator[Visibility]:
        return map(self.visibility_of, range(self.world_size))


def visibility_of(seen: dict[tuple[int, int], Cols]) -> Visibility:
    """What is seen, by source and viewer."""
    rows = [(*pair, *span) for pair, cols in seen.items() for span in cols.spans]
    return Visibility(*np.array(rows, dtype=np.int64).reshape(-1, 4).T)


def written_out(seen: np.ndarray, queries: list[list[int]], keys: list[list[int]]) -> Table:
    """Who sees what, of `(S, T)` visible pairs, and the positions of each rank."""
    world_size = len(keys)

    def needed(source: int, distance: int) -> Cols:
        rows = seen[queries[(source + distance) % world_size]]
        return cols_of(np.flatnonzero(rows[:, keys[source]].any(0)).tolist() if distance else [])

    ranks = range(world_size)
    return tuple(tuple(needed(source, distance) for distance in ranks) for source in ranks)


def table_of(ring: Ring) -> Table:
    """By what is visible in any row of the batch."""
    ranks = range(ring.world_size)
    sides = ([ring.positions(rank, of_keys).tolist() for rank in ranks] for of_keys in (0, 1))
    return written_out(ring.visible().any(0).numpy(), *sides)


def demand_of(
    ring: Ring, kind: type[SortedDemand] | type[PairwiseDemand] | None = None
) -> KeyDemand:
    """As the planner makes them, or by the given way to find them."""
    documents, key_documents = (
        as_documents(rows, keep_empty=True) for rows in (ring.documents, ring.key_documents)
    )
    slices = checked_slices(
        *(ring.mask, ring.world_size, ring.seq_lens, documents, key_documents, ring.slices)
    )
    queries, keys = (
        shard_table(ring.layout, ring.world_size, seq_len) for seq_len in ring.seq_lens
    )
    chosen = SortedDemand if queries.stride == keys.stride == 1 else PairwiseDemand
    return (kind or chosen)(queries, keys, slices)


def everything(demand: KeyDemand) -> tuple:
    """All that routes may ask."""
    ranks = range(demand.world_size)
    visibility = [
        row
        for block in demand.visibility()
        for row in zip(*(x.tolist() for x in block))  # noqa: B905
    ]
    return (
        [demand.seen_by(rank) for rank in ranks],
        [demand.seen_of(rank) for rank in ranks],
        (one_by_one(demand.last_hops), sorted(visibility)),
        (demand.around_load, demand.direct_is_lighter),
    )


def one_by_one(last_hops: LastHop) -> list[tuple[int, int, int]]:
    """Source, column and distance of each column; no column comes twice."""
    rows = zip(*(x.tolist() for x in last_hops), strict=True)
    found = [(source, i, distance) for source, *span, distance in rows for i in range(*span)]
    assert len({x[:2] for x in found}) == len(found)
    assert found == sorted(found)
    return found


@settings(deadline=None, max_examples=examples(120))
@given(rings() | cross_rings(), st.sampled_from([1, 30, 2**20]))
def test_demand_is_what_is_visible(ring: Ring, block: int) -> None:
    expected = everything(TableDemand(table_of(ring)))
    blocks, demand_module.BLOCK = demand_module.BLOCK, block
    try:
        assert everything(demand_of(ring)) == expected
        assert everything(demand_of(ring, PairwiseDemand)) == expected, (
            "in pairs, whatever the stride"
        )
    finally:
        demand_module.BLOCK = blocks


@st.composite
def run_tables(draw: st.DrawFn, world_size: int) -> RunTable:
    """Tokens sharded in blocks to any rank, from any position on."""
    block, begin = draw(st.sampled_from([1, 3, 8])), draw(st.sampled_from([0, 0, 5]))
    ranks = st.integers(0, world_size - 1)
    owners = draw(st.lists(ranks, min_size=world_size, max_size=5 * world_size))
    return RunTable(
        [
            [(begin + block * i, block) for i, owner in enumerate(owners) if owner == rank]
            for rank in range(world_size)
        ]
    )


@st.composite
def narrow_bands(draw: st.DrawFn, seq_lens: tuple[int, int]) -> Slices:
    """A slice of all tokens in each row, in which a query sees few keys."""
    rows = []
    for _ in range(draw(st.integers(1, 2))):
        left, width = draw(st.integers(-seq_lens[1], seq_lens[0])), draw(st.integers(0, 4))
        rows.append([(0, seq_lens[0], 0, seq_lens[1], left, width - left)])
    return Slices.of_tables(rows)


@settings(deadline=None, max_examples=examples(120))
@given(st.data(), st.integers(1, 4), st.sampled_from([1, 30, 2**20]))
def test_demand_of_sides_that_are_sharded_differently(
    data: st.DataObject, world_size: int, block: int
) -> None:
    """Long runs of keys between short ones of queries are seen with gaps, under narrow bands."""
    layouts = [data.draw(run_tables(world_size)) for _ in range(2)]
    seq_lens = layouts[0].end, layouts[1].end
    shard_tables = [shard_table(x, world_size, n) for x, n in zip(layouts, seq_lens, strict=True)]
    held = [
        [layout.positions(rank, world_size, seq_len) for rank in range(world_size)]
        for layout, seq_len in zip(layouts, seq_lens, strict=True)
    ]
    given = data.draw(slices(seq_lens, data.draw(st.integers(1, 2)), 4) | narrow_bands(seq_lens))
    seen = np.any([shown(table, seq_lens) for table in given], axis=0)
    expected = everything(TableDemand(written_out(seen, *held)))
    blocks, demand_module.BLOCK = demand_module.BLOCK, block
    try:
        for kind in (SortedDemand, PairwiseDemand):
            assert everything(kind(*shard_tables, given)) == expected
    finally:
        demand_module.BLOCK = blocks


GAPS = {
    "between two runs": Ring(ZigZag(), 2, 32, Mask.local(2, 3)),
    "many runs": Ring(BlockCyclic(6), 3, 96, Mask.local(1, 2)),
    "ends that touch": Ring(ZigZag(), 2, 16, Mask.local(4, 4)),
    "rows": Ring(Contiguous(), 2, 16, Mask.causal(), ((0, 4, 12), (0, 7, 9))),
    "documents": Ring(Striped(), 4, 64, Mask.sliding(4), ((0, 30, 64, 64), (0, 16, 17, 40))),
}


@pytest.mark.parametrize("ring", GAPS.values(), ids=list(GAPS))
def test_gaps_are_not_seen(ring: Ring) -> None:
    expected = everything(TableDemand(table_of(ring)))
    assert everything(demand_of(ring)) == everything(demand_of(ring, PairwiseDemand)) == expected


@settings(deadline=None, max_examples=examples(60))
@given(rings())
def test_too_many_pairs_count_more_as_seen_on_both_sides(ring: Ring) -> None:
    exact, most = table_of(ring), demand.MAX_PAIRS
    demand.MAX_PAIRS = 0
    try:
        found = demand_of(ring, PairwiseDemand)
        ranks = range(found.world_size)
        table = tuple(
            tuple(found.seen_by((source + i) % len(ranks)).get(source, Cols()) for i in ranks)
            for source in ranks
        )
        assert everything(found) == everything(TableDemand(table))
    finally:
        demand.MAX_PAIRS = most
    num_runs = [
        len(shard) for shard in shard_table(ring.layout, ring.world_size, ring.seq_len).shards
    ]
    for source, row in enumerate(table):
        for i, cols in enumerate(row):
            needed = exact[source][i]
            assert union([cols, needed]) == cols, "at least what is seen"
            assert bool(cols) == bool(needed)
            num_pairs = num_runs[source] * num_runs[(source + i) % len(ranks)]
            assert len(cols.spans) <= num_pairs * ring.batch, "one for each pair of runs and row"


def test_demand_of_a_batch_without_rows() -> None:
    sharded = shard_table(Striped(), 2, 8)
    for kind in (SortedDemand, PairwiseDemand):
        demand = kind(sharded, sharded, Slices.of_tables(()))
        assert demand.stages == [(), ()]
        assert demand.seen_by(0) == demand.seen_of(0) == {}


@st.composite
def tables(draw: st.DrawFn) -> Table:
    world_size = draw(st.integers(1, 6))
    some = st.just(Cols()) | st.sets(st.integers(0, 12), min_size=1).map(cols_of)
    others = st.lists(some, min_size=world_size - 1, max_size=world_size - 1)
    rows = draw(st.lists(others, min_size=world_size, max_size=world_size))
    return tuple((Cols(), *row) for row in rows)


def stages_written_out(row: tuple[Cols, ...]) -> list[Cols]:
    """What the packet of a source holds, by distance: an eighth that nobody needs is left."""
    held = [Cols()]
    for distance in range(1, len(row)):
        needed = union(row[distance:])
        before = held[-1] if distance > 1 else needed
        held.append(needed if 8 * (len(before) - len(needed)) >= len(before) else before)
    return held


@given(tables())
def test_packets_leave_behind_what_nobody_further_on_sees(table: Table) -> None:
    demand = TableDemand(table)
    for source, row in enumerate(table):
        held = stages_written_out(row)
        for distance, cols in enumerate(held[1:], 1):
            stage = demand.stage(source, distance)
            assert stage.cols == cols
            if not cols:
                assert stage == PacketStage()
                continue
            later = held[stage.last + 1] if stage.last + 1 < len(row) else Cols()
            assert later != cols
            assert not {*indices_of(stage.ending)} & {*indices_of(later)}
            assert union([stage.ending, later]) == cols
        assert demand.stage(source, len(row)) == PacketStage()


@given(tables())
def test_loads_are_those_of_all_hops_summed(table: Table) -> None:
    demand, ranks = TableDemand(table), range(len(table))
    around = [
        sum(len(stages_written_out(table[rank - i])[i]) for i in ranks if i) for rank in ranks
    ]
    received, sent = (
        [sum(map(len, seen(rank).values())) for rank in ranks]
        for seen in (demand.seen_by, demand.seen_of)
    )
    around_load = max(around) + Fraction(sum(around), len(table))
    assert demand.around_load == around_load
    direct_load = max(received + sent) + Fraction(sum(received), len(table))
    assert demand.direct_is_lighter == (5 * direct_load < 4 * around_load)


@given(st.data(), st.integers(1, 40))
def test_order_statistics_of_ranges(data: st.DataObject, num_values: int) -> None:
    values = data.draw(st.lists(st.integers(0, num_values - 1), min_size=1, max_size=30))
    matrix = WaveletMatrix(np.array(values), num_values)
    ranges = [(i, j) for i in range(len(values)) for j in range(i + 1, len(values) + 1)]
    begin, end = np.array(ranges).T
    for limit in {0, num_values // 2, num_values - 1}:
        counts = matrix.count_below(begin, end, np.full_like(begin, limit)).tolist()
        assert counts == [sum(x < limit for x in values[i:j]) for i, j in ranges]
    for k in range(3):
        found = matrix.kth(begin, end, np.minimum(k, end - begin - 1)).tolist()
        assert found == [sorted(values[i:j])[min(k, j - i - 1)] for i, j in ranges]


# Columns as spans, against columns one by one.

spans = st.tuples(st.integers(0, 30), st.integers(0, 5)).map(lambda x: (x[0], x[0] + x[1]))


@given(st.lists(spans))
def test_columns(some: list[Span]) -> None:
    indices = [i for span in some for i in range(*span)]
    cols = Cols.union(some)
    assert cols == cols_of(indices)
    assert hash(cols) == hash(cols_of(indices))
    assert len(cols) == len(set(indices))
    held = indices_of(cols)
    for span in some:
        if length(span):
            assert held[slice(*cols.packed(span))] == list(range(*span))


@given(st.lists(spans))
def test_spans(some: list[Span]) -> None:
    assert [length(span) for span in some] == [len(range(*span)) for span in some]
    assert all(list(range(*moved(x, 3))) == [i + 3 for i in range(*x)] for x in some)
