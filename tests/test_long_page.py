"""The tables of docs/long.md are those that the counts make."""

from __future__ import annotations

from docs.long_table import BEGIN, END, PAGE, lines
from docs.marked import parts


def test_tables_are_those_of_the_counts() -> None:
    _, written, _ = parts(PAGE.read_text(), BEGIN, END)
    assert written.splitlines() == [*lines()], "run python -m docs.long_table --write"
