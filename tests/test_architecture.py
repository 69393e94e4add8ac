"""ARCHITECTURE.md and the READMEs of folders say what is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture import PAGE, ROOT, WAYS, Function, called, listed, mended
from tests.test_code import LAYERS, SCRIPTS, SOURCES, TREES, _imports

FOLDERS = sorted({path.parent for path in SOURCES.values()})
NOTES = [folder / "README.md" for folder in (*FOLDERS, ROOT / "tests")]
FILES = [path.relative_to(ROOT).as_posix() for path in (*SOURCES.values(), *SCRIPTS)]
PAGES = [PAGE, ROOT / "CONTRIBUTING.md", *NOTES]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_ways_are_those_of_calls() -> None:
    page, calls = PAGE.read_text(), called()
    ways = listed(page)
    assert list(ways) == list(WAYS)
    for way, functions in ways.items():
        assert len(functions) > 10
        named = set(functions)
        assert functions == [x for x in calls[way] if x in named], (
            f"{way}: write it again by: python -m tests.architecture --write"
        )


def test_ways_are_mended() -> None:
    """Files that were moved, and items in another order."""
    page = "<!-- way: token -->\n{}<!-- end of way -->\n".format
    before = page("1. `a/x.py:f` adds\n   two.\n2. `a/y.py:C.g` ends.\n")
    calls = {"token": [Function("b/z.py", "C.g"), Function("b/x.py", "f"), Function("b/w.py", "f")]}
    after = page("1. `b/z.py:C.g` ends.\n2. `b/x.py:f` adds\n   two.\n")
    assert mended(before, calls) == mended(after, calls) == after
    with pytest.raises(LookupError, match=r"no single call of .*'C.g'"):
        mended(before, {"token": calls["token"][1:]})


def test_folders_are_in_the_table() -> None:
    rows = re.findall(r"(?m)^\| `([\w/]+)/` \|.*\| `([\w/]+\.\w+)` \|$", PAGE.read_text())
    assert {folder for folder, _ in rows} == {_name(x) for x in FOLDERS} - {"dtensor_ring"}
    for folder, first in rows:
        assert (ROOT / folder / first).exists() or (ROOT / first).exists()
        assert f"\nRead `{first}` first" in (ROOT / folder / "README.md").read_text()


def test_picture_has_each_folder_once() -> None:
    """The order of imports in it is tested by `test_code`."""
    folders = [x.name for x in FOLDERS if x.parent == ROOT / "dtensor_ring"]
    assert sorted(LAYERS) == sorted([*folders, "extension", "ring"])


def _missing(page: Path) -> Iterator[str]:
    """Files, pages and titles that a page names, and that are not there."""
    text = page.read_text()
    for name in re.findall(r"`([\w./]+\.py)[:`]", text):
        is_bare = page not in NOTES and "/" not in name  # a path begins at the root
        named = [x for x in FILES if x == name or (is_bare and x.endswith(f"/{name}"))]
        if not named and not (page.parent / name).exists():
            yield f"{page}: {name}"
    for link, anchor in re.findall(r"\]\(([\w./]*)(#[\w-]*)?\)", text):
        target = page.parent / link if link else page
        if not target.exists() or (anchor and anchor[1:] not in _anchors(target)):
            yield f"{page}: {link}{anchor}"


def test_pages_name_files_that_exist() -> None:
    assert not [missing for page in PAGES for missing in _missing(page)]


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_each_folder_has_a_note() -> None:
    for note in NOTES:
        text = note.read_text()
        assert len(text.splitlines()) <= 20, note
        assert text.startswith(f"# {_name(note.parent)}\n"), note
        for begin in (r"Read `[\w./]+` first", r"Words \(", "May import: "):
            assert re.search(f"(?m)^{begin}", text), (note, begin)


def test_notes_have_each_file() -> None:
    unsaid = [
        _name(path)
        for path in SOURCES.values()
        if path.name not in ("__init__.py", "__main__.py")
        and f"`{path.name}`" not in (path.parent / "README.md").read_text()
    ]
    assert not unsaid


def test_pages_say_where_names_are_defined() -> None:
    """As "`Name` in `path`", or "of" it; `Class.method` is looked for by its last name."""
    wrong, num_found = [], 0
    for page in PAGES:
        text = re.sub(r"\s+", " ", page.read_text())
        for name, path in re.findall(r"`([A-Za-z_][\w.]*)`,? (?:in|of) `([\w/]+\.py)`", text):
            place = ROOT / path
            if not place.exists():  # a file of the README's folder
                place = page.parent / path
            last, num_found = name.rpartition(".")[2], num_found + 1
            defined = rf"(?m)^\s*(?:def|class) {last}\b|^{last}\b"
            if not place.exists() or not re.search(defined, place.read_text()):
                wrong.append(f"{_name(page)}: {name} in {path}")
    assert num_found > 20
    assert not wrong


def test_notes_say_what_is_imported() -> None:
    """Folders and files of the same package; `test_code` has what plans import of the other."""
    assert not [unsaid for folder in FOLDERS for unsaid in _unsaid(folder)]


def _unsaid(folder: Path) -> Iterator[str]:
    """Imports of a folder that its note does not allow."""
    allowed = (folder / "README.md").read_text().partition("May import: ")[2]
    if allowed.startswith("all "):
        return
    package = folder.relative_to(ROOT).parts[0]
    for name in (x for x, path in SOURCES.items() if path.parent == folder):
        for other in {SOURCES[x] for x in _imports(TREES[name]) if x in SOURCES}:
            place, is_root = _name(other.parent), other.parent == ROOT / package
            if other.parent != folder and place.startswith(package):
                known = _name(other) if is_root else f"{place.removeprefix(f'{package}/')}/"
                if f"`{known}`" not in allowed:
                    yield f"{name} imports {known}"
