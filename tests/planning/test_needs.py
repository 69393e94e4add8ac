"""Who sees what of whom, against visibility written out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_ring.planning import needs as needs_module
from dtensor_ring.planning.dealing import deal
from dtensor_ring.planning.documents import as_documents
from dtensor_ring.planning.needs import Needs, Sights
from dtensor_ring.planning.pairs import PairedNeeds
from dtensor_ring.planning.plan import checked_slices
from dtensor_ring.planning.span import NOTHING, Span, length
from dtensor_ring.planning.sweep import SweptNeeds
from dtensor_ring.planning.wavelet import WaveletMatrix
from tests.planning.test_plan import cross_rings, rings
from tests.rings import Ring

Table = tuple[tuple[Span, ...], ...]
"""By source, then by distance: the columns that the rank so many ranks on sees."""


def hull(spans: Iterable[Span]) -> Span:
    """From the first index in any of the spans to the last."""
    some = [span for span in spans if length(span)]
    return (min(first for first, _ in some), max(end for _, end in some)) if some else NOTHING


class TableNeeds(Needs):
    """Needs written out."""

    def __init__(self, table: Table) -> None:
        self.table, self.world_size = table, len(table)

    def span(self, source: int, rank: int) -> Span:
        return self.table[source][(rank - source) % self.world_size]

    def seen_by(self, rank: int) -> dict[int, Span]:
        spans = {source: self.span(source, rank) for source in range(self.world_size)}
        return {source: span for source, span in spans.items() if length(span)}

    def seen_of(self, source: int) -> dict[int, Span]:
        spans = {rank: self.span(source, rank) for rank in range(self.world_size)}
        return {rank: span for rank, span in spans.items() if length(span)}

    @property
    def hulls(self) -> list[Span]:
        return [hull(row) for row in self.table]

    @property
    def reaches(self) -> list[int]:
        return [max((i for i, x in enumerate(row) if length(x)), default=0) for row in self.table]

    def sights(self) -> Iterator[Sights]:
        for source in range(self.world_size):
            rows = [(source, rank, *span) for rank, span in self.seen_of(source).items()]
            yield Sights(*np.array(rows, dtype=np.int64).reshape(-1, 4).T)


def table_of(ring: Ring) -> Table:
    """By what is visible."""
    seen, ranks = ring.visible().any(0), range(ring.world_size)
    queries, keys = ([ring.positions(rank, of_keys) for rank in ranks] for of_keys in (False, True))

    def needed(source: int, distance: int) -> Span:
        rows = seen[queries[(source + distance) % ring.world_size]]
        cols = rows[:, keys[source]].any(0).nonzero()[:, 0].tolist()
        return (cols[0], cols[-1] + 1) if cols and distance else NOTHING

    return tuple(tuple(needed(source, distance) for distance in ranks) for source in ranks)


def needs_of(ring: Ring, kind: type[SweptNeeds] | type[PairedNeeds] | None = None) -> Needs:
    """As the planner makes them, or by the given way to find them."""
    documents, key_documents = (
        as_documents(rows, keep_empty=True) for rows in (ring.documents, ring.key_documents)
    )
    slices = checked_slices(
        *(ring.mask, ring.world_size, ring.seq_lens, documents, key_documents, ring.slices)
    )
    queries, keys = (deal(ring.layout, ring.world_size, seq_len) for seq_len in ring.seq_lens)
    chosen = SweptNeeds if queries.stride == keys.stride == 1 else PairedNeeds
    return (kind or chosen)(queries, keys, slices)


def everything(needs: Needs) -> tuple:
    """All that routes may ask."""
    ranks = range(needs.world_size)
    sights = [row for block in needs.sights() for row in zip(*(x.tolist() for x in block))]  # noqa: B905
    return (
        [needs.seen_by(rank) for rank in ranks],
        [needs.seen_of(rank) for rank in ranks],
        (needs.hulls, needs.reaches, sorted(sights)),
        (needs.ring_load, needs.direct_halves_load),
    )


@settings(deadline=None, max_examples=500)
@given(rings() | cross_rings(), st.sampled_from([1, 30, 2**20]))
def test_needs_are_what_is_visible(ring: Ring, block: int) -> None:
    expected = everything(TableNeeds(table_of(ring)))
    blocks, needs_module.BLOCK = needs_module.BLOCK, block
    try:
        assert everything(needs_of(ring)) == expected
        assert everything(needs_of(ring, PairedNeeds)) == expected, "in pairs, whatever the stride"
    finally:
        needs_module.BLOCK = blocks


@st.composite
def tables(draw: st.DrawFn) -> Table:
    world_size = draw(st.integers(1, 6))
    spans = st.just(NOTHING) | st.tuples(st.integers(0, 9), st.integers(1, 9)).map(
        lambda span: (span[0], span[0] + span[1])
    )
    others = st.lists(spans, min_size=world_size - 1, max_size=world_size - 1)
    rows = draw(st.lists(others, min_size=world_size, max_size=world_size))
    return tuple((NOTHING, *row) for row in rows)


@given(tables())
def test_loads_are_those_of_all_hops_summed(table: Table) -> None:
    needs, ranks = TableNeeds(table), range(len(table))
    around = [
        sum(
            length(needs.hulls[source])
            for source in ranks
            if source != rank and needs.reaches[source] >= (rank - source) % len(table)
        )
        for rank in ranks
    ]
    direct = [
        sum(map(length, spans.values()))
        for rank in ranks
        for spans in (needs.seen_by(rank), needs.seen_of(rank))
    ]
    assert needs.ring_load == max(around)
    assert needs.direct_halves_load == (2 * max(direct) < max(around))


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
