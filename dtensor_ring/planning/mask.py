"""Masks say which keys a query sees: bands, chunks and prefixes, within packed documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtensor_ring.planning.ranges import FrozenArrays, Integers, integer_rows

# The largest integer that the ops take (int64).
LARGEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Mask:
    """How far back (`left`) and ahead (`right`) of itself a query sees, in tokens.

    Query position q sees key position k if and only if `-right <= q - k <= left`; `None` means
    unbounded. The bounds are those of flash-attn's `window_size`, where -1 is our `None`.

    With `chunk`, a query sees only its own chunk of `chunk` positions: `q // chunk == k // chunk`.
    With `prefix`, `right` does not apply to the first `prefix` tokens of a document: every query
    sees them however far ahead they are.

    >>> Mask.sliding(2).sees(5, 3), Mask.sliding(2).sees(5, 2), Mask.causal().sees(5, 6)
    (True, False, False)

    Raises:
        ValueError: if a bound is negative or beyond int64, a chunk is empty, or the mask has both
            chunk and prefix.
        TypeError: if an argument is neither an int nor None.
    """

    left: int | None
    right: int | None
    chunk: int | None = None
    prefix: int | None = None

    def __post_init__(self) -> None:
        for name, smallest in (("left", 0), ("right", 0), ("chunk", 1), ("prefix", 0)):
            # bool is an int in Python, but True is not a number of tokens.
            count = getattr(self, name)
            if count is None:
                continue
            if isinstance(count, bool) or not isinstance(count, int):
                raise TypeError(f"Mask {name} is an int or None, got {type(count).__name__}")
            if not smallest <= count <= LARGEST:
                bound = f"least {smallest}" if count < smallest else "most 2**63 - 1"
                raise ValueError(
                    f"Mask {name} counts tokens and is at {bound}, got {count}; None means "
                    "unbounded"
                )
        if self.chunk is not None and self.prefix is not None:
            raise ValueError(
                f"a mask has chunks or a prefix, not both, got {self}; "
                "with cu_seqlens as boundaries of the chunks, a prefix is possible"
            )

    @classmethod
    def causal(cls) -> Mask:
        """Return a mask in which a query sees itself and everything before it."""
        return cls(None, 0)

    @classmethod
    def full(cls) -> Mask:
        """Return a mask in which a query sees everything."""
        return cls(None, None)

    @classmethod
    def sliding(cls, window: int) -> Mask:
        """Return a mask in which a query sees itself and the `window` tokens before it.

        A Hugging Face `sliding_window` of w counts the query itself, so it is `sliding(w - 1)`. So
        is the `window_size=(w - 1, 0)` that it passes to flash-attn.
        """
        return cls(window, 0)

    @classmethod
    def local(cls, left: int | None, right: int | None) -> Mask:
        """Return a mask in which a query sees `left` tokens before itself and `right` after."""
        return cls(left, right)

    @classmethod
    def chunked(cls, chunk: int) -> Mask:
        """Return a mask that is causal within chunks of `chunk` tokens, as in Llama 4.

        Chunks count from position 0 of the row, not from the start of each document. For chunks
        within each document, as in flash-attn's `attention_chunk`, put their boundaries into
        `cu_seqlens` and take `causal()`.

        Other bands can have chunks, too: `Mask(window, 0, chunk=8192)`. Each chunk is a slice, and
        a batch row has at most 65,536 of them.
        """
        return cls(None, 0, chunk=chunk)

    @classmethod
    def prefix_causal(cls, prefix: int) -> Mask:
        """Return a causal mask in which all queries see the first `prefix` tokens of a document.

        The prefix therefore sees itself in both directions (prefix language models, as in Raffel
        et al., 2020, arXiv 1910.10683, section 3.2.1).
        """
        return cls(None, 0, prefix=prefix)

    def sees(self, query: int, key: int) -> bool:
        """Return whether a query sees a key, both in one document that starts at position 0."""
        # Positive lags look back, negative ones ahead.
        lag = query - key
        ahead = self.right is None or -lag <= self.right
        lifted = self.prefix is not None and key < self.prefix
        behind = self.left is None or lag <= self.left
        return behind and (ahead or lifted) and not self._between_chunks(query, key)

    def _between_chunks(self, query: int, key: int) -> bool:
        return self.chunk is not None and query // self.chunk != key // self.chunk


class Documents(FrozenArrays):
    """Boundaries of documents in global positions: one row for the whole batch, or one per row.

    Document d of a row holds the positions from boundary d up to boundary d + 1. Documents compare
    by content. Their hash is computed once, so a cache lookup does not read the boundaries again.

    Args:
        rows: boundaries of each batch row, integers. Without rows, the batch is empty.

    >>> Documents([(0, 3, 8)]) == Documents([[0, 3, 8]]), Documents([(0, 3, 8)]).rows
    (True, ((0, 3, 8),))
    """

    def __init__(self, rows: Iterable[Any] = ()) -> None:
        self.arrays = self._freeze(np.array(row, dtype=np.int64) for row in rows)

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """The boundaries as Python integers, to print them."""
        return tuple(tuple(array.tolist()) for array in self.arrays)

    @property
    def num_bytes(self) -> int:
        """Memory of the boundaries and of their slices (six numbers each), in bytes."""
        return 48 * sum(array.size for array in self.arrays)

    def check(self, seq_len: int, name: str = "cu_seqlens") -> None:
        """Refuse boundaries that do not fit a sequence.

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


# Boundaries of documents `(D+1,)` or `(B, D+1)`, in any form that `as_documents` takes.
Boundaries = Documents | Integers


def as_documents(
    cu_seqlens: Boundaries | None, *, name: str = "cu_seqlens", keep_empty: bool = False
) -> Documents | None:
    """Convert boundaries of any form to `Documents`.

    Args:
        cu_seqlens: `(D+1,)` or `(B, D+1)` integers: a tensor on the CPU, an array, a sequence, a
            sequence of sequences, `Documents` (returned as they are) or `None` (stays `None`).
        name: what errors call the boundaries.
        keep_empty: keep documents without tokens: cross attention pairs documents by number.
            Otherwise they are dropped, and with them the padding of `cu_seqlens`.

    Returns:
        The boundaries. If all rows are equal, only one is returned.

    Raises:
        ValueError: if the shape is neither `(D+1,)` nor `(B, D+1)`.
        TypeError: if the boundaries are not integers.

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
    """Return the row without repeated boundaries."""
    # One comparison of adjacent entries finds them, so only the other boundaries are copied.
    return row[np.append(0, 1 + np.flatnonzero(row[1:] != row[:-1]))] if row.size else row
