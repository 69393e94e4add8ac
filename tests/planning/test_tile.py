"""Tiles and intervals, against bands written out and every pair."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dtensor_ring import Balanced, Contiguous, Mask, Striped, ZigZag
from dtensor_ring.compute.kernels.varlen import bottom_right
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.intervals import KeyIntervals, intervals_of
from dtensor_ring.planning.layout import Run
from dtensor_ring.planning.plan import Step
from dtensor_ring.planning.ranges import Span, length
from dtensor_ring.planning.slices import UNBOUNDED, Slices
from dtensor_ring.planning.tile import (
    CAUSAL,
    FULL,
    QuerySlice,
    Tile,
    _band_tiles,
    _index_band,
    coalesce,
    packed_tiles,
    query_slices_of,
    shard_tiles,
)
from tests.drawn import documents_of, examples, masks
from tests.rings import Ring
from tests.slices import shown, slices, tables

Pairs = set[tuple[int, int]]
bounds = st.none() | st.integers(-12, 12)


def band(rows: Span, cols: Span, left: int | None, right: int | None) -> Pairs:
    """Rows and columns that see one another, counted from the first of each."""
    return {
        (i, j)
        for i, j in product(range(*rows), range(*cols))
        if (left is None or (i - rows[0]) - (j - cols[0]) <= left)
        and (right is None or (j - cols[0]) - (i - rows[0]) <= right)
    }


def pairs_of(tile: Tile) -> Pairs:
    return band(tile.rows, tile.cols, tile.mask.left, tile.mask.right)


def check(tiles: list[Tile], expected: Pairs) -> None:
    """Each pair once, and each tile is what `Tile` promises."""
    found = Counter(pair for tile in tiles for pair in pairs_of(tile))
    assert set(found) == expected
    assert set(found.values()) <= {1}, "each pair once"
    for tile in tiles:
        seen = pairs_of(tile)
        assert tile.area == len(seen)
        assert {i for i, _ in seen} == set(range(*tile.rows)), "every row sees"
        assert {j for _, j in seen} == set(range(*tile.cols)), "every column is seen"
        num_rows, num_cols = length(tile.rows), length(tile.cols)
        assert tile.mask != CAUSAL or num_rows == num_cols
        # Kernels that align the last row can have it: their bounds are not negative.
        window = bottom_right(tile.mask, num_rows, num_cols)
        assert all(bound is None or bound >= 0 for bound in window)


@settings(max_examples=examples(300))
@given(st.integers(0, 9), st.integers(0, 9), bounds, bounds)
@example(4, 2, 2, 0)  # as tall as no kernel can align
def test_band_tiles(num_rows: int, num_cols: int, left: int | None, right: int | None) -> None:
    expected = band((0, num_rows), (0, num_cols), left, right)
    check(list(_band_tiles(num_rows, num_cols, left, right)), expected)


tile_grids = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12, unique=True
)


@settings(max_examples=examples(300))
@given(tile_grids, st.integers(1, 3))
def test_coalesced_tiles_cover_the_same(grid: list[tuple[int, int]], size: int) -> None:
    """Squares of a grid: causal ones on the diagonal, full ones below it."""
    squares = [
        Tile(
            (size * row, size * row + size),
            (size * col, size * col + size),
            CAUSAL if row == col and size > 1 else FULL,
        )
        for row, col in sorted(grid)
        if col <= row
    ]
    joined = coalesce(squares)
    check(joined, {pair for tile in squares for pair in pairs_of(tile)})
    assert len(joined) <= len(squares)


@pytest.mark.parametrize("num_squares", [2, 3, 4])
def test_a_staircase_is_one_square(num_squares: int) -> None:
    squares = [
        Tile((4 * i, 4 * i + 4), (4 * j, 4 * j + 4), CAUSAL if i == j else FULL)
        for i in range(num_squares)
        for j in range(i + 1)
    ]
    assert coalesce(squares) == [Tile((0, 4 * num_squares), (0, 4 * num_squares), CAUSAL)]


def test_neighbours_are_joined_only_if_the_union_is_a_tile() -> None:
    wide, below = Tile((0, 2), (0, 4), FULL), Tile((2, 4), (0, 4), FULL)
    assert coalesce([Tile((0, 2), (0, 2), FULL), Tile((0, 2), (2, 4), FULL), below]) == [
        Tile((0, 4), (0, 4), FULL)
    ]
    apart = Tile((3, 4), (0, 4), FULL)
    narrow = Tile((2, 4), (0, 3), FULL)
    causal = Tile((2, 6), (0, 4), CAUSAL)
    for other in (apart, narrow, causal):
        assert coalesce([wide, other]) == [wide, other]


runs = st.builds(Run, st.integers(0, 20), st.integers(1, 8))


@given(runs, runs, st.integers(1, 4), bounds, bounds)
def test_index_band(query: Run, key: Run, stride: int, left: int | None, right: int | None) -> None:
    query, key = (Run(run.start, run.length, stride) for run in (query, key))
    positive = (x if x is None else abs(x) for x in (left, right))
    mask = Mask(*positive)
    expected = {
        (i, j)
        for i, j in product(range(query.length), range(key.length))
        if mask.sees(query.position(i), key.position(j))
    }
    query_slice = QuerySlice(0, query, (0, query.length), (0, 99), mask.left, mask.right)
    found = band((0, query.length), (0, key.length), *_index_band(query_slice, key, 0))
    assert found == expected


def test_strides_need_no_band_in_common_without_a_mask() -> None:
    query, key = Run(0, 4, 2), Run(0, 4, 3)
    assert _index_band(QuerySlice(0, query, (0, 4), (0, 20), None, None), key, 0) == (None, None)
    message = r"runs of different strides have no common band: Run\(start=0, length=4, stride=2\)"
    causal = QuerySlice(0, query, (0, 4), (0, 20), None, 0)
    with pytest.raises(ValueError, match=message):
        _index_band(causal, key, 0)
    # Of a single key, which has no stride, queries 2 and 3 are the ones after it.
    assert band((0, 4), (0, 1), *_index_band(causal, Run(4, 1, 3), 0)) == {(2, 0), (3, 0)}


def test_tiles_in_a_packet() -> None:
    """Neighbours in the packet are one tile, whatever lies between them in the shard."""
    tiles = [Tile((0, 4), cols, FULL) for cols in ((2, 4), (10, 15), (20, 21))]
    assert packed_tiles(tiles, Cols(((2, 5), (10, 15), (20, 22)))) == [
        Tile((0, 4), (0, 2), FULL),
        Tile((0, 4), (3, 9), FULL),
    ]
    assert packed_tiles(tiles, Cols(((2, 21),))) == [
        Tile((0, 4), cols, FULL) for cols in ((0, 2), (8, 13), (18, 19))
    ]
    assert packed_tiles(tiles, Cols(((0, 30),))) == tiles
    assert packed_tiles([], Cols()) == []


@settings(max_examples=examples(300), deadline=None)
@given(st.data(), st.integers(1, 3))
def test_shard_tiles(data: st.DataObject, stride: int) -> None:
    """Two shards of a few runs each, under any slices."""
    queries, keys = (shards(data, stride) for _ in range(2))
    positions = [[run.position(i) for run in x for i in range(run.length)] for x in (queries, keys)]
    seq_lens = (60, 60)
    (table,) = data.draw(slices(seq_lens, 1)).tables
    seen = shown(table, seq_lens)
    expected = {
        (i, j)
        for (i, query), (j, key) in product(*map(enumerate, positions))
        if query < 60 and key < 60 and seen[query, key]
    }
    check(shard_tiles(query_slices_of(queries, table), keys), expected)


def shards(data: st.DataObject, stride: int) -> tuple[Run, ...]:
    result: list[Run] = []
    for _ in range(data.draw(st.integers(0, 3))):
        gap = data.draw(st.integers(1, 6))
        start = result[-1].last + gap if result else gap - 1
        result.append(Run(start, data.draw(st.integers(1, 6)), stride))
    return tuple(result)


# Queries cut by slices, against every pair written out.

SEQ_LEN = 24
strided_runs = st.builds(Run, st.integers(0, 9), st.integers(1, 5), st.integers(1, 3))


@settings(deadline=None, max_examples=examples(300))
@given(strided_runs, tables((SEQ_LEN, SEQ_LEN)))
def test_query_slices_show_what_slices_show(run: Run, table: np.ndarray) -> None:
    ordered = Slices.of_tables([table]).tables[0]
    found = np.zeros((SEQ_LEN, SEQ_LEN), dtype=np.int64)
    for query_slice in query_slices_of([run], ordered):
        assert query_slice.row == 0
        assert query_slice.run == run
        for index in range(*query_slice.span):
            query = run.position(index)
            bounds = (UNBOUNDED if x is None else x for x in (query_slice.left, query_slice.right))
            row = np.array([(query, query + 1, *query_slice.keys, *bounds)])
            found += shown(row, (SEQ_LEN, SEQ_LEN))
    expected = np.zeros_like(found)
    positions = [run.position(index) for index in range(run.length)]
    expected[positions] = shown(table, (SEQ_LEN, SEQ_LEN))[positions]
    assert np.array_equal(found, expected)


# Intervals of keys against tiles, pair by pair, and against masks.

SHARED = ((0, 3, 40, 41, 60, 96),)
BY_ROW = SHARED[0], (0, 1, 2, 3, 64, 90)


def ring(layout: object, mask: Mask, documents: object = None, **more: object) -> Ring:
    return Ring(layout, 4, 96, mask, documents, **more)  # type: ignore[arg-type]


RINGS = {
    "causal": ring(ZigZag(), CAUSAL),
    "window": ring(ZigZag(), Mask.sliding(10)),
    "contiguous window": ring(Contiguous(), Mask.sliding(30)),
    "striped": ring(Striped(), CAUSAL),
    "striped window": ring(Striped(), Mask.local(9, 6)),
    "documents": ring(ZigZag(), CAUSAL, SHARED),
    "documents by row": ring(Striped(), CAUSAL, BY_ROW),
    "a row of documents is empty": ring(ZigZag(), FULL, ((0, 0, 0), (0, 5, 60))),
    "window and documents": ring(Contiguous(), Mask.sliding(7), BY_ROW),
    "balanced": ring(Balanced(CAUSAL, 96, 4, SHARED, 8), CAUSAL, SHARED),
    "chunked": ring(ZigZag(), Mask.chunked(20)),
    "prefix": ring(ZigZag(), Mask.prefix_causal(10), SHARED),
    "slices": ring(
        ZigZag(), FULL, slices=Slices.global_tokens([[0, 40, 96], [0, 50, 50]], [[4, 9], [2, 0]], 8)
    ),
}
"""The last one shows the keys of a window and, before them, some others."""


def shown_by(found: KeyIntervals, shape: tuple[int, int, int]) -> np.ndarray:
    """How often each pair of a query and a key is in an interval, `(B, L, C)`."""
    ends, (first, last) = found.ends, found.cols
    assert ends.dtype == np.int32
    assert ends.flags.c_contiguous
    assert ends.shape[1] % 2 == 1
    assert (np.diff(ends, axis=1) >= 0).all(), "what cuDNN refuses otherwise"
    assert ends.min() >= 0
    assert ends.max() == last - first
    ends = np.broadcast_to(ends, (found.batches[1] - found.batches[0], *ends.shape[1:]))
    begins = np.insert(ends[:, 1::2], 0, 0, axis=1)
    keys = np.arange(last - first)
    inside = (keys >= begins[..., None]) & (keys < ends[:, ::2, :, None])
    counts = np.zeros(shape, dtype=int)
    counts[slice(*found.batches), slice(*found.rows), slice(*found.cols)] = inside.sum(1)
    return counts


def pairs_of_tiles(tiles: tuple[Tile, ...], shape: tuple[int, int, int]) -> np.ndarray:
    """The same of tiles."""
    counts = np.zeros(shape, dtype=int)
    for tile in tiles:
        batch = slice(None) if tile.batch is None else slice(tile.batch, tile.batch + 1)
        part = counts[batch, slice(*tile.rows), slice(*tile.cols)]
        lag = np.arange(part.shape[1])[:, None] - np.arange(part.shape[2])
        left, right = (999 if x is None else x for x in (tile.mask.left, tile.mask.right))
        part += (lag <= left) & (-lag <= right)
    return counts


def fewest(seen: np.ndarray) -> int:
    """Numbers that a row of keys needs, `(..., C)`: the end of a first interval, and pairs."""
    edges = np.diff(seen.astype(int), axis=-1, prepend=0) > 0
    number, begins_first = edges.sum(-1), seen[..., 0] > 0
    return max(1, int((2 * (number + ((number > 0) & ~begins_first)) - 1).max()))


def check_intervals(step: Step, shape: tuple[int, int, int]) -> np.ndarray:
    found = intervals_of(step.tiles, shape[0])
    pairs = pairs_of_tiles(step.tiles, shape)
    assert np.array_equal(shown_by(found, shape), pairs)
    box = pairs[slice(*found.batches), slice(*found.rows), slice(*found.cols)]
    assert box.any((0, 1))[[0, -1]].all(), "the box begins and ends with what is seen"
    assert box.any((0, 2))[[0, -1]].all()
    assert found.ends.shape[1] == fewest(box)
    if all(tile.batch is None for tile in step.tiles):
        assert len(found.ends) == 1, "one row for the whole batch"
    return pairs


@pytest.mark.parametrize("ring", RINGS.values(), ids=list(RINGS))
def test_intervals_show_what_tiles_and_masks_show(ring: Ring) -> None:
    total = np.zeros((ring.batch, 96, 96), dtype=int)
    for plan in ring.plans():
        rows = ring.positions(plan.rank).numpy()
        for step in plan.steps:
            if not step.tiles:
                continue
            pairs = check_intervals(step, (ring.batch, len(rows), len(step.cols)))
            shard = ring.positions(step.source).numpy()
            cols = shard[np.concatenate([np.arange(*span) for span in step.cols.spans])]
            total[:, rows[:, None], cols] += pairs
    assert np.array_equal(total, ring.visible().numpy())


@settings(deadline=None, max_examples=examples(200))
@given(data=st.data(), layout=st.sampled_from([Contiguous(), Striped(), ZigZag()]))
def test_intervals_of_any_step(data: st.DataObject, layout: Contiguous) -> None:
    world_size, batch_size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    seq_len = world_size * data.draw(st.integers(1, 20))
    documents = data.draw(st.none() | documents_of(seq_len, batch_size, 12))
    given_ring = Ring(layout, world_size, seq_len, data.draw(masks()), documents)
    for plan in given_ring.plans():
        for step in plan.steps:
            if step.tiles:
                shape = batch_size, len(given_ring.positions(plan.rank)), len(step.cols)
                check_intervals(step, shape)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("causal", 1), ("window", 3), ("striped", 1), ("documents", 3), ("slices", 5)],
)
def test_how_many_numbers_serve_a_query(name: str, expected: int) -> None:
    """Neighbouring tiles are one interval; what does not begin at the first key takes two more."""
    plans = RINGS[name].plans()
    steps = [step for plan in plans for step in plan.steps if step.tiles]
    assert max(intervals_of(x.tiles, RINGS[name].batch).ends.shape[1] for x in steps) == expected


def test_tiles_in_any_order() -> None:
    tiles = (
        Tile((2, 4), (6, 8), FULL),
        Tile((0, 4), (3, 6), Mask(None, 0), 1),
        Tile((2, 4), (0, 2), FULL),
    )
    check_intervals(Step(0, 0, None, tiles), (2, 4, 8))  # type: ignore[arg-type]
    check_intervals(Step(0, 0, None, tiles[1:2]), (2, 4, 8))  # type: ignore[arg-type]
