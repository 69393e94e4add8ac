"""Plans against the mask written out: every visible pair once, and nothing moves for nobody."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtensor_ring import Contiguous, Mask, Striped, ZigZag
from dtensor_ring.layout import Layout
from dtensor_ring.plan import Plan, plan
from dtensor_ring.tile import Tile
from tests.rings import Ring
from tests.test_layout import dealings

CAUSAL, FULL = Mask.causal(), Mask.full()
LAYOUTS = [Contiguous(), Striped(), ZigZag()]


def bounds_of(seq_len: int, num_ends: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Boundaries as in a row of `cu_seqlens`: empty documents are its padding."""
    ends = st.lists(st.integers(0, seq_len), min_size=num_ends, max_size=num_ends)
    return ends.map(lambda ends: (0, *sorted(ends)))


@st.composite
def rings(draw: st.DrawFn) -> Ring:
    layout, world_size, seq_len = draw(dealings())
    bound = st.integers(0, 10) | st.integers(0, seq_len + 2)
    left, right = draw(st.none() | bound), draw(st.sampled_from([0, None]) | bound)
    num_ends = draw(st.integers(1, 5))
    rows = st.lists(bounds_of(seq_len, num_ends), min_size=1, max_size=3)
    documents = draw(st.none() | rows.map(tuple))
    return Ring(layout, world_size, seq_len, Mask(left, right), documents)


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


def covered(ring: Ring) -> Tensor:
    """`(B, S, S)`: how often the tiles of all ranks cover a pair; checks each tile on the way."""
    count = torch.zeros(ring.batch, ring.seq_len, ring.seq_len, dtype=torch.int)
    for schedule in ring.plans():
        query_positions = ring.positions(schedule.rank)
        for step in schedule.steps:
            key_positions = ring.positions(step.source)[slice(*step.cols)]
            for tile in step.tiles:
                check_tile(tile, len(query_positions), len(key_positions))
                rows = query_positions[slice(*tile.rows)].unsqueeze(1)
                cols = key_positions[slice(*tile.cols)]
                batch = slice(None) if tile.batch is None else tile.batch
                count[batch, rows, cols] += band(tile)
    return count


@settings(deadline=None, max_examples=400)
@given(rings())
@example(Ring(Contiguous(), 2, 10, Mask(4, None), ((0, 3, 10),)))  # more rows than columns
def test_every_visible_pair_is_covered_once(ring: Ring) -> None:
    count, seen = covered(ring), ring.visible()
    wrong = (count != seen).nonzero()[:5].tolist()
    assert not wrong, f"[batch, query, key] of pairs not covered as often as visible: {wrong}"


@settings(deadline=None, max_examples=200)
@given(rings())
def test_shards_travel_as_far_as_they_are_seen(ring: Ring) -> None:
    plans, seen = ring.plans(), ring.visible().any(0)
    positions = [ring.positions(rank) for rank in range(ring.world_size)]
    for source, reach in enumerate(plans[0].reaches):
        cols_seen_at = {
            hop: seen[positions[(source + hop) % ring.world_size]][:, positions[source]].any(0)
            for hop in range(1, ring.world_size)
        }
        needed = [hop for hop, cols in cols_seen_at.items() if cols.any()]
        assert reach.num_hops == max(needed, default=0), f"source {source}"
        cols = sum(cols_seen_at.values(), torch.zeros(len(positions[source]))).nonzero()[:, 0]
        hull = (int(cols[0]), int(cols[-1]) + 1) if len(cols) else (0, 0)
        assert reach.cols == hull, f"source {source}"
    num_steps = 1 + max(reach.num_hops for reach in plans[0].reaches)
    for schedule in plans:
        assert schedule.reaches == plans[0].reaches
        assert schedule.num_steps == num_steps
        check_steps(schedule, len(positions[schedule.rank]))


def check_steps(schedule: Plan, num_local: int) -> None:
    for index, step in enumerate(schedule.steps):
        assert step.source == (schedule.rank - index) % schedule.world_size
        held = (0, num_local) if index == 0 else schedule.reaches[step.source].cols
        assert step.cols == held, f"step {index}"
        assert index == 0 or not step.tiles or schedule.arrives(step.source, index), (
            f"step {index} of rank {schedule.rank} needs a shard that does not arrive"
        )


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=["causal", "full"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_one_tile_per_step_without_documents(layout: Layout, mask: Mask, world_size: int) -> None:
    for seq_len in (60, 120):
        ring = Ring(layout, world_size, seq_len, mask)
        num_tiles = [len(step.tiles) for schedule in ring.plans() for step in schedule.steps]
        assert max(num_tiles) == 1, f"{seq_len} tokens: {num_tiles}"
        idle = layout == Contiguous() and mask == CAUSAL
        assert idle or min(num_tiles) == 1, f"{seq_len} tokens: {num_tiles}"


@settings(deadline=None)
@given(
    layout=st.sampled_from([Contiguous(), ZigZag()]),
    world_size=st.integers(2, 5),
    bounds=st.integers(1, 8).flatmap(lambda num_ends: bounds_of(60, num_ends)),
)
def test_documents_cost_one_tile_each_and_one_per_pair_of_chunks(
    layout: Layout, world_size: int, bounds: tuple[int, ...]
) -> None:
    ring = Ring(layout, world_size, 60, CAUSAL, (bounds,))
    for schedule in ring.plans():
        runs = layout.runs(schedule.rank, world_size, 60)
        inside = sum(
            min(end, run.start + run.length) > max(begin, run.start)
            for begin, end in pairwise(bounds)
            for run in runs
        )
        first, *others = (len(step.tiles) for step in schedule.steps)
        # Two runs of one rank see each other once, two ranks at most once for each pair of runs.
        assert first <= inside + len(runs) - 1
        assert all(num_tiles <= len(runs) ** 2 for num_tiles in others)


WINDOW = Mask.sliding(1024)
SHORT_DOCUMENTS = (tuple(range(0, 64 * 256 + 1, 256)),)


HOPS = {
    "window": (Ring(Contiguous(), 4, 16384, WINDOW), [1, 1, 1, 0]),
    "documents": (Ring(Contiguous(), 4, 16384, CAUSAL, SHORT_DOCUMENTS), [0, 0, 0, 0]),
    "causal": (Ring(Contiguous(), 4, 16384, CAUSAL), [3, 2, 1, 0]),
    "full": (Ring(Contiguous(), 4, 16384, FULL), [3, 3, 3, 3]),
    "one ahead": (Ring(Contiguous(), 4, 16384, Mask.local(0, 1)), [0, 3, 3, 3]),
    "striped": (Ring(Striped(), 4, 16384, CAUSAL), [3, 3, 3, 3]),
    "striped, one back": (Ring(Striped(), 4, 16384, Mask.sliding(1)), [1, 1, 1, 1]),
    "zigzag": (Ring(ZigZag(), 4, 16384, CAUSAL), [3, 3, 3, 3]),
    "zigzag, documents": (Ring(ZigZag(), 4, 16384, CAUSAL, SHORT_DOCUMENTS), [0, 0, 0, 0]),
    "zigzag, one token each": (Ring(ZigZag(), 4, 4, CAUSAL), [3, 2, 1, 0]),
    "alone": (Ring(Contiguous(), 1, 64, CAUSAL), [0]),
    "striped alone": (Ring(Striped(), 1, 64, FULL), [0]),
    "zigzag alone": (Ring(ZigZag(), 1, 64, CAUSAL), [0]),
    "no token": (Ring(ZigZag(), 3, 0, FULL), [0, 0, 0]),
}


@pytest.mark.parametrize(("ring", "num_hops"), HOPS.values(), ids=list(HOPS))
def test_hops(ring: Ring, num_hops: list[int]) -> None:
    assert [reach.num_hops for reach in ring.plans()[0].reaches] == num_hops
    assert ring.plans()[0].num_steps == 1 + max(num_hops)


def test_only_columns_that_others_see_travel() -> None:
    (first, *others) = Ring(ZigZag(), 4, 64, CAUSAL).plans()[0].reaches
    assert first.cols == (0, 8), "the last chunk is seen by its owner alone"
    assert [reach.cols for reach in others] == [(0, 16)] * 3
    window = Ring(Contiguous(), 4, 64, Mask.sliding(5)).plans()[0].reaches
    assert [reach.cols for reach in window] == [(11, 16)] * 3 + [(0, 0)]


def areas(ring: Ring) -> list[list[int]]:
    """By rank, then step."""
    return [[sum(t.area for t in step.tiles) for step in p.steps] for p in ring.plans()]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_zigzag_is_balanced_under_causal(world_size: int, chunk: int) -> None:
    by_rank = areas(Ring(ZigZag(), world_size, 2 * world_size * chunk, CAUSAL))
    for steps in zip(*by_rank, strict=True):
        assert len(set(steps)) == 1, "all ranks work the same at each step"


@given(world_size=st.integers(1, 8), seq_len=st.integers(1, 200))
def test_zigzag_is_near_balance_at_any_length(world_size: int, seq_len: int) -> None:
    totals = [sum(steps) for steps in areas(Ring(ZigZag(), world_size, seq_len, CAUSAL))]
    padded = Contiguous().padded_length(seq_len, world_size)
    # A rank's halves differ by one token at most: W-1 diagonals of a shard. Padding that is not
    # there saves at most one row and column per rank.
    assert max(totals) - sum(totals) / world_size <= 1.5 * padded


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shard", [1, 2, 7])
def test_striped_is_balanced_within_a_diagonal(world_size: int, shard: int) -> None:
    by_rank = areas(Ring(Striped(), world_size, world_size * shard, CAUSAL))
    for steps in zip(*by_rank, strict=True):
        assert max(steps) - min(steps) <= shard, "one diagonal of a tile"
    totals = [sum(steps) for steps in by_rank]
    assert max(totals) - min(totals) == (world_size - 1) * shard


def test_areas_sum_to_all_visible_pairs() -> None:
    for layout in LAYOUTS:
        total = sum(chain.from_iterable(areas(Ring(layout, 4, 64, CAUSAL))))
        assert total == 64 * 65 // 2, layout


@pytest.mark.parametrize(
    "bounds", [(1, 4), (0, 4, 3), (0, 9), ()], ids=["start", "decreasing", "beyond", "empty"]
)
def test_documents_that_are_no_boundaries(bounds: tuple[int, ...]) -> None:
    message = (
        r"cu_seqlens must start at 0, never decrease and end at or before the sequence length 8, "
        rf"got \[{', '.join(map(str, bounds))}\]"
    )
    with pytest.raises(ValueError, match=message):
        plan(Contiguous(), CAUSAL, 0, 2, 8, (bounds,))


@pytest.mark.parametrize(("world_size", "seq_len"), [(0, 8), (2, -1)])
def test_nothing_to_plan(world_size: int, seq_len: int) -> None:
    with pytest.raises(ValueError, match=f"cannot plan {seq_len} tokens on {world_size} ranks"):
        plan(Contiguous(), CAUSAL, 0, world_size, seq_len)
