"""The surface that plans are written against: its names, docstrings and page.

`tests/extension.txt` has every name of `dtensor_ring.extension` with its signature.
"""

from __future__ import annotations

import inspect
import re

import dtensor_ring
from dtensor_ring import extension
from tests.test_public import ROOT


def test_names_are_not_those_of_the_front_page() -> None:
    """A name is imported from one place."""
    assert not {*extension.__all__} & {*dtensor_ring.__all__}
    assert extension.__all__ == sorted(extension.__all__, key=_order)


def _order(name: str) -> tuple[int, str]:
    """Constants, classes, functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def test_all_have_docstrings() -> None:
    for name in extension.__all__:
        thing = getattr(extension, name)
        doc = inspect.getdoc(thing) or f"{name}("
        assert not (callable(thing) and doc.startswith(f"{name}(")), name


def test_the_docstring_and_the_page_group_all_names() -> None:
    assert extension.__doc__ is not None
    grouped = extension.__doc__.partition("\n\n")[2]
    named = re.findall(r"`(\w+)`[,.]", grouped.partition("docs/extension.md.")[2])
    assert sorted(named) == sorted(extension.__all__)
    page = (ROOT / "docs" / "extension.md").read_text()
    rows = [row for row in page.splitlines() if row.startswith("| ")]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[2])]
    assert sorted(listed) == sorted(extension.__all__)
