"""The memory that merging partial results reads and writes, for many ranks at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dtensor_ring.compute.accumulate import ON_GPUS
from dtensor_ring.compute.merge import MAX_PARTIALS


class Pass(NamedTuple):
    """Rows that a merge reads or writes: arrays `(W,)`, 0 where nothing is merged.

    Attributes:
        narrow: rows in the dtype of the result.
        wide: rows in float32 or wider.
    """

    narrow: np.ndarray
    wide: np.ndarray


class KeptPartials:
    """Counts what `dtensor_ring.compute.accumulate.Partials` keeps, and what its merges touch.

    Args:
        size: rows of the result, `(W,)`.
        is_wide: whether the result is float32 or wider.
        on_gpu: whether it is on a GPU, where more partials are kept.
        num_kept: the number of partials that are kept; `None` for the default of `Partials`.
    """

    def __init__(
        self, size: np.ndarray, is_wide: bool, on_gpu: bool, num_kept: int | None = None
    ) -> None:
        self._size, self._is_wide = size, is_wide
        self._most = MAX_PARTIALS if on_gpu else np.inf
        self._num_kept = num_kept or (ON_GPUS if on_gpu and not is_wide else 1)
        self._rows = np.zeros_like(size)
        self._count = np.zeros_like(size)
        self._has_total = np.zeros(size.shape, dtype=bool)

    @property
    def _num(self) -> np.ndarray:
        """Number of partials, the total among them."""
        return self._count + self._has_total

    def make_room(self, active: np.ndarray) -> Pass:
        """Merge where there is no room for another partial, before active ranks add one."""
        many = (self._rows >= self._num_kept * self._size) | (self._num >= self._most)
        return self._merge(active & (self._num >= 2) & many)

    def _merge(self, where: np.ndarray) -> Pass:
        """Merge all partials into a wide total."""
        # A total is changed in place, in the rows of the partials.
        wide = np.where(self._has_total, 2 * np.minimum(self._rows, self._size), self._size)
        found = Pass(np.where(where, self._rows, 0), np.where(where, wide, 0))
        self._has_total = self._has_total | where
        self._rows, self._count = (np.where(where, 0, x) for x in (self._rows, self._count))
        return found

    def add(self, rows: np.ndarray, active: np.ndarray) -> None:
        """Add a partial of so many rows on active ranks."""
        # A wide partial of all rows is a total already.
        is_total = active & self._is_wide & (self._num == 0) & (rows == self._size)
        self._has_total = self._has_total | is_total
        others = active & ~is_total
        self._count = self._count + others
        self._rows = self._rows + np.where(others, rows, 0)

    def arrive(self, rows: np.ndarray, active: np.ndarray, is_last: np.ndarray) -> Pass:
        """Add the sum that came from other ranks to these rows, as `GradientSum.add_arrived`."""
        is_whole = (self._count == 1) & (self._rows == self._size) & ~self._has_total
        # The last addend may round, so it needs no wide total.
        stays = is_last & is_whole
        merged = self._merge(active & (self._count > 0) & ~stays | active & (self._num == 0))
        added = 2 * np.where(active, rows, 0)
        return Pass(
            merged.narrow + np.where(stays, added, 0), merged.wide + np.where(stays, 0, added)
        )

    def parts(self) -> Pass:
        """Return what reading all partials takes."""
        return Pass(self._rows, np.where(self._has_total, self._size, 0))

    def result(self) -> Pass:
        """Merge all partials into the result, in its dtype."""
        is_whole = (self._count == 1) & (self._rows == self._size)
        is_final = (self._num == 0) | (self._num == 1) & np.where(
            self._has_total, self._is_wide, is_whole
        )
        narrow, wide = self.parts()
        return Pass(np.where(is_final, 0, narrow + self._size), np.where(is_final, 0, wide))
