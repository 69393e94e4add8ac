"""Pictures of a schedule: their numbers, and the page in a browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtensor_ring import Mask, describe_schedule
from dtensor_ring.command.main import main
from dtensor_ring.lab.pictures import (
    MAX_SIDE,
    memory_figure,
    moves_figure,
    note_of,
    seen_pairs,
    time_figure,
)
from parallel_plans.models import load
from tests.layouts import LAYOUTS

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
