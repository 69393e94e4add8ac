"""What a run leaves out, and why: nothing is installed and nothing is fetched for it."""

import ast
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from harness import ROOT

from dtensor_ring import available_kernels

PYTEST = 9
"""The first major version that reads our settings."""


def skips() -> Iterator[str]:
    """Kernels, test files and pictures that what is installed here cannot do."""
    for name, reason in available_kernels().items():
        if reason is not None:
            yield f"kernel {name}: {reason}"
    if reason := without_pytest():
        yield f"step tests: {reason}"
    else:
        for path in gpu_tests():
            if missing := missing_packages(path):
                yield f"{path.relative_to(ROOT)}: without {', '.join(sorted(missing))}"
    if find_spec("matplotlib") is None:
        yield "the picture of the card: matplotlib is not installed"
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        yield "compiled calls may fail: there is no C compiler, which Triton's launchers need"


def without_pytest() -> str | None:
    """Why the tests cannot run, if so."""
    try:
        found = version("pytest")
    except PackageNotFoundError:
        return "pytest is not installed"
    is_old = int(found.partition(".")[0]) < PYTEST
    return f"pytest {found} is installed, and {PYTEST} is needed" if is_old else None


def gpu_tests() -> list[Path]:
    """Test files with a test of a GPU."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [path for path in found if "mark.gpu" in path.read_text()]


@cache
def missing_packages(path: Path) -> frozenset[str]:
    """Packages that a test file imports first of all, itself or by another, and that are absent."""
    missing: set[str] = set()
    for module in _imported(ast.parse(path.read_text())):
        first, file = module.partition(".")[0], ROOT / f"{module.replace('.', '/')}.py"
        if first == "tests" and file.exists():
            missing |= missing_packages(file) if file != path else set()
        elif first not in sys.stdlib_module_names and find_spec(first) is None:
            missing.add(first)
    return frozenset(missing)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Modules that a file imports where it begins."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
