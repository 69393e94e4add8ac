"""Runs as data: layouts that belong to one batch, as they travel and as an axis knows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from dtensor_ring.planning.layouts.layout import Layout
from dtensor_ring.planning.layouts.run import Run, joined
from dtensor_ring.planning.masks.tables import LARGEST
from dtensor_ring.planning.values.frozen import FrozenArrays
from dtensor_ring.planning.values.ranges import numbered

Rows = np.ndarray | Sequence[Sequence[tuple[int, int]]]
"""Start and length of the runs of each rank, `(W, R, 2)`, or rows of any length."""

MARKED = 1 << 30
"""The smallest mark: where no run without a token starts by chance."""


class RunTable(FrozenArrays, Layout):
    """Positions written out as runs: of one batch, of a turn, or of what a cache holds.

    Each position is on one rank at most, and ranks hold any number of them. As a layout, the table
    has to hold all positions from its first one to the end of the sequence.

    Args:
        rows: start and length of the runs of each rank; runs without a token fill rows up. If one
            ends the first row, and starts at `MARKED` or later, its start is the `mark`: a number
            that ranks shall have alike, too.
        argument: name of the argument that they were, for errors.

    Raises:
        ValueError: if a number is negative or no int32, the runs of a rank do not ascend, or two
            runs hold one position.

    >>> table = RunTable([[(4, 2), (9, 3)], [(6, 1)]])
    >>> table.begin, table.end, table.missing
    (4, 12, 7)
    """

    name: ClassVar[str] = "balanced"
    per_batch: ClassVar[bool] = True

    def __init__(self, rows: Rows, argument: str = "runs") -> None:
        self.argument = argument
        given = _filled(rows)
        wrong = (given < 0) | (given > LARGEST) | (given.sum(-1, keepdims=True) > LARGEST)
        if wrong.any():
            raise ValueError(
                f"{argument} must be from 0 to {LARGEST:,}, got {given[wrong.any(-1)][0].tolist()}"
            )
        self.numbers, marks = self._freeze([_compact(given), _marks(given)])
        self.mark = int(marks.sum())  # 0 without one
        lengths = self.numbers[..., 1]
        if ((np.diff(self.numbers[..., 0], axis=1) < 0) & (lengths[:, 1:] > 0)).any():
            raise ValueError(
                f"the {argument} of a rank must be in ascending order, see sequence_runs"
            )
        starts, ends = self._ordered
        overlaps = starts[1:] < ends[:-1]
        if overlaps.any():
            raise self._not_once(int(starts[1:][overlaps.argmax()]))

    @cached_property
    def _ordered(self) -> tuple[np.ndarray, np.ndarray]:
        """First and last positions, plus one, of all runs in the order of positions."""
        starts, lengths = self.numbers[self.numbers[..., 1] > 0].T
        order = np.argsort(starts)
        return starts[order], (starts + lengths)[order]

    @cached_property
    def begin(self) -> int:
        """The first position; 0 if there is none."""
        starts, _ = self._ordered
        return int(starts[0]) if starts.size else 0

    @cached_property
    def end(self) -> int:
        """The position after the last one; 0 if there is none."""
        _, ends = self._ordered
        return int(ends[-1]) if ends.size else 0

    @cached_property
    def missing(self) -> int | None:
        """The first position between begin and end that no rank holds."""
        starts, ends = self._ordered
        gaps = ends[:-1] < starts[1:]
        return int(ends[:-1][gaps.argmax()]) if gaps.any() else None

    @property
    def num_bytes(self) -> int:
        """Memory of the table and of the object, in bytes."""
        return 1000 + 2 * self.numbers.nbytes

    def __repr__(self) -> str:
        rows = [[tuple(run) for run in row if run[1]] for row in self.numbers.tolist()]
        return f"RunTable({rows})"

    def num_tokens(self, rank: int, world_size: int, seq_len: int) -> int:
        return int(self.numbers[rank, :, 1].sum())

    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        if self.missing is not None:
            raise self._not_once(self.missing)
        if (len(self.numbers), self.end) != (world_size, seq_len):
            raise ValueError(
                f"these {self.argument} deal {self.end} tokens to {len(self.numbers)} ranks, not "
                f"{seq_len} tokens to {world_size}; make a layout for each batch, see sequence_runs"
            )
        return self.held(rank, world_size)

    def held(self, rank: int, world_size: int) -> tuple[Run, ...]:
        """The runs of a rank, neighbours as one, whatever positions nobody holds.

        Raises:
            ValueError: if there is not one row for each rank.
        """
        starts, lengths = self.numbers_of(rank, world_size)
        return joined(list(map(Run, starts.tolist(), lengths.tolist())))

    def numbers_of(self, rank: int, world_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Start and length of each run of a rank.

        Raises:
            ValueError: if there is not one row for each rank.
        """
        if len(self.numbers) != world_size:
            raise ValueError(
                f"{self.argument} must have a row for each of the {world_size} ranks, got "
                f"{len(self.numbers)}"
            )
        starts, lengths = self.numbers[rank].T
        return starts[lengths > 0], lengths[lengths > 0]

    def check_from(self, begin: int) -> None:
        """Refuse a table that begins after a position.

        Raises:
            ValueError: naming the position.
        """
        if self.begin > begin:
            raise self._not_once(begin)

    def _not_once(self, position: int) -> ValueError:
        return ValueError(
            f"{self.argument} must hold each position once, not so position {position}"
        )


def _filled(rows: Rows) -> np.ndarray:
    """The rows as one array `(W, R, 2)`."""
    if isinstance(rows, np.ndarray):
        return rows.astype(np.int64)
    filled = np.zeros((len(rows), max(map(len, rows), default=0), 2), dtype=np.int64)
    for row, runs in zip(filled, rows, strict=True):
        row[: len(runs)] = np.array(runs, dtype=np.int64).reshape(-1, 2)
    return filled


def _marks(given: np.ndarray) -> np.ndarray:
    """What stands in the last run of the first row, if that holds nothing."""
    starts, lengths = given[:1, -1:].reshape(-1, 2).T
    return starts[(lengths == 0) & (starts >= MARKED)]


def _compact(given: np.ndarray) -> np.ndarray:
    """The rows without runs that hold nothing, as narrow as can be: alike if they say the same."""
    ranks, places = np.nonzero(given[..., 1])
    counts = np.bincount(ranks, minlength=len(given))
    numbers = np.zeros((len(given), counts.max(initial=0), 2), dtype=np.int64)
    numbers[numbered(counts)] = given[ranks, places]
    return numbers


@dataclass(frozen=True)
class PerBatch(Layout):
    """Stands for layouts that belong to a batch: each batch brings its own, see `sequence_runs`."""

    name: ClassVar[str] = "balanced"
    per_batch: ClassVar[bool] = True

    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        raise ValueError(
            "the balanced layout belongs to one batch, so it is passed with it: "
            "ring_attention(..., runs=sequence_runs(Balanced(...))), and so to shard_sequence"
        )
