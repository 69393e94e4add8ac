"""Ranges of numbers, written out as arrays."""

from __future__ import annotations

import numpy as np


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
