"""Decode attention, whose ranks are threads of one process, against dense float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dtensor_ring import BlockCyclic, Contiguous, Mask, Striped, ZigZag
from dtensor_ring.decode.run import MERGES
from tests.decoding import TOLERANCES, Decode, check
from tests.drawn import bounds_of
from tests.slices import slices

CAUSAL = Mask.causal()
LONGEST = 80
WORLD_SIZES = range(1, 6)
LAYOUTS = [Contiguous(), Striped(), ZigZag(), BlockCyclic(3)]


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    bounds = st.none() | st.integers(0, LONGEST)
    left, right = draw(bounds), draw(st.sampled_from([0, 0, 0, None, 5]))
    cut = draw(st.sampled_from(["", "", "chunk", "prefix"]))
    return Mask(left, right, **({cut: draw(st.integers(1, 40))} if cut else {}))


@st.composite
def runs(draw: st.DrawFn, world_size: int, num_positions: int) -> tuple:
    """Blocks of positions, each of some rank or of none; so ranks may be empty."""
    ends = st.lists(st.integers(0, num_positions), max_size=8)
    bounds = [0, *sorted(draw(ends)), num_positions]
    owners = draw(st.lists(st.integers(-1, world_size - 1), min_size=9, max_size=9))
    held: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    for begin, end, owner in zip(bounds, bounds[1:], owners, strict=False):
        if owner >= 0:
            held[owner].append((begin, end - begin))
    return tuple(map(tuple, held))


@st.composite
def calls(draw: st.DrawFn, world_size: int) -> Decode:
    """Any call; one in four is over a layout, others over runs of any kind."""
    batch = draw(st.integers(1, 3))
    num_queries = draw(st.sampled_from([1, 1, 1, 2, 3, 7, 20, 64]))
    size = draw(st.integers(0, LONGEST))
    held = draw(runs(world_size, size))
    if not draw(st.integers(0, 3)):
        held, size = draw(st.sampled_from(LAYOUTS)), -(-size // world_size) * world_size
    num_starts = draw(st.sampled_from(sorted({1, batch})))
    starts = st.integers(0, max(0, size - num_queries)) | st.just(max(0, size - num_queries))
    starts = draw(st.lists(starts, min_size=num_starts, max_size=num_starts))
    seq_len = max(size, max(starts) + num_queries)
    heads = draw(st.sampled_from([(2, 2), (4, 2), (3, 1)]))
    head_dims = draw(st.sampled_from([(8, 8), (8, 8), (8, 4), (4, 12)]))
    softcap = draw(st.sampled_from([0.0, 0.0, 1.5]))
    special = softcap or len(set(head_dims)) > 1
    kind, num_rows = draw(st.integers(0, 3)), draw(st.sampled_from(sorted({1, batch})))
    seen: dict = {"mask": draw(masks())}
    if kind == 1:
        rows = st.lists(bounds_of(seq_len, 4), min_size=num_rows, max_size=num_rows)
        seen["documents"] = tuple(draw(rows))
    elif kind == 2:
        seen = {"mask": Mask.full(), "slices": draw(slices((seq_len,) * 2, num_rows, 6))}
    sinks = st.lists(st.floats(-3, 3, width=32), min_size=heads[0], max_size=heads[0])
    return Decode(
        *(held, size, tuple(starts), world_size, num_queries),
        **seen,
        dtype=draw(st.sampled_from(list(TOLERANCES))),
        heads=heads,
        head_dims=head_dims,
        batch=batch,
        kernel=draw(st.sampled_from([None, "reference"] + ([] if special else ["cpu_flash"]))),
        sinks=tuple(draw(st.just([]) | sinks)),
        softcap=softcap,
    )


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_random_calls(world_size: int, request: pytest.FixtureRequest) -> None:
    """`pytest tests/decode/test_decode.py --decode-cases 20000` tries as many."""
    wanted, num_tried = request.config.getoption("--decode-cases") // len(WORLD_SIZES), 0

    @settings(
        max_examples=wanted // len(MERGES),
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(calls(world_size))
    def try_one(case: Decode) -> None:
        nonlocal num_tried
        for merge in MERGES:  # to draw a call takes longer than to make it
            num_tried += 1
            check(replace(case, merge=merge))

    try_one()
    request.node.user_properties.append(("decode calls tried", num_tried))


EVEN = tuple(((4 * rank, 4),) for rank in range(4))


@pytest.mark.parametrize("merge", MERGES)
def test_every_subset_of_ranks_may_be_empty(merge: str) -> None:
    for held in product([False, True], repeat=4):
        kept = tuple(runs if holds else () for runs, holds in zip(EVEN, held, strict=True))
        check(Decode(kept, 16, (15,), 4, merge=merge))


def test_unequal_rows_are_as_one_row_at_a_time() -> None:
    """In every bit: a batch changes nothing."""
    case = Decode(EVEN, 16, (3, 14, 0, 9), 4, 2, batch=4)
    inputs = case.inputs()
    for results in case.played():
        for row, start in enumerate(case.starts):
            alone = replace(case, starts=(start,), batch=1)
            object.__setattr__(alone, "inputs", lambda row=row: [x[row : row + 1] for x in inputs])
            for whole, one in zip(results, alone.played()[0], strict=True):
                assert torch.equal(whole[row], one[0]), start


@pytest.mark.parametrize("num_queries", [1, 2, 5, 63, 64])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_queries_at_every_offset_of_blocks(layout: object, num_queries: int) -> None:
    for end in range(num_queries, num_queries + 9, 3):
        check(Decode(layout, 72, (end - num_queries,), 3, num_queries))  # type: ignore[arg-type]
