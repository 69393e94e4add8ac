"""Documents that change while a plan stays: boundaries that have room, for CUDA graphs.

Note [Changing documents]: a CUDA graph repeats launches and messages, so neither may depend on the
boundaries of documents. A plan for one document that is the whole sequence has all that any packing
sees. Each tile of it becomes one launch of segments, with a segment for each document that there is
room for, and empty ones for the others. Only the numbers of these segments change. A segment of a
tile that shows all is the queries and the keys of a document. A segment of a causal tile is a
square on its diagonal, if its queries and keys are at the same positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from dtensor_ring.planning.layout import Run, run_positions
from dtensor_ring.planning.mask import Documents, as_documents
from dtensor_ring.planning.ranges import as_count
from dtensor_ring.planning.tile import CAUSAL, FULL, Tile

StepT = TypeVar("StepT", bound=Any)


class ChangingDocuments(Documents):
    """Documents of all batch rows, which `fill` replaces; equal to no others.

    As boundaries of a plan they are one document, see Note [Changing documents].

    Args:
        seq_len: global length of the sequence, in tokens.
        max_documents: the number of documents that there is room for.

    >>> documents = ChangingDocuments(8, max_documents=3)
    >>> documents.fill([0, 5, 8])
    >>> documents.rows, documents.bounds.tolist()
    (((0, 8),), [0, 5, 8, 8])
    """

    def __init__(self, seq_len: int, max_documents: int) -> None:
        super().__init__([(0, seq_len)])
        self._seq_len, self._room = seq_len, as_count("max_documents", max_documents, 1)
        self.bounds = np.array([0] + [seq_len] * self._room, dtype=np.int64)
        self._watchers: list[Callable[[], None]] = []

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def fill(self, cu_seqlens: Sequence[int] | np.ndarray) -> None:
        """Replace the documents; raises as `checked`."""
        self.replace(self.checked(cu_seqlens))

    def replace(self, bounds: np.ndarray) -> None:
        """Replace the documents by boundaries that `checked` returned, and tell all who watch."""
        self.bounds = bounds
        for watcher in self._watchers:
            watcher()

    def checked(self, cu_seqlens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return boundaries that fill all the room.

        Raises:
            ValueError: if they are no boundaries of the sequence, or more than there is room for.
        """
        documents = as_documents(np.asarray(cu_seqlens))
        assert documents is not None, "there are boundaries"
        documents.check(self._seq_len)
        bounds = documents.arrays[0]
        if len(documents.arrays) > 1 or bounds.size - 1 > self._room:
            raise ValueError(
                f"there is room for {self._room} documents, the same in all batch rows, got "
                f"{[row.size - 1 for row in documents.arrays]}; make it with a larger max_documents"
            )
        return np.append(bounds, np.full(self._room + 1 - bounds.size, bounds[-1]))

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call this after each `fill`, as long as these documents live."""
        self._watchers.append(watcher)

    def steps(
        self, steps: tuple[StepT, ...], runs: tuple[Run, ...], is_ordered: bool
    ) -> tuple[StepT, ...]:
        """Return steps of a plan that hold for all documents; `runs` are those of the queries.

        Raises:
            ValueError: if sums have a fixed order.
        """
        if is_ordered:
            raise ValueError("a DocumentRoom has no sums in a fixed order; leave order= out")
        found = Changing(self, runs)
        return tuple(replace(step, changing=found) for step in steps)

    def segments(self, queries: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return boundaries of the segments of a tile, as many for all documents.

        The last two segments have what is after the last document: queries, then keys.

        Args:
            queries: positions of the queries, ascending.
            keys: positions of the keys, ascending.

        Example:
            >>> documents = ChangingDocuments(8, max_documents=3)
            >>> documents.fill([0, 5, 7])
            >>> [x.tolist() for x in documents.segments(np.arange(4, 8), np.arange(4))]
            [[0, 1, 3, 3, 4, 4], [0, 4, 4, 4, 4, 4]]
        """
        # Documents of 3, 3 and 2 tokens with room for one more, and a tile of the queries 2 to 5:
        # rows are 0 1 4 4 4 4 4. The first document has one query, the second one three.
        rows, cols = (np.searchsorted(x, self.bounds) for x in (queries, keys))
        return (
            np.append(rows, [len(queries)] * 2),
            np.append(cols, [cols[-1], len(keys)]),
        )


@dataclass(frozen=True, eq=False)
class Changing:
    """What a step has beside its tiles if its documents change.

    Attributes:
        documents: the documents.
        runs: runs of this rank's queries.
    """

    documents: ChangingDocuments
    runs: tuple[Run, ...]

    def sides(self, step: Any, tile: Tile) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of the queries and of the keys of a tile.

        Raises:
            ValueError: if its segments would not have the mask of the tile.
        """
        queries = run_positions(self.runs)[tile.rows[0] : tile.rows[1]]
        columns = np.concatenate([np.arange(first, end) for first, end in step.cols.spans])
        keys = run_positions(step.runs)[columns][tile.cols[0] : tile.cols[1]]
        is_square = tile.mask == CAUSAL and np.array_equal(queries, keys)
        if tile.mask != FULL and not is_square:
            raise ValueError(
                "a DocumentRoom needs a full or causal mask, and a layout whose runs have adjacent "
                f"tokens; this rank would have a tile with {tile.mask}"
            )
        return queries, keys
