"""The grid that people look at, and the numbers under it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_ring import Balanced, Mask, Slices, ZigZag, compare_layouts, describe_schedule
from dtensor_ring.planning.plan import plan
from tests.planning.test_layout import shard_tables


def test_zigzag_grid() -> None:
    assert_expected_inline(
        str(describe_schedule("zigzag", Mask.causal(), 16, 4)),
        """\
zigzag, left -, right 0: 16 tokens on 4 ranks, 4 steps
share of all work, %     step 0   step 1   step 2   step 3    total
rank 0                     7.35     5.88     5.88     5.88    25.00
rank 1                     7.35     5.88     5.88     5.88    25.00
rank 2                     7.35     5.88     5.88     5.88    25.00
rank 3                     7.35     5.88     5.88     5.88    25.00
busiest rank over mean: 1.000, makespan: 1.000
keys and values: 42 tokens, at most 12 to a rank""",
    )


def test_grid_of_a_window_and_documents() -> None:
    documents = torch.tensor([[0, 4, 16], [0, 16, 16]], dtype=torch.int32)
    schedule = describe_schedule(ZigZag(), Mask.local(3, 2), 16, 2, documents)
    assert_expected_inline(
        str(schedule),
        """\
zigzag, left 3, right 2: 16 tokens on 2 ranks, 2 steps
share of all work, %     step 0   step 1    total
rank 0                    36.36     9.09    45.45
rank 1                    47.27     7.27    54.55
busiest rank over mean: 1.091, makespan: 1.091
keys and values: 10 tokens, at most 5 to a rank""",
    )


BOUNDS = torch.tensor([[0, 4, 16], [0, 16, 16]], dtype=torch.int32)
COMPARED = {
    "causal": ((Mask.causal(), 16, 4), "contiguous 1.706, striped 1.176, zigzag 1.000"),
    "window": ((Mask.local(3, 2), 16, 2, BOUNDS), "contiguous 1.091, striped 1.018, zigzag 1.091"),
    "no stripes": ((Mask.causal(), 9, 2), "contiguous 1.333, zigzag 1.022"),
}


@pytest.mark.parametrize(("arguments", "expected"), COMPARED.values(), ids=list(COMPARED))
def test_layouts_compared(arguments: tuple, expected: str) -> None:
    comparison = compare_layouts(*arguments)
    balanced = 1.018 if len(arguments) > 3 else comparison.imbalances["balanced"]
    assert str(comparison) == f"busiest rank over mean: {expected}, balanced {balanced:.3f}"
    mask, *others = arguments
    for name, imbalance in comparison.imbalances.items():
        assert describe_schedule(name, mask, *others).imbalance == imbalance


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("causal", 8, 2), "mask must be a Mask"),
        ((Mask.causal(), 8.0, 2), "seq_len must be an int, got 8.0"),
        ((Mask.causal(), 8, 0), "world_size must be from 1 to 65,536, got 0"),
        ((Mask.causal(), 2**14, 2**13), "are 67,108,864 for world_size 8192, at most 1,048,576"),
        ((Mask.causal(), 8, 2, [0, 9]), r"the sequence length 8, got \[0, 9\]"),
    ],
)
def test_comparisons_refused(arguments: tuple, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        compare_layouts(*arguments)


def test_printing_plans_nothing() -> None:
    schedule = describe_schedule("zigzag", Mask.causal(), 64, 4)
    plan.clear()
    with patch.object(plan, "_function", side_effect=AssertionError):
        assert str(schedule).startswith("zigzag, left -, right 0: 64 tokens on 4 ranks, 4 steps")


@pytest.mark.parametrize(
    "cu_seqlens",
    [[0, 3, 8], (0, 3, 8), [[0, 3, 8]], torch.tensor([0, 3, 8]), torch.tensor([[0, 3, 8]])],
    ids=["list", "tuple", "nested", "tensor", "2-D tensor"],
)
def test_documents_in_any_form(cu_seqlens: object) -> None:
    schedule = describe_schedule("contiguous", Mask.causal(), 8, 2, cu_seqlens)
    assert schedule.areas == [[6 + 1, 0], [10, 4]]


@settings(deadline=None)
@given(shard_tables(), st.sampled_from([Mask.causal(), Mask.full(), Mask.sliding(3)]))
def test_shares_sum_to_all_work(dealing: tuple, mask: Mask) -> None:
    layout, world_size, seq_len = dealing
    schedule = describe_schedule(layout, mask, seq_len, world_size)
    totals = [sum(steps) for steps in schedule.areas]
    rows = [line.split() for line in str(schedule).splitlines() if line.startswith("rank")]
    assert len(rows) == world_size
    if seq_len:
        shares = [float(row[-1]) for row in rows]
        assert sum(shares) == pytest.approx(100, abs=0.01 * world_size)
        assert shares == pytest.approx([100 * x / sum(totals) for x in totals], abs=0.01)
        assert schedule.imbalance == pytest.approx(max(totals) * world_size / sum(totals))
    else:
        assert schedule.imbalance == 1.0


@pytest.mark.parametrize(
    ("layout", "mask", "imbalance"),
    [
        ("contiguous", Mask.full(), 1.0),
        ("contiguous", Mask.causal(), (16 + 10) * 2 / 36),
        ("striped", Mask.causal(), (10 + 10) * 2 / 36),
        ("zigzag", Mask.causal(), 1.0),
    ],
)
def test_imbalance(layout: str, mask: Mask, imbalance: float) -> None:
    assert describe_schedule(layout, mask, 8, 2).imbalance == pytest.approx(imbalance)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ring", Mask.full(), 8, 2), "unknown layout 'ring'; known layouts: contiguous, striped"),
        (("striped", Mask.full(), 9, 2), "pad it to 10 tokens"),
        (("zigzag", Mask.full(), 8, 2, [0, 9]), r"the sequence length 8, got [0, 9]"),
        (("zigzag", Mask.full(), 8, 2, []), r"the sequence length 8, got []"),
        (("zigzag", Mask.full(), 8, 0), "world_size must be from 1 to 65,536, got 0"),
        (("zigzag", Mask.full(), 8, 10**7), "world_size must be from 1 to 65,536, got 10000000"),
        (("zigzag", Mask.full(), 2**70, 2), "seq_len must be from 0 to 1,099,511,627,776, got 118"),
        (("block_cyclic:1", Mask.full(), 2**30, 2), "in 536,870,912 blocks for each, at most"),
        (
            ("zigzag", Mask.full(), 2**14, 2**13),
            "67,108,864 for world_size 8192, at most 1,048,576",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        describe_schedule(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [("zigzag", 8.0, 2), ("zigzag", 8, 2.0), ("balanced", 8.0, 2), ("zigzag", 8, 2, [0.0])],
)
def test_floats_are_no_numbers_of_tokens(arguments: tuple) -> None:
    """Plans are kept by them, and 8.0 would find that of 8, or be found in its place."""
    layout, *others = arguments
    with pytest.raises(TypeError, match=r"must be an int, got|cannot be interpreted as an integer"):
        describe_schedule(layout, Mask.causal(), *others)


LARGEST = 2**63 - 1


@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag", "block_cyclic:2"])
@pytest.mark.parametrize(
    ("huge", "unbounded"),
    [
        (Mask.local(LARGEST, LARGEST), Mask.full()),
        (Mask.sliding(LARGEST), Mask.causal()),
        (Mask.chunked(LARGEST), Mask.causal()),
        (Mask.prefix_causal(LARGEST), Mask.full()),
    ],
    ids=str,
)
def test_the_largest_counts_are_unbounded(layout: str, huge: Mask, unbounded: Mask) -> None:
    for documents in (None, [0, 5, 16, 20]):
        one, other = (describe_schedule(layout, x, 24, 4, documents) for x in (huge, unbounded))
        assert (one.areas, one.received) == (other.areas, other.received)


def test_slices_are_described_as_their_mask_is() -> None:
    ends, mask = [0, 9, 40, 64], Mask.sliding(7)
    slices = Slices.documents(ends, mask)
    for layout in ("zigzag", "balanced"):
        one = describe_schedule(layout, mask, 64, 4, ends)
        other = describe_schedule(layout, None, 64, 4, slices=slices)
        assert (one.areas, one.received) == (other.areas, other.received)
        assert str(other).startswith(
            f"{layout}, {len(slices.tables[0])} slices: 64 tokens on 4 ranks"
        )
    assert compare_layouts(mask, 64, 4, ends) == compare_layouts(None, 64, 4, slices=slices)


@pytest.mark.parametrize(
    "function", [partial(describe_schedule, "zigzag"), compare_layouts, Balanced]
)
def test_what_says_nothing_or_twice_is_refused(function: Callable[..., Any]) -> None:
    slices = Slices.documents([0, 8], Mask.causal())
    with pytest.raises(TypeError, match="mask must be a Mask"):
        function(None, 8, 2)
    with pytest.raises(TypeError, match="slices must be Slices, got list"):
        function(None, 8, 2, slices=[])
    with pytest.raises(ValueError, match="slices say all that is seen"):
        function(Mask.causal(), 8, 2, slices=slices)
