"""The grid that people look at, the numbers under it, and its pictures."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_ring import Balanced, Mask, Slices, ZigZag, compare_layouts, describe_schedule
from dtensor_ring.command.main import main
from dtensor_ring.lab.pictures import (
    MAX_SIDE,
    memory_figure,
    moves_figure,
    note_of,
    seen_pairs,
    time_figure,
)
from dtensor_ring.planning.plan import plan
from parallel_plans.models import load
from tests.layouts import LAYOUTS
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


# Pictures of a schedule: their numbers, and the page in a browser.

OPTIONS = {"--seq-len": "96", "--world-size": "3", "--mask": "sliding:40", "--layout": "zigzag"}
COMMAND = ["schedule", *(word for pair in OPTIONS.items() for word in pair)]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.pairs
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.spec)
@pytest.mark.parametrize(
    ("mask", "documents"),
    [(Mask.causal(), None), (Mask.sliding(17), None), (Mask.full(), [0, 20, 60, 96])],
)
@pytest.mark.parametrize("strategy", ["ring", "ulysses:2", "ulysses:2+all_gather", "ulysses"])
def test_each_pair_is_drawn_where_its_rank_computes_it(
    layout: Any, mask: Mask, documents: list[int] | None, strategy: str
) -> None:
    schedule = describe_schedule(layout, mask, 96, 4, documents, strategy=strategy)
    drawn = seen_pairs(schedule)
    assert drawn.positions.tolist() == list(range(96))
    q, k = np.ogrid[:96, :96]
    seen = np.ones((96, 96), dtype=bool)
    if mask.right is not None:
        seen &= k <= q
    if mask.left is not None:
        seen &= q - k <= mask.left
    if documents is not None:
        number = np.searchsorted(documents, np.arange(96), "right")
        seen &= number[:, None] == number
    assert ((drawn.steps >= 0) == seen).all()
    heads = schedule.strategy.heads
    assert set(drawn.owners.tolist()) == set(range(0, 4, heads))
    assert (note_of(schedule.strategy) != "") == (heads > 1)
    for rank, areas in enumerate(schedule.areas):
        here = drawn.steps[drawn.owners == rank // heads * heads]  # the first of its group
        assert [int((here == step).sum()) for step in range(len(areas))] == areas
    for (query, key), step in np.ndenumerate(drawn.steps):
        if step >= 0:
            source = schedule.plans[drawn.owners[query]].steps[step].source
            assert source == drawn.owners[key]


def test_what_travels_and_when() -> None:
    schedule = describe_schedule("zigzag", Mask.causal(), 4096, 4)
    drawn = seen_pairs(schedule)
    assert len(drawn.positions) == MAX_SIDE
    assert len(set(drawn.owners.tolist())) == 4
    received = [sum(y for y in trace["y"] if y > 0) for trace in moves_figure(schedule)["data"]]
    assert received == schedule.received
    (bars,) = time_figure(schedule)["data"]
    ends = [begin + area for begin, area in zip(bars["base"], bars["x"], strict=True)]
    assert max(ends) == pytest.approx(schedule.makespan)
    assert memory_figure(schedule)["data"][0]["y"] == [1024] * 4


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly")
    assert main(load, [*COMMAND, "--html", str(tmp_path / "no" / "page.html")]) == 2
    assert "no/page.html" in capsys.readouterr().err


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The page of `COMMAND` in a browser; what it logs is an error."""
    pytest.importorskip("plotly")
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    path = tmp_path_factory.mktemp("page") / "schedule.html"
    assert main(load, [*COMMAND, "--html", str(path)]) == 0
    with sync_api.sync_playwright() as driver:
        # As root, Chromium has no sandbox.
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 1150, "height": 3000}, offline=True)
        opened.said = []
        opened.on("pageerror", lambda error: opened.said.append(str(error)))
        opened.on("console", lambda reported: opened.said.append(reported.text))
        opened.goto(path.as_uri())
        opened.wait_for_selector("#memory .bars")
        yield opened
        browser.close()


def _visible(page: Any, name: str) -> list[bool]:
    found = page.evaluate(f"document.getElementById({name!r}).data.map(x => x.visible !== false)")
    return [bool(x) for x in found]


@pytest.mark.parametrize(("name", "places"), [("mask", 4), ("moves", 3)])
def test_sliders_pick_a_step_and_a_rank(page: Any, name: str, places: int) -> None:
    if name == "mask":
        places = 1 + describe_schedule("zigzag", Mask.sliding(40), 96, 3).plans[0].num_steps
    assert _visible(page, name) == [True] + [False] * (places - 1)
    rail = page.locator(f"#{name} .slider-rail-touch-rect").bounding_box()
    page.mouse.click(rail["x"] + rail["width"] - 2, rail["y"] + rail["height"] / 2)
    page.wait_for_function(f"document.getElementById({name!r}).data.at(-1).visible === true")
    assert _visible(page, name) == [False] * (places - 1) + [True]


@pytest.mark.parametrize(
    ("name", "within", "texts"),
    [
        ("time", ".bars path", ("step 0, keys of rank", "tiles", "pairs")),
        ("work", ".heatmaplayer image", ("rank", "%")),
        ("memory", ".bars path", ("rank 0: 32 tokens",)),
    ],
)
def test_hovering_shows_numbers(page: Any, name: str, within: str, texts: tuple[str, ...]) -> None:
    box = page.locator(f"#{name} {within}").first.bounding_box()
    page.mouse.move(0, 0)
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=3)
    page.wait_for_selector(f"#{name} .hoverlayer .hovertext")
    shown = " ".join(page.locator(f"#{name} .hoverlayer .hovertext").all_text_contents())
    assert all(text in shown for text in texts), shown
    assert not page.said
