"""The table of mutants is one of the code that is there."""

from __future__ import annotations

from pathlib import Path

from tests.mutants import MUTANTS, OF, PACKAGE, ROOT, files_of


def test_what_is_changed_occurs_once() -> None:
    counts = {
        (file, old): (ROOT / PACKAGE / file).read_text().count(old) for file, old, _ in MUTANTS
    }
    assert not {place: count for place, count in counts.items() if count != 1}


def test_each_file_has_tests() -> None:
    assert {file for file, _, _ in MUTANTS} == OF.keys()
    assert not [name for file in OF for name in files_of(file) if not Path(name).exists()]
