"""Plans against the mask written out: every visible pair once, in few tiles."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtensor_ring import Balanced, Contiguous, Mask, Striped
from dtensor_ring.compute.kernels.varlen import bottom_right
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.mask import Documents
from dtensor_ring.planning.plan import plan
from dtensor_ring.planning.tile import Tile
from tests.columns import indices_of
from tests.dense import document_ids
from tests.drawn import examples
from tests.layouts import LAYOUTS
from tests.planning.test_layout import shard_tables
from tests.planning.test_mask import masks
from tests.rings import Ring, Rows
from tests.slices import slices

CAUSAL, FULL = Mask.causal(), Mask.full()
FEW_RUNS = [layout for layout in LAYOUTS if not layout.parameters]


def documents_of(
    seq_len: int, num_ends: int, num_rows: st.SearchStrategy[int]
) -> st.SearchStrategy[Rows]:
    """Boundaries as in `cu_seqlens`: empty documents are its padding."""
    ends = st.lists(st.integers(0, seq_len), min_size=num_ends, max_size=num_ends)
    row = ends.map(lambda ends: (0, *sorted(ends)))
    return num_rows.flatmap(lambda n: st.tuples(*[row] * n))


@st.composite
def rings(draw: st.DrawFn) -> Ring:
    layout, world_size, seq_len = draw(shard_tables())
    mask = draw(masks(st.integers(0, 10) | st.integers(0, seq_len + 2)))
    documents = draw(st.none() | documents_of(seq_len, draw(st.integers(1, 5)), st.integers(1, 3)))
    if draw(st.integers(0, 3)) == 0:
        given = draw(slices((seq_len, seq_len), draw(st.integers(1, 3))))
        return Ring(layout, world_size, seq_len, FULL, slices=given)
    if draw(st.booleans()):
        layout = Balanced(mask, seq_len, world_size, documents, draw(st.integers(1, 6)))
    return Ring(layout, world_size, seq_len, mask, documents)


@st.composite
def cross_rings(draw: st.DrawFn) -> Ring:
    """Queries and keys of different sequences: only a balanced layout wants one length."""
    layout, world_size, seq_len = draw(shard_tables())
    key_seq_len = draw(st.integers(0, 60))
    if isinstance(layout, Striped):
        key_seq_len -= key_seq_len % world_size
    if draw(st.integers(0, 3)) == 0:
        given = draw(slices((seq_len, key_seq_len), draw(st.integers(1, 3))))
        return Ring(layout, world_size, seq_len, FULL, None, key_seq_len, slices=given)
    num_ends, num_rows = draw(st.integers(1, 5)), draw(st.sampled_from([(1, 1), (3, 1), (1, 3)]))
    documents = draw(st.none() | documents_of(seq_len, num_ends, st.just(num_rows[0])))
    if draw(st.booleans()):
        key_seq_len = seq_len
        layout = Balanced(CAUSAL, seq_len, world_size, documents, draw(st.integers(1, 6)))
    of_keys = documents_of(key_seq_len, num_ends, st.just(num_rows[1]))
    key_documents = None if documents is None else draw(of_keys)
    return Ring(layout, world_size, seq_len, FULL, documents, key_seq_len, key_documents)


def band(tile: Tile) -> Tensor:
    """What a tile's rows see of its columns."""
    rows, cols = torch.arange(tile.rows[1] - tile.rows[0]), torch.arange(*tile.cols)
    lag = rows.unsqueeze(1) - (cols - tile.cols[0])
    seen = torch.ones_like(lag, dtype=torch.bool)
    if tile.mask.left is not None:
        seen &= lag <= tile.mask.left
    if tile.mask.right is not None:
        seen &= -lag <= tile.mask.right
    return seen


def check_tile(tile: Tile, num_rows: int, num_held: int) -> None:
    seen = band(tile)
    assert 0 <= tile.rows[0] < tile.rows[1] <= num_rows, tile
    assert 0 <= tile.cols[0] < tile.cols[1] <= num_held, tile
    assert seen.any(1).all(), f"a row of {tile} sees nothing"
    assert seen.any(0).all(), f"a column of {tile} is not seen"
    assert tile.area == seen.sum(), tile
    if tile.mask == CAUSAL:
        assert seen.shape[0] == seen.shape[1], f"not square: {tile}"
    if tile.mask.right is None and tile.mask.left is not None:
        assert seen.shape[0] <= seen.shape[1], f"taller than wide, with a left bound only: {tile}"
    _, right = bottom_right(tile.mask, *seen.shape)
    assert right is None or right < seen.shape[1], f"unbounded for flash attention 2: {tile}"


def covered(ring: Ring) -> Tensor:
    """`(B, S, T)`: how often the tiles of all ranks cover a pair; checks each tile on the way."""
    count = torch.zeros(ring.batch, *ring.seq_lens, dtype=torch.int)
    for schedule in ring.plans():
        query_positions = ring.positions(schedule.rank)
        for step in schedule.steps:
            key_positions = ring.positions(step.source, of_keys=True)[indices_of(step.cols)]
            for tile in step.tiles:
                check_tile(tile, len(query_positions), len(key_positions))
                rows = query_positions[slice(*tile.rows)].unsqueeze(1)
                cols = key_positions[slice(*tile.cols)]
                batch = slice(None) if tile.batch is None else tile.batch
                count[batch, rows, cols] += band(tile)
    return count


@settings(deadline=None, max_examples=examples(120))
@given(rings() | cross_rings())
@example(Ring(Contiguous(), 2, 10, Mask(4, None), ((0, 3, 10),)))  # more rows than columns
@example(Ring(Contiguous(), 1, 8, Mask(0, 3, prefix=4), ((0, 6, 8),)))  # behind the prefix
def test_every_visible_pair_is_covered_once(ring: Ring) -> None:
    count, seen = covered(ring), ring.visible()
    wrong = (count != seen).nonzero()[:5].tolist()
    assert not wrong, f"[batch, query, key] of pairs not covered as often as visible: {wrong}"


@pytest.mark.pairs
@pytest.mark.parametrize("layout", FEW_RUNS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=["causal", "full"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_one_tile_per_step_without_documents(layout: Layout, mask: Mask, world_size: int) -> None:
    for seq_len in (60, 120):
        ring = Ring(layout, world_size, seq_len, mask)
        num_tiles = [len(step.tiles) for schedule in ring.plans() for step in schedule.steps]
        assert max(num_tiles) == 1, f"{seq_len} tokens: {num_tiles}"
        idle = layout == Contiguous() and mask == CAUSAL
        assert idle or min(num_tiles) == 1, f"{seq_len} tokens: {num_tiles}"


def documents_held(ring: Ring, of_keys: bool) -> list[list[list[set[tuple[int, int]]]]]:
    """By batch row, rank and run: the documents, cut by the mask's chunks, that it has tokens of.

    Rows are all alike where one row of boundaries is for the whole batch.
    """
    seq_len, chunk = ring.seq_lens[of_keys], ring.mask.chunk or ring.seq_lens[of_keys] + 1
    bounds = ring.cu_seqlens(of_keys)
    bounds = ring.cu_seqlens() if bounds is None else bounds
    ids = document_ids(seq_len, ring.batch, bounds)[0].tolist()
    return [
        [
            [
                {(row[p], p // chunk) for p in map(run.position, range(run.length)) if row[p] >= 0}
                for run in ring.layout.runs(rank, ring.world_size, seq_len)
            ]
            for rank in range(ring.world_size)
        ]
        for row in ids
    ]


def most_slices(mask: Mask, stride: int) -> int:
    """Tiles of one document in one pair of runs: a rectangle with a band, cut to what tiles allow.

    A band with a left bound only may be cut into a rectangle and a tile no taller than wide; one
    with a right bound only into a causal square and the rectangles left of it and below. Causal
    runs of stride 1 are aligned: the square is all there is. A prefix is a band of its own.
    """
    if mask.prefix is not None:
        parts = Mask(mask.left, None), Mask(mask.left, mask.right)
        return sum(most_slices(part, stride) for part in parts)
    if mask.right is None:
        return 1 if mask.left is None else 2
    if mask.right == 0:
        return 1 if mask.left is None and stride == 1 else 2
    return 3 if mask.left is None else 4


@settings(deadline=None, max_examples=examples(120))
@given((rings() | cross_rings()).filter(lambda ring: ring.slices is None))
def test_few_tiles(ring: Ring) -> None:
    """At most `most_slices` tiles for each document that a run of queries shares with one of keys.

    So a striped rank has a few per document, and for layouts made of chunks, k of the queries and
    l of the keys, a step off the diagonal has at most `most_slices * k * l`, however many the
    documents: different chunks share at most one.
    """
    is_cross = ring.key_seq_len is not None
    queries, keys = documents_held(ring, False), documents_held(ring, is_cross)
    stride = ring.world_size if isinstance(ring.layout, Striped) else 1
    query_slices = most_slices(ring.mask, stride)
    for schedule in ring.plans():
        for index, step in enumerate(schedule.steps):
            for row in range(ring.batch):
                num_tiles = sum(tile.batch in (None, row) for tile in step.tiles)
                sides = queries[row][schedule.rank], keys[row][step.source]
                shared = sum(len(mine & theirs) for mine, theirs in product(*sides))
                assert num_tiles <= query_slices * shared, f"step {index} of rank {schedule.rank}"
                if index and stride == 1 and not is_cross:
                    assert num_tiles <= query_slices * len(sides[0]) * len(sides[1])


BOUNDS = "cu_seqlens must start at 0, never decrease and end at or before the sequence length "


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"documents": ((1, 4),)}, f"^{BOUNDS}8, got [1, 4]"),
        ({"documents": ((0, 4, 3),)}, f"^{BOUNDS}8, got [0, 4, 3]"),
        ({"documents": ((0, 9),)}, f"^{BOUNDS}8, got [0, 9]"),
        ({"documents": ((0, 8), ())}, f"^{BOUNDS}8, got []"),
        ({"documents": ((0, 8),), "key_documents": ((0, 7),)}, f"^key_{BOUNDS}6, got [0, 7]"),
        ({"key_documents": ((0, 6),)}, "as many boundaries in .* got none and 2"),
        ({"documents": ((0, 4),)}, "as many boundaries in .* got 2 and none"),
        ({"documents": ((0, 4),), "key_documents": ((0, 3, 6),)}, "boundaries .* got 2 and 3"),
        ({"mask": CAUSAL}, "8 query and 6 key tokens, .* has no diagonal: it takes Mask.full"),
        (
            {"mask": CAUSAL, "key_seq_len": 8, "documents": ((0, 4),), "key_documents": ((0, 8),)},
            "or documents of their own, are cross attention",
        ),
        (
            {"mask": Mask.chunked(2), "seq_len": 2**20, "key_seq_len": 2**20},
            "at most 65,536, which take seconds to plan, got 524,288; fewer are larger chunks",
        ),
        ({"world_size": 0}, "world_size must be from 1 to 65,536, got 0"),
        ({"seq_len": -1}, "^seq_len must be from 0 to 1,099,511,627,776, got -1"),
        ({"key_seq_len": -2}, "key_seq_len must be from 0 to 1,099,511,627,776, got -2"),
    ],
)
def test_refusals(wrong: dict[str, Any], message: str) -> None:
    """Of a cross attention of 8 queries and 6 keys, but for what is wrong."""
    right = {"mask": FULL, "world_size": 2, "seq_len": 8, "key_seq_len": 6}
    given = {name: Documents(x) if "documents" in name else x for name, x in wrong.items()}
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        plan(Contiguous(), rank=0, **(right | given))


@pytest.mark.parametrize("key_rows", [(), ((0, 6),)])
def test_an_empty_batch_has_no_boundaries(key_rows: Rows) -> None:
    documents, key_documents = Documents(), Documents(key_rows)
    assert plan(Contiguous(), FULL, 0, 2, 8, documents, 6, key_documents).num_steps == 2
