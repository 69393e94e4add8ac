"""Sources of packages that need a GPU: importing them takes CUDA's libraries, reading does not."""

from __future__ import annotations

import ast
from importlib.machinery import PathFinder
from pathlib import Path

import pytest


def source_of(package: str, file: str, distribution: str) -> str:
    """A source file of a package; skips where it is not installed."""
    spec = PathFinder.find_spec(package)  # which does not find a stand-in
    places = [Path(x) for x in (spec.submodule_search_locations or ())] if spec else []
    found = [x / file for x in places]
    if not found:
        pytest.skip(f"{distribution} is not installed")
    return found[0].read_text()


def parsed(package: str, file: str, distribution: str) -> ast.Module:
    return ast.parse(source_of(package, file, distribution))


def plain_arguments(found: ast.arguments) -> str:
    """Arguments of a function without what they are annotated with."""
    for argument in ast.walk(found):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.dump(found)


def arguments_of(text: str) -> str:
    """The same of a text such as `"x, y=None"`."""
    expected = ast.parse(f"lambda {text}: None", mode="eval").body
    assert isinstance(expected, ast.Lambda)
    return plain_arguments(expected.args)
