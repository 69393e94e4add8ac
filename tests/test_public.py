"""What is public: all names, and the extensions of other packages."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dtensor_ring
from dtensor_ring import extension
from tests.surface import FILES, check_surface

ROOT = Path(__file__).parent.parent
PUBLIC = {name: getattr(dtensor_ring, name) for name in dtensor_ring.__all__}


@pytest.mark.parametrize("module", FILES)
def test_signatures(module: str) -> None:
    check_surface(module)


IMPORTS = """
import sys, torch.distributed.tensor.parallel, torch.utils.flop_counter
before = set(sys.modules)
import dtensor_ring
packages = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(packages - set(sys.stdlib_module_names) - {"torch"}))
print(*{"torch._dynamo"} & set(sys.modules))  # which takes twice the time of all of ours
print(*(name for name in sys.modules if name.startswith("dtensor_ring.lab")))
"""


def test_import_loads_nothing_else() -> None:
    command = [sys.executable, "-W", "error", "-c", IMPORTS]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["dtensor_ring"]
    assert not run.stderr


# The surface that plans are written against: its names, docstrings and page.
#
# `tests/extension.txt` has every name of `dtensor_ring.extension` with its signature.


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
