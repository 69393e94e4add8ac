"""What a module offers, as text: each name with its signature, each class with its attributes.

The expected text of a module stands in a file beside the tests. `python -m tests.surface` writes
the files again.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
FILES = {"dtensor_ring": "public.txt", "dtensor_ring.extension": "extension.txt"}
"""The file of each module whose names users rely on."""


def check_surface(module: str) -> None:
    """Compare what a module offers with its file."""
    expected, found = (FOLDER / FILES[module]).read_text(), surface_of(module)
    lines = (text.splitlines() for text in (expected, found))
    differences = "\n".join(difflib.unified_diff(*lines, "expected", "found", n=1, lineterm=""))
    reported = f"write tests/{FILES[module]} again by: python -m tests.surface"
    assert expected == found, (
        f"{module} offers something else; if so intended, {reported}\n{differences}"
    )


def surface_of(module: str) -> str:
    """The signature of each name in `__all__`, and below a class what it has."""
    loaded, lines = importlib.import_module(module), []
    for name in loaded.__all__:
        thing = getattr(loaded, name)
        is_called = inspect.isclass(thing) or inspect.isfunction(thing)
        lines.append(f"{name}{inspect.signature(thing)}" if is_called else f"{name} = {thing}")
        lines += [f"    .{member}{shown}" for member, shown in members(thing)]
    # Versions of Python show annotations of a NamedTuple in different ways.
    lines = [re.sub(r"ForwardRef\(('.*?')(, [^()]*)?\)", r"\1", line) for line in lines]
    wrapped = [textwrap.fill(line, 96, subsequent_indent=" " * 8) for line in lines]
    return "\n".join(wrapped) + "\n"


def members(thing: Any) -> list[tuple[str, str]]:
    """Public attributes of a class of ours, with signatures of those that are called."""
    if not inspect.isclass(thing):
        return []
    found = []
    bases = [base for base in thing.__mro__ if base.__module__.startswith("dtensor_ring")]
    for name in sorted({name for base in bases for name in vars(base)}):
        if not name.startswith("_"):
            member = getattr(thing, name)
            found.append((name, str(inspect.signature(member)) if callable(member) else ""))
    return found


if __name__ == "__main__":
    for module, file in FILES.items():
        (FOLDER / file).write_text(surface_of(module))
