"""Parts of any regions, in any order: their sum and their mean, in new memory or in place."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_ring.compute import merge
from dtensor_ring.compute.memory import WHOLE, Accumulation, Partial, region
from dtensor_ring.compute.merge import accumulate_sums

BATCH, HEADS, TOKENS, DIM = 2, 3, 6, 4
SPANS = st.tuples(st.integers(0, TOKENS), st.integers(0, TOKENS)).map(sorted).map(tuple)
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
    shape = BATCH, HEADS, TOKENS, DIM
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
