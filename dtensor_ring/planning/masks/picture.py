"""Slices as text, for people to look at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dtensor_ring.planning.masks.tables import LARGEST

MAX_DRAWN = 64
"""Queries and keys that are drawn one by one."""

MAX_LISTED = 32
"""Slices that are listed, of all rows together."""


def shown(row: Sequence[int]) -> str:
    """A slice in words."""
    q_begin, q_end, k_begin, k_end, *bounds = row
    left, right = (None if bound >= LARGEST else bound for bound in bounds)
    return f"queries {q_begin} to {q_end}, keys {k_begin} to {k_end}, left {left}, right {right}"


def drawn(tables: Sequence[np.ndarray]) -> str:
    """A character for each query (down) and key (across): `#` where it is seen, `.` elsewhere."""
    if not tables:
        return "no batch rows"
    num_queries, num_keys = (max(_end(table, side) for table in tables) for side in (1, 3))
    if not num_queries:
        return "nothing is seen"
    if max(num_queries, num_keys) > MAX_DRAWN:
        return listed(tables)
    pictures = ["\n".join(_lines(seen(table, num_queries, num_keys))) for table in tables]
    if len(pictures) == 1:
        return pictures[0]
    return "\n".join(f"row {number}:\n{picture}" for number, picture in enumerate(pictures))


def _end(table: np.ndarray, side: int) -> int:
    return int(table[:, side].max(initial=0))


def _lines(cells: np.ndarray) -> Iterator[str]:
    for row in cells:
        yield "".join("#" if cell else "." for cell in row)


def seen(table: np.ndarray, num_queries: int, num_keys: int) -> np.ndarray:
    """Which queries see which keys, `(num_queries, num_keys)`, booleans."""
    cells = np.zeros((num_queries, num_keys), dtype=bool)
    lag = np.arange(num_queries)[:, None] - np.arange(num_keys)
    for q_begin, q_end, k_begin, k_end, left, right in table.tolist():
        part = slice(q_begin, q_end), slice(k_begin, k_end)
        cells[part] |= (lag[part] <= left) & (-lag[part] <= right)
    return cells


def listed(tables: Sequence[np.ndarray]) -> str:
    """The slices themselves, if there are too many to draw: the first ones, and how many more."""
    lines = [
        f"row {number}: {shown(row)}" if len(tables) > 1 else shown(row)
        for number, table in enumerate(tables)
        for row in table
    ]
    if len(lines) > MAX_LISTED:
        lines[MAX_LISTED:] = [f"and {len(lines) - MAX_LISTED} more"]
    return "\n".join(lines)
