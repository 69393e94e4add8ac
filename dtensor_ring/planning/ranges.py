"""Ranges of positions or indices, counts, and arrays that serve as keys of a cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import index
from typing import Any, Protocol

import numpy as np

Span = tuple[int, int]
"""A half-open range of indices."""

NOTHING: Span = (0, 0)


def length(span: Span) -> int:
    """Indices in a span."""
    return span[1] - span[0]


def moved(span: Span, by: int) -> Span:
    """The span, moved by that many indices."""
    return span[0] + by, span[1] + by


def numbered(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """So many items of each: whose an item is, and its number among those.

    >>> numbered(np.array([2, 0, 3]))
    (array([0, 0, 2, 2, 2]), array([0, 1, 0, 1, 2]))
    """
    whose = np.repeat(np.arange(len(counts)), counts)
    return whose, np.arange(len(whose)) - (np.cumsum(counts) - counts)[whose]


def expanded(first: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The number of each range next to each number in it; a range that ends early is empty.

    >>> expanded(np.array([4, 7]), np.array([6, 7]))
    (array([0, 0]), array([4, 5]))
    """
    whose, number = numbered(np.maximum(end - first, 0))
    return whose, number + first[whose]


def united(
    ids: np.ndarray, firsts: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The union of the spans of each id: ascending, without any that overlap or touch."""
    # The spans of all ids lie on one long line, so that one sort serves them all; it is stable, so
    # that it is quick on sorted input.
    line = 1 + int(ends.max(initial=0))
    firsts = firsts + ids * line
    order = np.argsort(firsts, kind="stable")
    firsts, ends = firsts[order], np.maximum.accumulate((ends + ids * line)[order])
    # A span begins where all before it have ended: the one before it ends there as well.
    is_new = np.ones(len(firsts), dtype=bool)
    is_new[1:] = firsts[1:] > ends[:-1]
    firsts, ends = firsts[is_new], ends[np.roll(is_new, -1)]
    ids = firsts // line
    return ids, firsts - ids * line, ends - ids * line


def topmost(
    ids: np.ndarray, firsts: np.ndarray, ends: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Ranges of each id that do not overlap, with the largest of the values given for them.

    The values are positive. The ranges that are returned ascend, and are none where none was given.

    >>> topmost(*np.array([[0, 0], [1, 4], [6, 9], [3, 2]]))
    (array([0, 0, 0]), array([1, 4, 6]), array([4, 6, 9]), array([3, 3, 2]))
    """
    # The ranges of all ids lie on one long line, as in `united`, cut wherever any of them ends.
    line = 1 + int(ends.max(initial=0))
    firsts, ends = firsts + ids * line, ends + ids * line
    cuts = np.unique(np.concatenate([firsts, ends]))
    low, high = np.searchsorted(cuts, firsts), np.searchsorted(cuts, ends)
    # A range of cells is covered by two windows of the largest power of two that is not longer.
    # From the widest windows on, each hands its value to its halves, until they are single cells.
    sizes = np.frexp(high - low)[1] - 1
    found = np.zeros(len(cuts), dtype=np.int64)
    for size in range(int(sizes.max(initial=0)), -1, -1):
        width, is_such = 1 << size, sizes == size
        found[width:] = np.maximum(found[width:], found[: len(found) - width])
        for starts in (low[is_such], high[is_such] - width):
            np.maximum.at(found, starts, values[is_such])
    at = np.flatnonzero(found)
    ids = cuts[at] // line
    return ids, cuts[at] - ids * line, cuts[at + 1] - ids * line, found[at]


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


MAX_TOKENS = 2**40
"""Of a sequence: a thousand times what anybody trains on, and far from where int64 ends."""
MAX_RANKS = 2**16
"""The most ranks of a ring. Planning time grows with them; this many take seconds."""


def as_int(name: str, given: Any) -> int:
    """An integer of any type that is one.

    Raises:
        TypeError: if it is not an integer; the message names the argument.
    """
    try:
        if isinstance(given, bool):  # an int in Python, but True is not a number of anything
            raise TypeError
        return index(given)
    except (TypeError, RuntimeError):  # the latter of a tensor without content
        raise TypeError(f"{name} must be an int, got {given!r}") from None


def as_count(name: str, given: Any, smallest: int = 0, largest: int = MAX_TOKENS) -> int:
    """An integer in a range.

    Raises:
        TypeError: if it is no integer; names the argument.
        ValueError: if it is outside of the range.

    >>> as_count("seq_len", 8)
    8
    """
    count = as_int(name, given)
    if not smallest <= count <= largest:
        raise ValueError(f"{name} must be from {smallest} to {largest:,}, got {count}")
    return count


class SupportsArray(Protocol):
    """An array, or a tensor on the CPU."""

    def __array__(self) -> np.ndarray:
        """The content as an array."""
        ...


Integers = SupportsArray | Sequence[int] | Sequence[Sequence[int]]
"""Integers in rows, in any form that `integer_rows` takes."""


def integer_rows(
    given: Any, name: str, noun: str, shape: str, ndims: tuple[int, ...] = (1, 2)
) -> list[np.ndarray]:
    """One array for each row; rows may be of different lengths.

    Args:
        given: a tensor, an array, a sequence, or a sequence of them.
        name: of the argument.
        noun: what it holds, in errors.
        shape: what it may have, in errors.
        ndims: numbers of dims that it may have.

    Raises:
        ValueError: if it is of another shape.
        TypeError: if it holds other than integers.

    >>> integer_rows([[0, 3], [0, 3, 8]], "ends", "boundaries", "(D+1,) or (B, D+1)")
    [array([0, 3]), array([0, 3, 8])]
    """
    if isinstance(given, Sequence) and given and _is_row(given[0]):
        # One by one: rows of different lengths make no array.
        of_row = tuple(ndim - 1 for ndim in ndims if ndim > 1)
        return [integer_array(row, name, noun, shape, of_row, given) for row in given]
    array = integer_array(given, name, noun, shape, ndims, given)
    return list(array) if array.ndim > 1 else [array]


def integer_array(
    part: Any, name: str, noun: str, shape: str, ndims: tuple[int, ...], given: Any
) -> np.ndarray:
    """An array of integers, of a number of dims; `given` is what errors quote.

    Raises:
        ValueError: if it is of another shape.
        TypeError: if it holds other than integers.
    """
    try:
        array = _as_array(part)
    except (TypeError, ValueError, RuntimeError) as error:  # of tensors without dense content
        raise TypeError(f"{name} cannot be read as {noun} ({error}), got {given!r}") from error
    if array.ndim not in ndims:
        raise ValueError(f"{name} must be {noun} {shape}, got {given!r}")
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(
            f"{name} must hold integers: {array.dtype} cannot be interpreted as an integer, "
            f"got {given!r}"
        )
    return array


def _is_row(value: Any) -> bool:
    return isinstance(value, Sequence) or getattr(value, "ndim", 0) == 1


def _as_array(row: Any) -> np.ndarray:
    if hasattr(row, "cpu"):  # a tensor, on whatever device
        row = row.cpu()
    # array.array and its like convert through a list.
    if not hasattr(row, "__array__") and hasattr(row, "tolist"):
        row = row.tolist()
    return np.asarray(row)


class FrozenArrays:
    """Arrays that never change. Equal by content; the hash is computed once.

    So a cache finds arrays without reading them again.
    """

    def _freeze(self, arrays: Iterable[np.ndarray]) -> tuple[np.ndarray, ...]:
        """Keep the arrays, which nobody else may write to, and return them."""
        self._arrays = tuple(arrays)
        for array in self._arrays:
            array.setflags(write=False)  # the hash would not follow a change
        self._hash = hash(tuple(array.tobytes() for array in self._arrays))
        return self._arrays

    def __len__(self) -> int:
        return len(self._arrays)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, type(self)):
            return NotImplemented
        # The hash decides nearly all comparisons; content is read only where it agrees.
        if self._hash != other._hash or len(self) != len(other):
            return False
        return all(map(np.array_equal, self._arrays, other._arrays))
