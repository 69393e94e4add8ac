"""The section on slices of docs/masks.md has all builders, and its picture shows what they show."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np

from docs.slices import EXAMPLES, PICTURE, picture
from dtensor_ring.planning.builders import Builders, PartBuilders
from tests.slices import shown
from tests.test_public import ROOT

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
