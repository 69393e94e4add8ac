"""Intervals of keys against tiles, pair by pair, and against masks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_ring import Balanced, Contiguous, Mask, Striped, ZigZag
from dtensor_ring.planning.intervals import KeyIntervals, intervals_of
from dtensor_ring.planning.plan import Step
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.tile import CAUSAL, FULL, Tile
from tests.drawn import documents_of, examples, masks
from tests.rings import Ring

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


def shown(found: KeyIntervals, shape: tuple[int, int, int]) -> np.ndarray:
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


def pairs_of(tiles: tuple[Tile, ...], shape: tuple[int, int, int]) -> np.ndarray:
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


def check(step: Step, shape: tuple[int, int, int]) -> np.ndarray:
    found = intervals_of(step.tiles, shape[0])
    pairs = pairs_of(step.tiles, shape)
    assert np.array_equal(shown(found, shape), pairs)
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
            pairs = check(step, (ring.batch, len(rows), len(step.cols)))
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
                check(step, shape)


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
    check(Step(0, 0, None, tiles), (2, 4, 8))  # type: ignore[arg-type]
    check(Step(0, 0, None, tiles[1:2]), (2, 4, 8))  # type: ignore[arg-type]
