"""Parts that join one by one, and are divided after the last: the same as all of them at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, inf, nan

from dtensor_ring.compute.accumulate import RunningOutput
from dtensor_ring.compute.memory import Accumulation, Partial, Region, region
from dtensor_ring.compute.merge import MAX_WEIGHT, accumulate_sums

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
def test_extreme_outputs(jump: str, which: int, number: float, dtype: torch.dtype) -> None:
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
