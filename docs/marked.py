"""Parts of pages that scripts write: what stands between two comments."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def parts(text: str, begin: str, end: str) -> tuple[str, str, str]:
    """The text up to the first comment, the part, and the text from the second comment on."""
    before, _, rest = text.partition(begin)
    part, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the page has no part from {begin!r} to {end!r}")
    return before + begin, part, end + after


def write_part(page: Path, begin: str, end: str, lines: Iterable[str]) -> None:
    """Replace a part of a page."""
    before, _, after = parts(page.read_text(), begin, end)
    page.write_text(before + "".join(f"{line}\n" for line in lines) + after)


def table_row(*cells: object) -> str:
    """A row of a table."""
    return f"| {' | '.join(map(str, cells))} |"
