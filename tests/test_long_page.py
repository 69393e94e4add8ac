"""The tables of docs/long.md are those that the counts make."""

from __future__ import annotations

import pytest

from docs.long_table import BEGIN, END, PAGE, by_part, lines
from docs.marked import parts

WRITTEN = parts(PAGE.read_text(), BEGIN, END)[1].splitlines()
AGAIN = "run python -m docs.long_table --write"


def test_the_last_table_is_that_of_the_counts() -> None:
    table = [*by_part()]
    assert WRITTEN[-len(table) :] == table, AGAIN


def test_what_is_said_of_others_has_the_numbers_of_the_table() -> None:
    row = next(x for x in WRITTEN if "and optimizer on the host" in x)
    for cell in row.split("|")[2:4]:
        assert cell.strip() in PAGE.read_text().partition("## Beside ALST")[2]


@pytest.mark.repeats  # the same function, of other models and machines
def test_tables_are_those_of_the_counts() -> None:
    assert [*lines()] == WRITTEN, AGAIN
