"""Pages: what they say of the code is so."""

from __future__ import annotations

import ast
import io
import re
import tomllib
from contextlib import chdir, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml

import dtensor_ring
from docs import figures, plans, timeline
from docs.long_table import BEGIN, END, PAGE, by_part, lines
from docs.marked import parts
from docs.slices import EXAMPLES, PICTURE, picture
from dtensor_ring import Mask, Slices, describe_schedule
from dtensor_ring.compute.kernels import KERNELS
from dtensor_ring.compute.kernels.registry import unregister_kernel
from dtensor_ring.planning.builders import Builders, PartBuilders
from tests.huggingface.trainers.test_trainer import under_torchrun
from tests.huggingface.trainers.trl_runs import harmless
from tests.pool import Pool
from tests.slices import shown
from tests.test_public import ROOT

PAGES = [
    page
    for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))
    if page.exists() and (page.stem != "torchtitan" or find_spec("torchtitan"))
]
CODE = re.compile(r"^```python\n(.*?)^```$(?:\n\n```\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(pool: Pool, tmp_path: Path, page: Path) -> None:
    """The code of a page runs, and prints what the page says."""
    pool.run(2, under_torchrun, _check_page, page, tmp_path)


def _check_page(page: Path, folder: Path) -> None:
    before = list(KERNELS)
    with chdir(folder), harmless():
        _run_page(page)
    for name in [name for name in KERNELS if name not in before]:
        unregister_kernel(name)  # this process runs other tests


def _run_page(page: Path) -> None:
    """Run the blocks of a page one after another; those of the README each alone."""
    namespace: dict[str, Any] = {"__name__": page.stem}
    for code, printed in CODE.findall(page.read_text()):
        output = io.StringIO()
        if page.stem == "README":
            namespace = {"__name__": "__main__"}
        with redirect_stdout(output):
            exec(compile(code, page.name, "exec"), namespace)
        assert not printed or output.getvalue() == printed


# The picture of docs/concepts.md is drawn from plans, and shows all pairs that count.


def test_the_plans_of_the_concepts() -> None:
    assert plans.picture() == plans.PICTURE.read_text(), "run python -m docs.plans --write"
    assert f"({plans.PICTURE.name})" in (ROOT / "docs" / "concepts.md").read_text()


@pytest.mark.parametrize("title", plans.EXAMPLES)
def test_what_is_computed_is_what_counts(title: str) -> None:
    example = plans.EXAMPLES[title]
    bounds = example.cu_seqlens or [0, plans.SEQ_LEN]
    expected = (
        shown(Slices.documents(bounds, example.mask).tables[0], (plans.SEQ_LEN, plans.SEQ_LEN)) > 0
    )
    ranks = plans.computed(example.schedule)[..., 0]
    assert np.array_equal(ranks >= 0, expected)
    for rank, positions in enumerate(example.positions):
        is_seen = expected[positions]
        assert (ranks[positions][is_seen] == rank).all(), "a rank computes its own queries"


# What a newcomer sees first: README.md, its figures and picture, and the data of the package.

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


# The tables of docs/long.md are those that the counts make.

WRITTEN = parts(PAGE.read_text(), BEGIN, END)[1].splitlines()
AGAIN = "run python -m docs.long_table --write"


def test_the_last_table_is_that_of_the_counts() -> None:
    table = [*by_part()]
    assert WRITTEN[-len(table) :] == table, AGAIN


def test_what_is_said_of_others_has_the_numbers_of_the_table() -> None:
    row = next(x for x in WRITTEN if "and optimizer on the host" in x)
    for cell in row.split("|")[2:4]:
        assert cell.strip() in PAGE.read_text().partition("## Beside ALST")[2]


@pytest.mark.repeats  # the same function, of other models and machines
def test_tables_are_those_of_the_counts() -> None:
    assert [*lines()] == WRITTEN, AGAIN


# The section on slices of docs/masks.md has all builders, and its picture shows what they show.

BUILDERS = [
    name
    for base in (Builders, PartBuilders)
    for name in vars(base)
    if not name.startswith("_") and name != "of_tables"
]


def test_all_builders_are_there() -> None:
    page = (ROOT / "docs" / "masks.md").read_text()
    assert re.findall(r"^\| `Slices\.(\w+)\(", page, re.MULTILINE) == list(EXAMPLES)
    assert sorted(EXAMPLES) == sorted(BUILDERS)
    assert f"({PICTURE.name})" in page


def test_the_picture_is_that_of_the_builders() -> None:
    assert picture() == PICTURE.read_text(), "run python -m docs.slices --write"


def test_the_picture_shows_what_is_seen() -> None:
    paths = ElementTree.fromstring(picture()).findall("{*}g/{*}g")
    for slices, panel in zip(EXAMPLES.values(), paths, strict=True):
        cells = np.zeros((24, 24), dtype=np.int64)
        drawn = "".join(path.get("d", "") for path in panel.findall("{*}path"))
        for x, y, width, height in re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)h-\d+z", drawn):
            cells[int(y) : int(y) + int(height), int(x) : int(x) + int(width)] += 1
        assert np.array_equal(cells, shown(slices.tables[0], cells.shape))
