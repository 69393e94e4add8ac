"""Which keys a query sees: bands of lags, chunks, prefixes and packed documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtensor_ring.planning.ranges import FrozenArrays, Integers, integer_rows

LARGEST = 2**63 - 1
"""The largest integer that the ops take."""


@dataclass(frozen=True, slots=True)
class Mask:
    """How far back (`left`) and ahead (`right`) of itself a query sees, in tokens.

    Query position q sees key position k if and only if `-right <= q - k <= left`; `None` is
    unbounded. The numbers mean what flash-attn's `window_size` means, where -1 is our `None`.

    With `chunk`, a query sees only its own chunk of `chunk` positions: `q // chunk == k // chunk`.
    With `prefix`, every query of a document sees its first `prefix` tokens, however far ahead they
    are: `right` does not hold for them.

    >>> Mask.sliding(2).sees(5, 3), Mask.sliding(2).sees(5, 2), Mask.causal().sees(5, 6)
    (True, False, False)

    Raises:
        ValueError: if a bound is negative or beyond int64, a chunk empty, or a mask has both chunk
            and prefix.
        TypeError: if one of them is neither an int nor None.
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
        """Each query sees itself and everything before it."""
        return cls(None, 0)

    @classmethod
    def full(cls) -> Mask:
        """Each query sees everything."""
        return cls(None, None)

    @classmethod
    def sliding(cls, window: int) -> Mask:
        """Each query sees itself and the `window` tokens before it (lags 0 to `window`).

        A Hugging Face `sliding_window` of w counts the query itself: it is `sliding(w - 1)`. So is
        the `window_size=(w - 1, 0)` that flash-attn gets for it.
        """
        return cls(window, 0)

    @classmethod
    def local(cls, left: int | None, right: int | None) -> Mask:
        """Each query sees `left` tokens before itself and `right` after."""
        return cls(left, right)

    @classmethod
    def chunked(cls, chunk: int) -> Mask:
        """Causal within chunks of `chunk` tokens, as in Llama 4: 0 to chunk - 1, and so on.

        Chunks count from position 0 of the row, not from the start of each document. For chunks of
        each document, as flash-attn's `attention_chunk` has them, put their boundaries into
        `cu_seqlens` and take `causal()`.

        Other bands take chunks too: `Mask(window, 0, chunk=8192)`. Each chunk is a slice, and there
        are at most 65,536 of a batch row.
        """
        return cls(None, 0, chunk=chunk)

    @classmethod
    def prefix_causal(cls, prefix: int) -> Mask:
        """Causal, but everything also sees the first `prefix` tokens of its document.

        So the prefix sees itself in both directions (prefix language models, as in Raffel et al.,
        2020, arXiv 1910.10683, section 3.2.1).
        """
        return cls(None, 0, prefix=prefix)

    def sees(self, query: int, key: int) -> bool:
        """Whether the query at one position sees the key at another, in one document from 0 on."""
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
