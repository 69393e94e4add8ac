"""Numbers that stand for rows of integers: equal rows have equal numbers."""

from __future__ import annotations

import numpy as np

# Odd constants of SplitMix64 (Steele et al., 2014, doi 10.1145/2660193.2660195).
GAMMA, FIRST, SECOND = (
    np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def mixed(*fields: np.ndarray) -> np.ndarray:
    """Return a uint64 for the fields of each row, which differs where any of them does.

    Two different rows get the same number by chance of 1 in 2**64.

    Args:
        fields: integers, of shapes that broadcast.
    """
    found = np.zeros((), dtype=np.uint64)
    for field in fields:
        found = (found ^ field.astype(np.uint64)) + GAMMA
        found = (found ^ (found >> np.uint64(30))) * FIRST
        found = (found ^ (found >> np.uint64(27))) * SECOND
        found = found ^ (found >> np.uint64(31))
    return found
