"""The table of docs/huggingface.md: what users do with outputs, and what that gives.

python -m tests.border.page --write
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from docs.marked import table_row, write_part
from tests.border.operations import TABLE

PAGE = Path(__file__).parent.parent.parent / "docs" / "huggingface.md"
MARKERS = "<!-- operations: written by tests/border/page.py -->\n", "<!-- end of operations -->\n"


def lines() -> Iterator[str]:
    """The table in Markdown."""
    yield table_row("of an output `x`, (B, S, features)", "gives", "for example")
    yield table_row("---", "---", "---")
    for row in TABLE:
        yield table_row(row.what, row.result, ", ".join(f"`{line}`" for line in row.lines))


if __name__ == "__main__":
    if "--write" in sys.argv:
        write_part(PAGE, *MARKERS, lines())
    else:
        print(*lines(), sep="\n")
