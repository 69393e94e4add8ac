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
