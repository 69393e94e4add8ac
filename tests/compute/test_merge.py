"""Partial results and gradients of any regions, in any order, add up to the whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, inf, nan
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_ring import Mask
from dtensor_ring.compute import merge
from dtensor_ring.compute.accumulate import RunningOutput
from dtensor_ring.compute.memory import (
    TOKEN_MAJOR,
    WHOLE,
    Accumulation,
    Order,
    Partial,
    Region,
    cols_of,
    in_order,
    region,
    rows_of,
)
from dtensor_ring.compute.merge import MAX_WEIGHT, accumulate_sums, merge_
from dtensor_ring.planning.tile import FULL, Tile
from tests.dense import dense_attention

ROWS, COLS = 5, 8


def scored(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of rows of scores; a row that sees nothing is (0, -inf)."""
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
    return (weights @ values)[None, None], lse[None, None]


def identity(head_dim: int = 3) -> tuple[Tensor, Tensor]:
    zeros = torch.zeros(1, 1, ROWS, head_dim, dtype=torch.float64)
    return zeros, torch.full((1, 1, ROWS), -torch.inf, dtype=torch.float64)


@settings(deadline=None)
@given(
    pieces=st.permutations(range(COLS)).flatmap(
        lambda cols: st.lists(st.integers(0, COLS), max_size=4).map(
            lambda cuts: [cols[a:b] for a, b in pairwise([0, *sorted(cuts), COLS])]
        )
    ),
    spread=st.sampled_from([0.1, 1.0, 30.0, 1000.0]),
    hidden=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_pieces_in_any_order_make_the_whole(
    pieces: list[list[int]], spread: float, hidden: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = spread * torch.randn(ROWS, COLS, generator=generator, dtype=torch.float64)
    scores[torch.rand(ROWS, COLS, generator=generator) < hidden] = -torch.inf
    values = torch.randn(COLS, 3, generator=generator, dtype=torch.float64)
    out, lse = identity()
    for cols in pieces:
        merge_(out, lse, *scored(scores[:, cols], values[cols]))
    torch.testing.assert_close((out, lse), scored(scores, values), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("first", [True, False], ids=["identity first", "identity last"])
@pytest.mark.parametrize("seen", [True, False], ids=["with a block", "with itself"])
def test_identity(first: bool, seen: bool) -> None:
    block = scored(torch.randn(ROWS, COLS).double(), torch.randn(COLS, 3).double())
    block = block if seen else identity()
    out, lse = (x.clone() for x in (identity() if first else block))
    merge_(out, lse, *(block if first else identity()))
    torch.testing.assert_close((out, lse), block, rtol=0, atol=0)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [torch.inf, -torch.inf, 3e38], ids=str)
@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize("lead", [-20.0, 0.0, 20.0])
def test_extreme_outputs(first: bool, lead: float, number: float, dtype: torch.dtype) -> None:
    """An infinite output stays so, whatever its weight; large ones are not subtracted."""
    outs = torch.tensor([number, -3e38], dtype=dtype).view(2, 1, 1, 1, 1)
    lses = torch.tensor([lead, 0.0]).view(2, 1, 1, 1)
    if not first:
        outs, lses = outs.flip(0), lses.flip(0)
    weights = lses.double().softmax(0).unsqueeze(-1)
    expected = (weights * outs.double()).sum(0)
    out, lse = outs[0].clone(), lses[0].clone()
    merge_(out, lse, outs[1], lses[1])
    torch.testing.assert_close(out.double(), expected, rtol=0.01, atol=1e35)


class Ops(TorchDispatchMode):
    """A context that counts ops."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_without_numbers_nothing_is_merged() -> None:
    """On the meta device, where the pieces that a CPU merges would be thousands of ops."""
    out, lse = torch.empty(1, 1, 2**20, 8, device="meta"), torch.empty(1, 1, 2**20, device="meta")
    with Ops() as ops:
        merge_(out, lse, out.bfloat16(), lse)
    assert ops.count == 1, "the cast"


# Parts that join one by one, and are divided after the last: the same as all of them at once.

BATCH, HEADS, TOKENS, DIM = 2, 3, 8, 4
ALL, LATE, EARLY = (region(None, x) for x in ((0, TOKENS), (3, TOKENS), (0, 3)))
ONE = region(1, (2, 6))
JUMPS = {
    "alike": [0, 0, 0, 0, 0],
    "steps up": [0, 10, 20, 30, 40],
    "a step beyond the largest weight": [0, 30, 30, 0, 60],
    "down": [0, -40, -80, -200, 0],
    "far up": [0, 200, 0, 0, 200],
    "far from 0": [-300, -300, -299, -300, -300],
    "nothing first": [-inf, 0, 1, -inf, 0],
    "nothing": [-inf] * 5,
}
"""How much larger the scores of a part are than a normal distribution's."""

WHERE = {
    "all rows": [ALL] * 5,
    "late rows": [ALL, LATE, ALL, LATE, LATE],
    "in two pieces": [EARLY, LATE, LATE, EARLY, ALL],
    "of one batch row": [ALL, ONE, ALL, ONE, LATE],
    "not all rows": [LATE, ONE, LATE, ONE, LATE],
}


def parts_of(
    regions: Sequence[Region], jumps: Sequence[float], dtype: torch.dtype
) -> list[Partial]:
    like = torch.empty(BATCH, HEADS, TOKENS, DIM)
    wide = torch.promote_types(dtype, torch.float32)
    partials = []
    for where, jump in zip(regions, jumps, strict=True):
        out = torch.randn_like(like[where], dtype=wide).to(dtype)
        lse = (torch.randn_like(like[where][..., 0]) + jump).to(wide)
        partials.append(Partial(where, out.masked_fill(lse.unsqueeze(-1) == -inf, 0), lse))
    return partials


def at_once(partials: Sequence[Partial], sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """The mean of all parts in float64; infinite outputs are infinite whatever their weight."""
    outs = torch.zeros(len(partials), BATCH, HEADS, TOKENS, DIM).double()
    lses = torch.full(outs.shape[:-1], -inf).double()
    for out, lse, partial in zip(outs, lses, partials, strict=True):
        assert partial.lse is not None
        out[partial.region], lse[partial.region] = partial.x.double(), partial.lse.double()
    whole = lses.logsumexp(0)
    if sinks is not None:
        whole = torch.logaddexp(whole, sinks.double().view(1, -1, 1))
    weights = (lses - whole).exp().masked_fill(lses == -inf, 0).unsqueeze(-1)
    return (weights * outs).masked_fill(outs == 0, 0).sum(0), whole


def check(
    partials: Sequence[Partial],
    dtype: torch.dtype,
    sinks: Tensor | None = None,
    room: int | None = None,
) -> None:
    query = torch.empty(BATCH, HEADS, TOKENS, DIM, dtype=dtype)
    expected, whole = at_once(partials, sinks)
    running = RunningOutput(query, DIM, sinks, room=room)
    for partial in partials:
        assert partial.lse is not None
        running.make_room()
        running.add(partial.region, partial.x.clone(), partial.lse.clone())
    out, lse = running.result()
    eps = torch.finfo(lse.dtype).eps
    # A weight is as exact as the lse that it is made of, whose last digit grows with it.
    largest = whole[whole.isfinite()].abs().max().item() if whole.isfinite().any() else 0
    atol = 8 * torch.finfo(dtype).eps + 4 * eps * largest
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol, equal_nan=True)
    torch.testing.assert_close(lse.double(), whole, rtol=4 * eps, atol=8 * eps, equal_nan=True)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("jump", JUMPS)
def test_one_by_one(jump: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sinks = torch.tensor([0.5, -inf, 30.0])
    for regions in WHERE.values():
        partials = parts_of(regions, JUMPS[jump], dtype)
        for some, room in ((None, None), (sinks, None), (sinks, 2)):
            check(partials, dtype, some, room)
            check(partials[:2], dtype, some, room)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [inf, -inf, nan])
@pytest.mark.parametrize("which", range(5))
@pytest.mark.parametrize("jump", ["alike", "steps up", "a step beyond the largest weight"])
def test_extreme_weights(jump: str, which: int, number: float, dtype: torch.dtype) -> None:
    """They stay in their place, with their sign."""
    torch.manual_seed(0)
    for regions in WHERE.values():
        partials = parts_of(regions, JUMPS[jump], dtype)
        partials[which].x[:, :2, ::2, 1] = number
        check(partials, dtype)


@pytest.mark.parametrize("number", [inf, nan])
@pytest.mark.parametrize("which", range(5))
def test_extreme_scores(which: int, number: float) -> None:
    """A row whose score is nan is nan, and stays so; one of inf forgets all else."""
    torch.manual_seed(0)
    partials = parts_of(WHERE["all rows"], JUMPS["alike"], torch.float32)
    expected, whole = at_once(partials, None)
    where, partial = (slice(None), 1, 2), partials[which]
    assert partial.lse is not None
    partial.lse[where] = number
    if number != inf:
        partial.x[where] = number
    expected[where], whole[where] = partial.x[where].double(), number
    running = RunningOutput(torch.empty(BATCH, HEADS, TOKENS, DIM), DIM)
    for one in partials:
        assert one.lse is not None
        running.make_room()
        running.add(one.region, one.x.clone(), one.lse.clone())
    found = running.result()
    for x, y in zip(found, (expected, whole), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("lead", [0.0, -10.0])
def test_large_outputs_do_not_overflow(lead: float) -> None:
    """Up to the largest float over the largest weight and the number of parts."""
    number = torch.finfo(torch.float32).max / MAX_WEIGHT / 8
    running = RunningOutput(torch.empty(1, 1, 1, 1), 1)
    for lse in (lead, 0.0, 3.0, 0.0):
        running.make_room()
        running.add(
            region(None, (0, 1)), torch.full((1, 1, 1, 1), number), torch.full((1, 1, 1), lse)
        )
    assert running.result()[0].item() == pytest.approx(number, rel=1e-6)


def test_equal_outputs_stay_as_they_are() -> None:
    """A large lse is rounded to few decimals, but the weights add up to 1."""
    torch.manual_seed(0)
    partials = parts_of([ALL] * 5, [1000.0] * 5, torch.float32)
    running = RunningOutput(torch.empty(BATCH, HEADS, TOKENS, DIM), DIM)
    for partial in partials:
        assert partial.lse is not None
        running.make_room()
        running.add(partial.region, torch.ones_like(partial.x), partial.lse)
    torch.testing.assert_close(
        running.result()[0], torch.ones_like(partials[0].x), rtol=0, atol=5e-7
    )


def test_rows_that_nothing_joins_are_not_touched() -> None:
    """Merging takes memory's time, so other rows of the total are not read."""
    total, lse = torch.full((1, 1, 4, 2), nan), torch.zeros(1, 1, 4)
    total[..., 2:, :] = 1.0
    partial = Partial(region(None, (2, 4)), torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2))
    denominator = torch.ones_like(lse)
    first = Partial(region(None, (0, 4)), total, lse, denominator)
    cropped = Accumulation(total, [first, partial], lse, None, denominator).cropped()
    assert cropped.target.shape[2] == 2
    accumulate_sums(cropped)
    assert denominator.flatten().tolist() == [1, 1, 2, 2]
    assert total[..., 2:, :].eq(1).all(), "not divided yet"
    assert Accumulation(total, [first, partial], lse).cropped().target is total, (
        "all rows are divided"
    )


# Tiles in any order make the whole, rounded once.


def tiles_of(num_rows: int, num_cols: int, batch: int) -> list[Tile]:
    """A cover of all rows by all columns, by rows of the batch where there are two."""
    half_rows, half_cols = num_rows // 2, num_cols // 2
    tiles = [
        Tile((0, num_rows), (0, half_cols), FULL),
        Tile((half_rows, num_rows), (half_cols, num_cols), FULL),
    ]
    upper = Tile((0, half_rows), (half_cols, num_cols), FULL, batch=0)
    return [*tiles, upper, *(Tile(upper.rows, upper.cols, FULL, row) for row in range(1, batch))]


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [1, -1], ids=["whole first", "whole last"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("memory_order", [TOKEN_MAJOR, (0, 1, 2, 3)])
@pytest.mark.parametrize("room", [None, 1, 2, 8])
def test_tiles_make_the_whole(
    dtype: torch.dtype, order: int, with_sinks: bool, memory_order: Order, room: int | None
) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, n, 4).to(dtype) for n in (ROWS, COLS, COLS))
    sinks = torch.randn(3) if with_sinks else None
    query = in_order(query, memory_order, dtype)
    running, wide = (
        RunningOutput(query, 4, sinks, room=room),
        torch.promote_types(dtype, torch.float32),
    )
    tiles = tiles_of(ROWS, COLS, 2)[::order]
    for tile in tiles:
        rows, cols = rows_of(tile), cols_of(tile)
        block = dense_attention(query[rows], key[cols], value[cols], Mask.full())
        block_lse = in_order(block.lse.detach(), memory_order[:-1], wide)
        running.add(rows, block.out.detach().to(dtype), block_lse)
    out, lse = running.result()
    assert lse.is_contiguous()
    expected = dense_attention(query, key, value, Mask.full(), sinks=sinks)
    assert out.dtype == dtype
    assert out.permute(memory_order).is_contiguous(), "in the query's order"
    assert lse.dtype == wide
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected.out.detach(), rtol=0, atol=8 * eps)
    eps = torch.finfo(wide).eps
    torch.testing.assert_close(lse.double(), expected.lse.detach(), rtol=0, atol=32 * eps)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -torch.inf])], ids=["", "sinks"])
def test_partial_of_nothing(sinks: Tensor | None) -> None:
    query = torch.randn(2, 2, 3, 4, dtype=torch.bfloat16)
    out, lse = RunningOutput(query, 6, sinks).result()
    assert (out.shape, out.dtype, lse.dtype) == ((2, 2, 3, 6), torch.bfloat16, torch.float32)
    assert out.eq(0).all()
    expected = torch.full((2,), -torch.inf) if sinks is None else sinks
    assert torch.equal(lse, expected.view(1, 2, 1).expand(2, 2, 3))


def test_a_single_whole_tile_is_kept_as_it_is() -> None:
    query = torch.randn(1, 2, 3, 4, dtype=torch.bfloat16)
    out, lse = torch.randn(1, 2, 3, 4).bfloat16(), torch.randn(1, 2, 3)
    running = RunningOutput(query, 4)
    running.add(rows_of(Tile((0, 3), (0, 3), FULL)), out, lse)
    result = running.result()
    assert result[0].data_ptr() == out.data_ptr(), "no copy"
    assert torch.equal(result[1], lse)


# Parts of any regions, in any order: their sum and their mean, in new memory or in place.

SHORT = 6
SPANS = st.tuples(st.integers(0, SHORT), st.integers(0, SHORT)).map(sorted).map(tuple)
REGIONS = st.lists(
    st.builds(region, st.sampled_from([None, 0, 1]), SPANS) | st.just(WHOLE), min_size=1, max_size=5
)


@settings(deadline=None)
@given(
    regions=REGIONS,
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    target_dtype=st.sampled_from([None, torch.bfloat16]),
    in_place=st.booleans(),
    kind=st.sampled_from(["sum", "mean", "mean with sinks"]),
    hidden=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_parts_of_any_regions(
    regions: list,
    dtype: torch.dtype,
    target_dtype: torch.dtype | None,
    in_place: bool,
    kind: str,
    hidden: float,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)
    regions = [WHOLE, *regions] if in_place else regions
    shape = BATCH, HEADS, SHORT, DIM
    values, slopes, partials = torch.zeros(shape).double(), torch.zeros(shape[:3]).double(), []
    sinks = torch.randn(HEADS, generator=generator) if "sinks" in kind else None
    if sinks is not None:
        slopes += sinks.double().exp().view(1, -1, 1)
    for number, where in enumerate(regions):
        is_first = in_place and not number
        rows = slopes[where].shape
        x = torch.randn(*rows, DIM, generator=generator).to(wide if is_first else dtype)
        lse = torch.randn(rows, generator=generator, dtype=wide)
        lse[torch.rand(rows, generator=generator) < hidden] = -torch.inf
        if kind == "sum":
            values[where] += x
        else:
            x = x.masked_fill(lse.unsqueeze(-1) == -torch.inf, 0)
            values[where] += x * lse.double().exp().unsqueeze(-1)
            slopes[where] += lse.double().exp()
        partials.append(Partial(where, x, None if kind == "sum" else lse))
    target, lse = partials[0].x, partials[0].lse
    if not in_place:
        target = torch.full(shape, torch.nan, dtype=target_dtype or wide)
        lse = None if kind == "sum" else torch.full(shape[:3], torch.nan, dtype=wide)
    with patch.object(merge, "CAST_SIZE", 7):
        accumulate_sums(Accumulation(target, partials, lse, sinks))
    expected = values if kind == "sum" else values / slopes.clamp(min=1e-300).unsqueeze(-1)
    torch.testing.assert_close(target, expected.to(target.dtype))
    if lse is not None:
        torch.testing.assert_close(lse, slopes.log().to(wide))


def test_a_sum_of_narrow_parts_is_rounded_once() -> None:
    """bfloat16 has 8 bits: added one by one, ones would be lost next to 256."""
    partials = [
        Partial(WHOLE, torch.full((1, 1, 1, 1), x).bfloat16()) for x in (256.0, 1.0, 1.0, 1.0)
    ]
    target = torch.empty(1, 1, 1, 1, dtype=torch.bfloat16)
    accumulate_sums(Accumulation(target, partials))
    assert target.item() == 260


@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
def test_what_nobody_else_has_stays_as_it_is(number: float) -> None:
    x, lse = torch.full((1, 1, 2, 1), number), torch.zeros(1, 1, 2)
    other = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1)
    target, total = torch.empty(1, 1, 3, 1), torch.empty(1, 1, 3)
    partials = Partial(region(None, (0, 2)), x, lse), Partial(region(None, (2, 3)), *other)
    accumulate_sums(Accumulation(target, partials, total))
    torch.testing.assert_close(target[..., :2, :], x, equal_nan=True)
    assert target[..., 2, :].item() == 1
