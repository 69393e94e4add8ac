"""How the product reads, in numbers: imports, entries, comments, copies, folders, calls and cases.

    python -m tests.rooms

A line of code is no blank, comment or docstring. Each measure has the goal that we set for it.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.pool import Pool
from tests.profiled import OURS, ROOT, Profile, attention, token, training_step
from tests.test_code import LAYERS, SOURCES, TREES, _imports

PAIR = 6
"""Lines of the same shape that make two places a pair."""
COMMON = 8
"""A run of lines in more places than these is a form of the language, not a copy."""
LONG = 200
"""Lines of a file in which the place of its entry matters."""
NO_CODE = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
NO_CODE |= {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING}

KEYWORDS = {"def", "class", "return", "if", "for", "else", "elif", "in", "not", "and", "or", "is"}
KEYWORDS |= {"raise", "with", "while", "try", "except", "lambda", "yield", "self", "None"}


class Measure(NamedTuple):
    """What is counted, and the most (the least, for comments) that it should be."""

    name: str
    value: str
    goal: str


def structure() -> list[Measure]:
    """Measures of the product that are read from its sources."""
    code = sum(len(_code_lines(name)) for name in SOURCES)
    imports = sum(len(_import_lines(TREES[name])) for name in SOURCES)
    lines = sum(len(path.read_text().splitlines()) for path in SOURCES.values())
    calls = [x for tree in TREES.values() for x in ast.walk(tree) if isinstance(x, ast.Call)]
    starred = [x for x in calls if any(isinstance(arg, ast.Starred) for arg in x.args)]
    before = [found for tree in TREES.values() if (found := _before_definition(tree)) is not None]
    comments = sum(len(_comments(path)) for path in SOURCES.values())
    return [
        Measure("lines of the product", f"{lines:,}", ""),
        Measure("imports, share of code", f"{imports / code:.1%}", "7 %"),
        Measure("lines before the first definition", f"{sum(before) / len(before):.1f}", "20"),
        Measure("comments, share of lines", f"{comments / lines:.1%}", "4.5 % or more"),
        Measure("calls with a starred argument", f"{len(starred) / len(calls):.1%}", "1 %"),
        Measure("long files whose entry is late", _late_entries(), "10"),
        Measure("pairs of folders that import each other", str(len(two_way_folders())), "0"),
        Measure("levels of the layer test", str(len(LAYERS)), "folders"),
        Measure("of them single files", str(sum("." in layer for layer in LAYERS)), "0"),
        Measure("pairs of places with equal lines", str(len(duplicates())), "30"),
    ]


def _tokens(path: Path) -> list[tokenize.TokenInfo]:
    return list(tokenize.generate_tokens(io.StringIO(path.read_text()).readline))


def _comments(path: Path) -> list[int]:
    """Lines with a comment for readers, not for a linter."""
    machine = ("# noqa", "# type:", "# pyrefly:", "# pragma", "# ruff:", "# fmt:")
    return [
        x.start[0]
        for x in _tokens(path)
        if x.type == tokenize.COMMENT and not x.string.startswith(machine)
    ]


def _docstring_lines(tree: ast.AST) -> set[int]:
    """Lines of texts that stand alone: docstrings, also those of constants and fields."""
    texts = [
        x.value
        for x in ast.walk(tree)
        if isinstance(x, ast.Expr)
        and isinstance(x.value, ast.Constant)
        and isinstance(x.value.value, str)
    ]
    return {line for x in texts for line in range(x.lineno, (x.end_lineno or x.lineno) + 1)}


def _code_lines(name: str) -> set[int]:
    code = {
        line
        for x in _tokens(SOURCES[name])
        if x.type not in NO_CODE
        for line in range(x.start[0], x.end[0] + 1)
    }
    return code - _docstring_lines(TREES[name])


def _import_lines(tree: ast.AST) -> set[int]:
    found = [x for x in ast.walk(tree) if isinstance(x, ast.Import | ast.ImportFrom)]
    return {line for x in found for line in range(x.lineno, (x.end_lineno or x.lineno) + 1)}


def _definitions(tree: ast.Module) -> dict[str, int]:
    """The first line of each function and class at the top of a file, decorators included."""
    kinds = ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef
    found = [x for x in tree.body if isinstance(x, kinds)]
    return {x.name: min([x.lineno, *(y.lineno for y in x.decorator_list)]) for x in found}


def _before_definition(tree: ast.Module) -> int | None:
    lines = _definitions(tree).values()
    return min(lines) - 1 if lines else None


def late_entries() -> dict[str, str]:
    """Long files, and the name in their second half that others import more than any other."""
    used = Counter(
        (node.module, alias.name)
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    )
    late = {}
    for name in _long_files():
        places = _definitions(TREES[name])
        ranked = sorted((-used[name, x], line, x) for x, line in places.items() if used[name, x])
        entry = ranked[0][2] if ranked else None
        if entry and places[entry] > len(SOURCES[name].read_text().splitlines()) / 2:
            late[name] = entry
    return late


def _long_files() -> list[str]:
    return [x for x, path in SOURCES.items() if len(path.read_text().splitlines()) >= LONG]


def _late_entries() -> str:
    return f"{len(late_entries())} of {len(_long_files())}"


def _folder(module: str) -> str:
    """Return the folder of a module below its package; a package of its own below huggingface."""
    return ".".join(SOURCES[module].relative_to(ROOT).parts[:-1])


def two_way_folders() -> list[tuple[str, str]]:
    """Pairs of folders, neither within the other, that import each other when they are loaded.

    A `__main__` is a program: it brings the commands of the package and of the plans together, and
    nobody imports it.
    """
    edges = {
        (_folder(name), _folder(other))
        for name, tree in TREES.items()
        if not name.endswith(".__main__")
        for other in _imports(tree, late=False)
        if other in SOURCES
    }
    pairs = [(a, b) for a, b in edges if a < b and (b, a) in edges]
    return sorted(x for x in pairs if not x[1].startswith(f"{x[0]}."))


def _shapes(path: Path) -> list[tuple[int, tuple[str, ...]]]:
    """Each line of code and its shape: names, numbers and texts are one thing each."""
    kinds = {tokenize.NAME: "name", tokenize.NUMBER: "number", tokenize.STRING: "text"}
    lines: dict[int, list[str]] = defaultdict(list)
    skipped = _docstring_lines(ast.parse(path.read_text()))
    for x in _tokens(path):
        if x.type not in NO_CODE and x.start[0] not in skipped:
            is_word = x.type == tokenize.NAME and x.string in KEYWORDS
            lines[x.start[0]].append(x.string if is_word else kinds.get(x.type, x.string))
    imports = _import_lines(ast.parse(path.read_text()))
    return [(line, tuple(shape)) for line, shape in sorted(lines.items()) if line not in imports]


def duplicates() -> set[tuple[tuple[str, int], tuple[str, int]]]:
    """Pairs of places, a file and a line, that share `PAIR` lines of code of the same shape."""
    windows: dict[tuple[tuple[str, ...], ...], list[tuple[str, int]]] = defaultdict(list)
    number: dict[tuple[str, int], int] = {}
    for name, path in SOURCES.items():
        lines = _shapes(path)
        for first in range(len(lines) - PAIR + 1):
            shape = tuple(x for _, x in lines[first : first + PAIR])
            if sum(map(len, shape)) >= 8 * PAIR:  # shorter lines are brackets and fields
                number[name, lines[first][0]] = first
                windows[shape].append((name, lines[first][0]))
    pairs = {
        (a, b)
        for places in windows.values()
        if 1 < len(places) <= COMMON
        for index, a in enumerate(places)
        for b in places[index + 1 :]
        if a[0] != b[0] or abs(number[a] - number[b]) >= PAIR
    }
    followed = {((a[0], number[a]), (b[0], number[b])) for a, b in pairs}
    return {  # a run of more lines is one pair: where no pair stands a line before
        (a, b) for a, b in pairs if ((a[0], number[a] - 1), (b[0], number[b] - 1)) not in followed
    }


class Count(Profile):
    """Counts calls of our functions, and calls from a folder of ours into another."""

    def __init__(self) -> None:
        self.calls = 0
        self.crossings = 0
        self._last = ""

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            folder = str(Path(frame.f_code.co_filename).parent)
            self.calls += 1
            self.crossings += bool(self._last) and folder != self._last
            self._last = folder


def _later_forward(make: Callable[[DeviceMesh], Callable[[], Any]], mesh: DeviceMesh) -> Count:
    """Return the calls of the third forward: what is planned and bound once is not counted."""
    forward = make(mesh)
    for _ in range(2):
        forward()
    with Count() as count:
        forward()
    return count


def _run() -> dict[str, tuple[int, int]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    counts = {
        "SDPA forward": _later_forward(attention, mesh),
        "Hugging Face forward": _later_forward(training_step, mesh),
        "a token": token(mesh, Count),
    }
    return {name: (count.calls, count.crossings) for name, count in counts.items()}


GOALS = {"SDPA forward": (360, 60), "Hugging Face forward": (560, 120), "a token": (280, 90)}


def calls() -> list[Measure]:
    """Calls of our functions on the first of two ranks, in processes of their own."""
    pool = Pool(2)
    try:
        counts = pool.run(2, _run)[0]
    finally:
        pool.close()
    return [
        Measure(f"{name}: {what}", str(value), str(goal))
        for name, values in counts.items()
        for what, value, goal in zip(
            ("calls", "changes of folder"), values, GOALS[name], strict=True
        )
    ]


def cases() -> list[Measure]:
    """Lines of tests, and cases as pytest collects them, without those that run on demand."""
    lines = sum(len(x.read_text().splitlines()) for x in (ROOT / "tests").rglob("*.py"))
    asked = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests"]
    out = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return [
        Measure("lines of tests", f"{lines:,}", "47,000"),
        Measure("cases", str(sum("::" in line for line in out.splitlines())), "7,200"),
    ]


def _details() -> Iterator[str]:
    for name, entry in late_entries().items():
        yield f"late entry: {name}: {entry}"
    for one, other in two_way_folders():
        yield f"two ways: {one} and {other}"
    for one, other in sorted(duplicates()):
        yield f"equal: {one[0]}:{one[1]} and {other[0]}:{other[1]}"


def main() -> None:
    """Print all measures as one table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--details", action="store_true", help="print the places that are counted")
    parser.add_argument("--sources", action="store_true", help="run nothing: read the sources only")
    options = parser.parse_args()
    if options.details:
        print(*_details(), sep="\n")
    table = Table("measure", "now", "goal")
    for measure in structure() + ([] if options.sources else calls() + cases()):
        table.add_row(*measure)
    Console().print(table)


if __name__ == "__main__":
    main()
