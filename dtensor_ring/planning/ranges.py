"""Ranges of positions or indices, counts, and arrays that serve as keys of a cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import index
from typing import Any, Protocol

import numpy as np

# A half-open range of indices.
Span = tuple[int, int]

NOTHING: Span = (0, 0)


def length(span: Span) -> int:
    """Return the number of indices in a span."""
    return span[1] - span[0]


def moved(span: Span, by: int) -> Span:
    """Return the span, moved by `by` indices."""
    return span[0] + by, span[1] + by


def numbered(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number the items of groups of these sizes: return the group and the index in it of each.

    >>> numbered(np.array([2, 0, 3]))
    (array([0, 0, 2, 2, 2]), array([0, 1, 0, 1, 2]))
    """
    whose = np.repeat(np.arange(len(counts)), counts)
    return whose, np.arange(len(whose)) - (np.cumsum(counts) - counts)[whose]


def expanded(first: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Expand ranges: return each range's index and each integer in it; `end <= first` is empty.

    >>> expanded(np.array([4, 7]), np.array([6, 7]))
    (array([0, 0]), array([4, 5]))
    """
    whose, number = numbered(np.maximum(end - first, 0))
    return whose, number + first[whose]


def differing(numbers: np.ndarray) -> np.ndarray:
    """Return where a number is not the one before it, as booleans; the first is not.

    >>> differing(np.array([2, 2, 5, 2])).tolist()
    [True, False, True, True]
    """
    found = np.ones(len(numbers), dtype=bool)
    np.not_equal(numbers[1:], numbers[:-1], out=found[1:])
    return found


def united(
    ids: np.ndarray, firsts: np.ndarray, ends: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the union of the spans of each id, ascending; none of them overlap or touch."""
    # Place the spans of all ids on one long line, so that one sort serves all. A stable sort is
    # quick on sorted input.
    line = 1 + int(ends.max(initial=0))
    firsts = firsts + ids * line
    order = np.argsort(firsts, kind="stable")
    firsts, ends = firsts[order], np.maximum.accumulate((ends + ids * line)[order])
    # A span begins where all earlier ones have ended, which is also where the previous one ends.
    is_new, is_last = np.ones((2, len(firsts)), dtype=bool)
    is_new[1:] = firsts[1:] > ends[:-1]
    is_last[:-1] = is_new[1:]
    firsts, ends = firsts[is_new], ends[is_last]
    ids = firsts // line
    return ids, firsts - ids * line, ends - ids * line


def topmost(
    ids: np.ndarray, firsts: np.ndarray, ends: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return disjoint ranges of each id, each with the largest value given for its positions.

    The values are positive. The results ascend, and cover only positions that were given.

    >>> topmost(*np.array([[0, 0], [1, 4], [6, 9], [3, 2]]))
    (array([0, 0, 0]), array([1, 4, 6]), array([4, 6, 9]), array([3, 3, 2]))
    """
    # Place all ranges on one long line, as in `united`, and cut it where any range begins or ends.
    line = 1 + int(ends.max(initial=0))
    firsts, ends = firsts + ids * line, ends + ids * line
    cuts = np.unique(np.concatenate([firsts, ends]))
    low, high = np.searchsorted(cuts, firsts), np.searchsorted(cuts, ends)
    # Two windows cover a range of cells; their width is the largest power of two that fits.
    # From the widest down, each window passes its value to its halves, until these are cells.
    # It is a sparse table of range maxima, written instead of read: O(n log n), without a loop
    # over ranges.
    sizes = np.frexp(high - low)[1] - 1
    tops = np.zeros(len(cuts), dtype=np.int64)
    for size in range(int(sizes.max(initial=0)), -1, -1):
        width, is_such = 1 << size, sizes == size
        tops[width:] = np.maximum(tops[width:], tops[: len(tops) - width])
        for starts in (low[is_such], high[is_such] - width):
            np.maximum.at(tops, starts, values[is_such])
    at = np.flatnonzero(tops)
    ids = cuts[at] // line
    return ids, cuts[at] - ids * line, cuts[at + 1] - ids * line, tops[at]


def broadcast(**sides: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Zip the batch rows of all sides; a side with one row repeats it.

    Raises:
        ValueError: if sides have different numbers of rows; the message names them.

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


# The largest length of a sequence, in tokens: beyond any in use, and far below the int64 limit.
MAX_TOKENS = 2**40


def as_count(name: str, given: Any, smallest: int = 0, largest: int = MAX_TOKENS) -> int:
    """Convert an integer to an int, and check its range.

    Raises:
        TypeError: if it is not an integer; the message names the argument.
        ValueError: if it is out of range.

    >>> as_count("seq_len", 8)
    8
    """
    count = given if type(given) is int else as_int(name, given)
    if not smallest <= count <= largest:
        raise ValueError(f"{name} must be from {smallest} to {largest:,}, got {count}")
    return count


# The largest number of ranks on a ring. Planning time grows with it, to seconds at this limit.
MAX_RANKS = 2**16


def as_int(name: str, given: Any) -> int:
    """Convert an integer of any integer type to an int.

    Raises:
        TypeError: if it is not an integer; the message names the argument.
    """
    try:
        if isinstance(given, bool):  # an int in Python, but not a count
            raise TypeError
        return index(given)
    except (TypeError, RuntimeError):  # RuntimeError: a tensor without content
        raise TypeError(f"{name} must be an int, got {given!r}") from None


class SupportsArray(Protocol):
    """An array, or a tensor on the CPU."""

    def __array__(self) -> np.ndarray:
        """Return the content as an array."""
        ...


# Integers in rows, in any form that `integer_rows` takes.
Integers = SupportsArray | Sequence[int] | Sequence[Sequence[int]]


def integer_rows(
    given: Any, name: str, noun: str, shape: str, ndims: tuple[int, ...] = (1, 2)
) -> list[np.ndarray]:
    """Return one array for each row; rows may have different lengths.

    Args:
        given: a tensor, an array, a sequence, or a sequence of them.
        name: the name of the argument, for errors.
        noun: what the argument holds, for errors.
        shape: the shapes that it may have, for errors.
        ndims: the numbers of dims that it may have.

    Raises:
        ValueError: if it has another shape.
        TypeError: if it holds anything but integers.

    >>> integer_rows([[0, 3], [0, 3, 8]], "ends", "boundaries", "(D+1,) or (B, D+1)")
    [array([0, 3]), array([0, 3, 8])]
    """
    if isinstance(given, Sequence) and given and _is_row(given[0]):
        # Convert one by one, as rows of different lengths do not form an array.
        of_row = tuple(ndim - 1 for ndim in ndims if ndim > 1)
        return [integer_array(row, name, noun, shape, of_row, given) for row in given]
    array = integer_array(given, name, noun, shape, ndims, given)
    return list(array) if array.ndim > 1 else [array]


def integer_array(
    part: Any, name: str, noun: str, shape: str, ndims: tuple[int, ...], given: Any
) -> np.ndarray:
    """Convert `part` to an array of integers with one of `ndims` dims; errors quote `given`.

    Raises:
        ValueError: if it has another shape.
        TypeError: if it holds anything but integers.
    """
    try:
        array = _as_array(part)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor without dense content
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
    """Arrays that never change. They are equal by content, and the hash is computed once.

    A cache lookup then does not read the arrays again.
    """

    def _freeze(self, arrays: Iterable[np.ndarray]) -> tuple[np.ndarray, ...]:
        """Keep the arrays, make them read-only, and return them."""
        self._arrays = tuple(arrays)
        for array in self._arrays:
            array.setflags(write=False)  # the hash would not follow a change
        # Bytes know no shape; two arrays that collide so are told apart by `__eq__`.
        self._hash = hash(tuple(map(np.ndarray.tobytes, self._arrays)))
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
