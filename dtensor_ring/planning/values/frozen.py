"""Arrays as a value that is cheap to compare and to hash."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


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
