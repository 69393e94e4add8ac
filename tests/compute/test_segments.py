"""Many tiles in one launch, where they are cut, and the launches of a step."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise
from unittest.mock import NonCallableMock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_ring import Contiguous, Mask, Striped, ZigZag
from dtensor_ring.compute.accumulate import RunningOutput
from dtensor_ring.compute.execute import FEWEST, LAUNCH, cut, forward_step, launches, num_blocks
from dtensor_ring.compute.kernels import Launch, Scores
from dtensor_ring.compute.kernels.kernel import Segments
from dtensor_ring.compute.memory import Region, cols_of, rows_of
from dtensor_ring.compute.trace import Label
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.plan import Step
from dtensor_ring.planning.ranges import length
from dtensor_ring.planning.tile import CAUSAL, FULL, Tile
from tests.dense import visible
from tests.drawn import documents_of, examples, masks
from tests.rings import Ring

Pairs = torch.Tensor
"""How often each pair of a query and a key is scored, `(B, L, C)`."""


def scored_by_tile(tile: Tile, shape: tuple[int, int, int]) -> Pairs:
    counts = torch.zeros(shape, dtype=torch.int)
    batch = slice(None) if tile.batch is None else slice(tile.batch, tile.batch + 1)
    region = counts[batch, slice(*tile.rows), slice(*tile.cols)]
    region += visible(tile.mask, region.shape[1:], 1)[0, 0]
    return counts


def scored(launch: Launch, shape: tuple[int, int, int]) -> Pairs:
    """By one launch."""
    counts = torch.zeros(shape, dtype=torch.int)
    (batches, _, rows), (of_keys, _, cols) = launch.rows, launch.cols
    assert batches == of_keys, "both sides have the same batch rows"
    if launch.segments is None:
        region = counts[batches, rows, cols]
        region += visible(launch.mask, region.shape[1:], 1)[0, 0]
        return counts
    queries, keys = (places(region, shape[0]) for region in (launch.rows, launch.cols))
    for some_rows, some_cols in launch.segments.tiles():
        # The batch row and the token of each.
        of_query, of_key = queries[some_rows], keys[some_cols]
        batch = of_query[0, 0]
        assert (of_query[:, 0] == batch).all(), "a segment has one batch row"
        assert (of_key[:, 0] == batch).all()
        seen = visible(launch.mask, (len(of_query), len(of_key)), 1)[0, 0]
        counts[batch, of_query[:, 1:], of_key[:, 1]] += seen
    return counts


def places(region: Region, batch_size: int) -> torch.Tensor:
    """Batch row and token of each entry of a region in one dimension, `(T, 2)`."""
    batches, tokens = (
        torch.arange(size)[region]
        for size, region in zip((batch_size, 999), region[::2], strict=True)
    )
    return torch.cartesian_prod(batches, tokens)


def check(launch: Launch, shape: tuple[int, int, int]) -> None:
    """What kernels rely on."""
    segments = launch.segments
    if segments is None:
        return
    ends = segments.rows, segments.cols
    sizes = [(b - a, d - c) for (a, b), (c, d) in zip(*map(pairwise, ends), strict=True)]
    for region, boundaries, num_tokens in zip(
        (launch.rows, launch.cols), ends, shape[1:], strict=True
    ):
        covered = places(region, shape[0])
        assert (boundaries[0], boundaries[-1]) == (0, len(covered)), "all tokens"
        assert list(boundaries) == sorted(boundaries)
        if covered[0, 0] == covered[-1, 0]:
            assert all(sizes[0]), "it begins with a tile"
            assert all(sizes[-1]), "it ends with one"
        else:
            assert region[2] == slice(0, num_tokens), "all tokens of several batch rows"
    assert segments.max_rows == max(rows for rows, _ in sizes)
    assert segments.max_cols == max(cols for _, cols in sizes)
    if launch.mask != FULL:
        assert all(rows == cols for rows, cols in sizes if rows and cols), "squares"
    assert sum(1 for rows, cols in sizes if rows and cols) >= FEWEST


def reported(launch: Launch) -> str:
    """All that a launch says, of which two compare."""
    return str((launch.rows, launch.cols, launch.mask, launch.segments))


def seen_of_tile(tile: Tile) -> str:
    return str((rows_of(tile), cols_of(tile), tile.mask, None))


@settings(deadline=None, max_examples=examples(300))
@given(data=st.data(), layout=st.sampled_from([Contiguous(), Striped(), ZigZag()]))
def test_what_is_scored(data: st.DataObject, layout: Contiguous | Striped | ZigZag) -> None:
    world_size, batch_size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    seq_len = world_size * data.draw(st.integers(1, 20))
    documents = data.draw(st.none() | documents_of(seq_len, batch_size, 12))
    ring = Ring(layout, world_size, seq_len, data.draw(masks()), documents)
    for plan in ring.plans():
        num_rows = len(ring.positions(plan.rank))
        for step in plan.steps:
            shape = batch_size, num_rows, len(step.cols)
            expected = sum((scored_by_tile(x, shape) for x in step.tiles), torch.zeros(shape).int())
            found = launches(step, shape, has_segments=True)
            for launch in found:
                check(launch, shape)
            actual = sum((scored(x, shape) for x in found), torch.zeros(shape).int())
            assert torch.equal(actual, expected), (step.tiles, found)
            by_tile = launches(step, shape, has_segments=False)
            assert list(map(reported, by_tile)) == list(map(seen_of_tile, step.tiles))


def test_a_band_that_is_cut_at_its_end_stands_alone() -> None:
    """The first tile here is no square, and has the band of those after it."""
    ring = Ring(Striped(), 4, 76, Mask(1, 5), ((0, 30, 31, 45, 60, 72, 76),))
    for plan in ring.plans():
        for step in plan.steps:
            shape = 1, 19, len(step.cols)
            for launch in launches(step, shape, has_segments=True):
                check(launch, shape)


ENDS = tuple(range(0, 1024, 16)), (0, 5, 7, 300, 301, 302, 600, 1000)


@pytest.mark.parametrize("documents", [ENDS[:1], ENDS], ids=["shared", "by row"])
@pytest.mark.parametrize("layout", [Contiguous(), Striped(), ZigZag()], ids=lambda x: x.name)
@pytest.mark.parametrize("mask", [CAUSAL, Mask.sliding(8), FULL], ids=str)
def test_documents_take_few_launches(layout: Striped, documents: tuple, mask: Mask) -> None:
    """One for each mask and each pair of chunks that one document reaches between, not one each."""
    ring = Ring(layout, 4, 1024, mask, documents)
    most_tiles = 0
    for plan in ring.plans():
        for step in plan.steps:
            shape = 2, 256, len(step.cols)
            assert len(launches(step, shape, has_segments=True)) <= 6
            most_tiles = max(most_tiles, len(step.tiles))
    assert most_tiles > 12


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_what_one_launch_serves_stays_one(batch_size: int) -> None:
    for layout in (Contiguous(), Striped(), ZigZag()):
        for plan in Ring(layout, 4, 64, CAUSAL).plans():
            for step in plan.steps:
                shape = batch_size, 16, len(step.cols)
                found = launches(step, shape, has_segments=True)
                assert sorted(map(reported, found)) == sorted(map(seen_of_tile, step.tiles))


def test_boundaries() -> None:
    segments = Segments((0, 2, 5), (0, 0, 4))
    rows, cols = segments.boundaries(torch.device("cpu"))
    assert (rows.dtype, cols.dtype) == (torch.int32, torch.int32)
    assert (rows.tolist(), cols.tolist()) == ([0, 2, 5], [0, 0, 4])
    assert (segments.max_rows, segments.max_cols) == (3, 4)
    assert list(segments.tiles()) == [(slice(2, 5), slice(0, 4))]


def steps_of(number: int) -> list[Step]:
    tile = Tile((0, 4), (0, 4), CAUSAL)
    return [Step(source, source, Cols(((0, 4),)), (tile,)) for source in range(number)]


@pytest.mark.parametrize("has_segments", [True, False])
def test_launches_are_made_once_however_long_the_ring(has_segments: bool) -> None:
    steps, shape = steps_of(700), (1, 4, 4)
    made = [launches(step, shape, has_segments) for step in steps]
    again = [launches(step, shape, has_segments) for step in steps]
    assert all(x is y for x, y in zip(made, again, strict=True))


def test_launches_of_other_shapes_are_others() -> None:
    (step,) = steps_of(1)
    found = [launches(step, (batch, 4, 4), has_segments=True) for batch in (3, 4)]
    assert found[0] is not found[1]
    few = [launches(step, (batch, 4, 4), has_segments=True) for batch in (1, 2)]
    assert few[0] is few[1], "too few tiles for segments"
    tiles = [launches(step, (batch, 4, 4), has_segments=False) for batch in (1, 2)]
    assert tiles[0] is tiles[1], "which the shape does not change"


def test_launches_die_with_their_plan() -> None:
    tiles = tuple(Tile((start, start + 4), (start, start + 4), CAUSAL) for start in range(0, 32, 4))
    steps = [Step(source, source, Cols(((0, 32),)), tiles) for source in range(3)]
    made = [weakref.ref(x) for step in steps for x in launches(step, (1, 32, 32), True)]
    assert all(x().segments is not None for x in made), "boundaries, too"
    gc.collect()
    assert all(x() is not None for x in made), "they live as long as it does"
    del steps
    gc.collect()
    assert all(x() is None for x in made)


# Where chains are cut: blocks that kernels start, next to those that have rows or keys.

SEQ_LEN = 16384


def started(launch: Launch) -> int:
    """Blocks of one head that a kernel starts which goes by the longest segment."""
    if launch.segments is None:
        return num_blocks(length((launch.rows[2].start, launch.rows[2].stop)))
    return (len(launch.segments.rows) - 1) * num_blocks(launch.segments.max_rows)


def found(documents: tuple[int, ...], seq_len: int = SEQ_LEN) -> list[Launch]:
    (plan,) = Ring(Contiguous(), 1, seq_len, Mask.causal(), (documents,)).plans()
    (step,) = plan.steps
    return [*launches(step, (1, seq_len, seq_len), has_segments=True)]


SHORT = range(0, 4096, 8)
CASES = {
    "the longest first": (0, *range(8192, 12288, 8)),
    "the longest last": (*SHORT, 12288),
    "in the middle": (*SHORT, *range(12288, SEQ_LEN, 8)),
    "two of them": (*SHORT, 8192, 12288, *range(12296, SEQ_LEN, 8)),
    "no long one": (*SHORT,),
}


@pytest.mark.parametrize("documents", CASES.values(), ids=list(CASES))
def test_one_long_document_among_many_short_ones(documents: tuple[int, ...]) -> None:
    """Without cuts they are tens of times as many blocks as have rows."""
    split = found(documents)
    needed = sum(num_blocks(end - start) for start, end in pairwise(documents))
    total = sum(map(started, split))
    assert total <= 1.1 * needed
    assert len(split) <= 4
    longest = max(end - start for start, end in pairwise(documents))
    whole = (len(documents) - 1) * num_blocks(longest)
    assert whole > 10 * total or longest == 8


def test_documents_of_like_lengths_are_one_launch() -> None:
    assert len(found(tuple(range(0, SEQ_LEN + 1, 64)))) == 1
    assert len(found((0, 3000, 3500, 8000, 12000, SEQ_LEN))) == 1


def test_only_what_is_seen_is_launched() -> None:
    """Tokens after the last document see nothing, and no kernel reads them."""
    (launch,) = found((0, 100, 200, 300, 400))
    assert (launch.rows[2], launch.cols[2]) == (slice(0, 400), slice(0, 400))


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 2), st.integers(0, 64)), max_size=40))
def test_each_segment_is_in_one_launch(drawn: list[tuple[int, int, int]]) -> None:
    links = [blocks for blocks, _, _ in drawn]
    gaps = [(number, longest if number else 0) for _, number, longest in drawn[1:]]
    spans = cut(links, gaps)
    assert [x for span in spans for x in range(*span)] == list(range(len(links)))
    cost = sum(_cost(links, gaps, span) for span in spans)
    assert cost <= sum(LAUNCH + x for x in links), "a launch of each is no better"
    if links:
        # Neighbours that were not joined save a launch's worth, so no more than half is lost.
        assert cost <= 2 * _cost(links, gaps, (0, len(links)))


def _cost(links: list[int], gaps: list[tuple[int, int]], span: tuple[int, int]) -> int:
    inner = gaps[span[0] : span[1] - 1]
    longest = max([*links[slice(*span)], *(blocks for _, blocks in inner)])
    return LAUNCH + longest * (length(span) + sum(number for number, _ in inner))


# The launches of a step.


def test_kernels_get_no_empty_batch() -> None:
    """Which some take for an error, and others return nothing for."""
    query = torch.empty(0, 2, 4, 8)
    step = Step(0, 0, Cols(((0, 4),)), (Tile((0, 4), (0, 4), FULL),))
    kernel, scores = NonCallableMock(has_segments=False), Scores(FULL, 1.0)
    running = RunningOutput(query, 8)
    label = Label("forward", 0, 0)
    forward_step(step, query, (query, query), running, kernel, scores, label)
    assert running.result()[0].shape == query.shape
