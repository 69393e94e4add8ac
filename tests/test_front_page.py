"""What a newcomer sees first: README.md, its figures and picture, and the data of the package."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
import yaml

import dtensor_ring
from docs import figures, timeline
from dtensor_ring import Mask, describe_schedule
from tests.test_public import ROOT

README = ROOT / "README.md"


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_figures_are_those_of_the_cards(page: Path) -> None:
    assert figures.written(page) == page.read_text(), "run python -m docs.figures --write"


def test_all_figures_are_on_a_page() -> None:
    text = "".join(page.read_text() for page in figures.PAGES)
    assert not {name for name in figures.PARTS if f"<!-- {name}: " not in text}


def test_ranges_of_strategies_are_those_of_the_card() -> None:
    """By the table that the benchmark writes for people, in which `*` marks the fastest."""
    (row,) = [x for x in figures.strategies() if x.startswith("| 8 ranks, 256 tokens each |")]
    for path in sorted(figures.CARDS.glob("*/strategies.md")):
        _, table = path.read_text().split("## Forward + backward")
        rows = re.findall(r"^\| 8 +\| +\| 2,048 .*$", table, re.M)
        found = [float(x.split(" | ")[6].strip(" *")) for x in rows]
        assert len(found) == 6
        assert row.split(" | ")[1] == f"{min(found):.2f} to {max(found):.2f}"


def test_a_figure_is_that_of_its_card() -> None:
    """By the tables that the benchmark writes for people, in place of the single times."""
    (row,) = [x for x in figures.comparison() if x.startswith("| 2 ranks, 4,096 tokens, float32 |")]
    found = [float(x) for x in row.strip("| ").split(" | ")[1:]]
    expected: list[float] = []
    for card in sorted(figures.CARDS.glob("*/ring.md")):
        ratios = re.findall(r"^\| 4,096 +\| float32 .* ([\d.]+) \|$", card.read_text(), re.M)
        expected += map(float, ratios)  # forward, then with backward
    assert found == pytest.approx(expected, abs=0.006)


def test_the_picture_is_that_of_the_plans() -> None:
    assert timeline.picture() == timeline.PICTURE.read_text(), "run python -m docs.timeline --write"
    for layout in timeline.TITLES:
        schedule = timeline.schedule(layout)
        blocks = timeline.blocks(schedule)
        assert max(block.end for block in blocks) == pytest.approx(schedule.makespan)
        for page in (README, ROOT / "docs" / "index.md"):
            (alt,) = re.findall(r"!\[(time lines [^\]]*)\]\(\S*timeline.svg\)", page.read_text())
            assert f"{schedule.makespan:.2f}" in alt


@pytest.mark.parametrize(("layout", "received"), [("contiguous", 1024), ("zigzag", 2048)])
@pytest.mark.parametrize("num_ranks", [4, 16])
def test_keys_of_a_window(layout: str, received: int, num_ranks: int) -> None:
    """What the README says of a window of 1,024 tokens before the query."""
    schedule = describe_schedule(layout, Mask.sliding(1024), 65536, num_ranks)
    assert max(schedule.received) == received
    assert f"{received:,}" in README.read_text()


@pytest.mark.parametrize(
    "package", ["dtensor_ring", "parallel_plans.huggingface", "parallel_plans.torchtitan"]
)
def test_reference_has_all_public_names(package: str) -> None:
    """By the sources, as not every environment has torchtitan."""
    source = ROOT.joinpath(*package.split("."), "__init__.py").read_text()
    (public,) = re.findall(r"^__all__ = (\[.*?\])$", source, re.MULTILINE | re.DOTALL)
    page = (ROOT / "docs" / "api.md").read_text()
    named = re.findall(rf"^::: {re.escape(package)}\.(\w+)$", page, re.MULTILINE)
    assert sorted(named) == sorted(ast.literal_eval(public))


def test_all_data_have_one_version() -> None:
    version = dtensor_ring.__version__
    assert f"\n## [{version}] - " in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name
)
def test_forms_ask_for_something(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.stem != "config":
        assert {"name", "description", "body"} <= form.keys()
        assert all({"type", "id", "attributes"} <= field.keys() for field in form["body"])


def test_extras_are_named_in_the_readme() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    section = README.read_text().partition("## Installing\n")[2].partition("\n## ")[0]
    assert not {name for name in project["optional-dependencies"] if f"`{name}`" not in section}


@pytest.mark.parametrize("page", [README, ROOT / "SECURITY.md"])
def test_links_lead_somewhere(page: Path) -> None:
    """Of pages that are not part of the site, whose links `make docs` checks."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert links
    assert not {link for link in links if not (page.parent / link).exists()}
