"""What users do with a sharded sequence, and what each of it gives: a table of docs/huggingface.md.

An operation is the line that a user writes, of `x`, a tensor (batch, sequence, features). The same
line runs on the stock tensor.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from docs.marked import parts
from tests.test_public import ROOT

SHARDED, WHOLE, REFUSED = "sharded", "whole", "refused"
"""A sharded sequence again; plain tensors or numbers, the same on every rank; an error."""
MARKERS = "<!-- operations: tests/border runs them -->\n", "<!-- end of operations -->\n"


class Row(NamedTuple):
    """Lines that give the same kind of result.

    Attributes:
        what: the family of operations.
        result: `SHARDED`, `WHOLE` or `REFUSED`.
        lines: what a user writes, of the names that `names_of` gives.
    """

    what: str
    result: str
    lines: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Row:
        """That of a line of the page."""
        what, result, rest = text.removeprefix("| ").split(" | ", 2)
        assert result in (SHARDED, WHOLE, REFUSED), text
        return cls(what, result, tuple(re.findall("`(.+?)`", rest)))


_, _PART, _ = parts((ROOT / "docs" / "huggingface.md").read_text(), *MARKERS)
TABLE = [Row.of(line) for line in _PART.splitlines()[2:]]
"""By family. Lines of a row give the same kind of result; an operation is in one row."""

OPERATIONS: dict[str, str] = {line: row.result for row in TABLE for line in row.lines}
