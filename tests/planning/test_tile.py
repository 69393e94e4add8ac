"""The arithmetic of tiles, against bands written out."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dtensor_ring import Mask
from dtensor_ring.compute.kernels.varlen import bottom_right
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.layout import Run
from dtensor_ring.planning.ranges import Span, length
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
from tests.drawn import examples
from tests.slices import shown, slices

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
