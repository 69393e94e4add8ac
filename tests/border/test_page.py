"""The page has the table that `test_operations.py` checks."""

from __future__ import annotations

from docs.marked import parts
from tests.border.page import MARKERS, PAGE, lines


def test_page_has_the_table() -> None:
    _, table, _ = parts(PAGE.read_text(), *MARKERS)
    assert table.splitlines() == list(lines()), "run python -m tests.border.page --write"
