"""Batch rows side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


def broadcast(**sides: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """What the sides have in each batch row; one row stands for all rows of the others.

    Raises:
        ValueError: if sides have different numbers of rows; names them.

    >>> list(broadcast(queries=[1, 2], keys=[3]))
    [(1, 3), (2, 3)]
    """
    counts = {len(rows) for rows in sides.values()} - {1}
    if len(counts) > 1:
        found = ", ".join(f"{name} has {len(rows)}" for name, rows in sides.items())
        raise ValueError(f"the batch rows must be as many, or one for all of them: {found}")
    num_rows = counts.pop() if counts else 1
    repeated = (rows if len(rows) == num_rows else list(rows) * num_rows for rows in sides.values())
    return zip(*repeated, strict=True)
