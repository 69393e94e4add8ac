"""Boundaries of packed documents, as a value that is cheap to compare and to hash."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from dtensor_ring.planning.values.frozen import FrozenArrays
from dtensor_ring.planning.values.integers import Integers, integer_rows


class Documents(FrozenArrays):
    """Boundaries of documents in global positions: one row for the whole batch, or one per row.

    Document d of a row holds the positions from boundary d up to boundary d + 1. Equal by content;
    the hash is computed once, so that a cache finds boundaries without reading them again.

    Args:
        rows: boundaries of each batch row, integers. No row at all is an empty batch.

    >>> Documents([(0, 3, 8)]) == Documents([[0, 3, 8]]), Documents([(0, 3, 8)]).rows
    (True, ((0, 3, 8),))
    """

    def __init__(self, rows: Iterable[Any] = ()) -> None:
        self.arrays = self._freeze(np.array(row, dtype=np.int64) for row in rows)

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """The boundaries as Python integers, for people to look at."""
        return tuple(tuple(array.tolist()) for array in self.arrays)

    @property
    def num_bytes(self) -> int:
        """Memory of the boundaries and of their slices, which are six numbers each, in bytes."""
        return 48 * sum(array.size for array in self.arrays)

    def check(self, seq_len: int, name: str = "cu_seqlens") -> None:
        """Refuse what cannot be the boundaries of a sequence.

        Args:
            seq_len: global length of the sequence, in tokens.
            name: what the error calls the boundaries.

        Raises:
            ValueError: if a row does not start at 0, decreases, or ends after the sequence.
        """
        for row in self.arrays:
            if not row.size or row[0] != 0 or row[-1] > seq_len or (row[1:] < row[:-1]).any():
                raise ValueError(
                    f"{name} must start at 0, never decrease and end at or before the sequence "
                    f"length {seq_len}, got {row.tolist()}"
                )

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter(self.rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return Documents, (self.arrays,)  # hashes of bytes differ between processes

    def __repr__(self) -> str:
        return f"Documents({[list(row) for row in self.rows]})"


Boundaries = Documents | Integers
"""Boundaries of documents `(D+1,)` or `(B, D+1)`, in any form that `as_documents` takes."""


def as_documents(
    cu_seqlens: Boundaries | None, *, name: str = "cu_seqlens", keep_empty: bool = False
) -> Documents | None:
    """Convert boundaries of any form to `Documents`.

    Args:
        cu_seqlens: `(D+1,)` or `(B, D+1)` integers: a tensor on the CPU, an array, a sequence, a
            sequence of sequences, `Documents` (returned as they are) or `None` (stays `None`).
        name: what errors call the boundaries.
        keep_empty: keep documents without tokens, whose numbers count in cross attention.
            Otherwise they are dropped, and with them the padding of `cu_seqlens`.

    Returns:
        The boundaries; rows that are all alike as one row.

    Raises:
        ValueError: if they are neither `(D+1,)` nor `(B, D+1)`.
        TypeError: if they are not integers.

    >>> as_documents([[0, 3, 8, 8], [0, 3, 8, 8]])
    Documents([[0, 3, 8]])
    """
    if cu_seqlens is None or isinstance(cu_seqlens, Documents):
        return cu_seqlens
    rows = integer_rows(cu_seqlens, name, "boundaries", "(D+1,) or (B, D+1)")
    if not keep_empty:
        rows = [_without_empty(row) for row in rows]
    # One row for the whole batch is planned once, and its tiles cover all rows.
    is_alike = all(np.array_equal(row, rows[0]) for row in rows)
    return Documents(rows[:1] if is_alike else rows)


def _without_empty(row: np.ndarray) -> np.ndarray:
    """The row without repeated boundaries.

    One comparison of all neighbours finds them, so only those of real documents are ever copied.
    """
    return row[np.append(0, 1 + np.flatnonzero(row[1:] != row[:-1]))] if row.size else row
