"""What the doctor found, and how it is shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple


class Finding(NamedTuple):
    """A row of the report.

    >>> print(written([Finding("torch", "2.15.0")]))
    {"torch": {"found": "2.15.0", "advice": "", "is_bad": false}}
    """

    what: str
    found: str
    advice: str = ""
    """What to do about it."""
    is_bad: bool = False
    """Whether a ring cannot run, or is wrong."""


def written(findings: Sequence[Finding]) -> str:
    """All findings as an object of objects, by what was looked at."""
    fields = Finding._fields[1:]
    return json.dumps({what: dict(zip(fields, x, strict=True)) for what, *x in findings})


def show(findings: Sequence[Finding]) -> None:
    """Print a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for what, found, advice, is_bad in findings:
        mark = "[red]wrong[/]" if is_bad else ""
        table.add_row(what, found, mark, advice)
    Console(highlight=False).print(table)
