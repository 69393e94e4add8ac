"""Prints tables of the command line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def print_table(rows: Iterable[Sequence[str]], headings: Sequence[str] = ()) -> None:
    """Print rows as a table.

    Args:
        rows: the cells of each row.
        headings: of the columns; without them the table has no heading.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(*headings, show_header=bool(headings), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)
