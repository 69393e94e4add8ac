"""Order statistics of ranges of an array, many ranges at a time."""

from __future__ import annotations

import numpy as np


class WaveletMatrix:
    """Answers how many values of a range are small, and which is the k-th smallest.

    Each query takes one step for each bit of the values (SPIRE 2012, "The Wavelet Matrix", doi
    10.1007/978-3-642-34109-0_18). All queries of a call go through a step together, as arrays.

    Args:
        values: integers from 0 to `num_values - 1`.
        num_values: how many different values there may be.
    """

    def __init__(self, values: np.ndarray, num_values: int) -> None:
        self._levels: list[tuple[int, np.ndarray, int]] = []
        # The highest bit first: what it decides, no lower one can change.
        for bit in reversed(range(max(1, (num_values - 1).bit_length()))):
            is_zero = (values >> bit) & 1 == 0
            # zeros[i] counts them before i, so the zeros of any range are a difference.
            zeros = np.concatenate([[0], np.cumsum(is_zero)])
            self._levels.append((bit, zeros, int(zeros[-1])))
            # Values without the bit go first, in their order: a range stays two ranges, at most.
            values = np.concatenate([values[is_zero], values[~is_zero]])

    @property
    def num_bytes(self) -> int:
        """Memory of the counts, in bytes."""
        return sum(zeros.nbytes for _, zeros, _ in self._levels)

    def count_below(self, begin: np.ndarray, end: np.ndarray, limit: np.ndarray) -> np.ndarray:
        """How many values of each range `[begin, end)` are below that range's limit."""
        count = np.zeros_like(begin)
        for bit, zeros, num_zeros in self._levels:
            has_bit = (limit >> bit) & 1 == 1
            first, last = zeros[begin], zeros[end]
            count += np.where(has_bit, last - first, 0)  # those without the bit are below
            # Follow the values that share the limit's bit into their half of the next level.
            begin = np.where(has_bit, num_zeros + begin - first, first)
            end = np.where(has_bit, num_zeros + end - last, last)
        return count

    def kth(self, begin: np.ndarray, end: np.ndarray, k: np.ndarray) -> np.ndarray:
        """The value number `k`, in ascending order from 0, of each range; none may be empty."""
        value = np.zeros_like(begin)
        for bit, zeros, num_zeros in self._levels:
            first, last = zeros[begin], zeros[end]
            # Values without the bit are smaller: the k-th has it if there are not enough of those.
            has_bit = k >= last - first
            k = np.where(has_bit, k - (last - first), k)
            value |= has_bit.astype(value.dtype) << bit
            begin = np.where(has_bit, num_zeros + begin - first, first)
            end = np.where(has_bit, num_zeros + end - last, last)
        return value
