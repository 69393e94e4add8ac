"""Which positions the columns of each rank hold: those of a cache, in any number."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from dtensor_ring.planning.frozen import FrozenArrays
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.run import Run, joined
from dtensor_ring.planning.tables import LARGEST


class KeyRuns(FrozenArrays, Layout):
    """Runs of positions of each rank: in any number, each position once, some in no rank.

    Args:
        table: `(W, R, 2)`: start and length of the runs of each rank, ascending; runs of length 0
            fill the rows up.

    Raises:
        ValueError: if a number is negative, the runs of a rank do not ascend, or two runs overlap.

    >>> keys = KeyRuns([[[0, 4], [6, 2]], [[4, 2], [0, 0]]])
    >>> keys.end, keys.num_local(0), keys.runs(1, 2, 8)
    (8, 6, (Run(start=4, length=2, stride=1),))
    """

    name: ClassVar[str] = "key_runs"
    per_batch: ClassVar[bool] = True

    def __init__(self, table: Any) -> None:
        (self.table,) = self._freeze([np.array(table, dtype=np.int64)])
        numbers = self.table.reshape(-1)
        wrong = (numbers < 0) | (numbers > LARGEST)
        if wrong.any():
            raise ValueError(
                f"key_runs must be from 0 to {LARGEST}, got {int(numbers[wrong.argmax()])}"
            )
        starts, lengths = self.table[..., 0], self.table[..., 1]
        owners, places = np.nonzero(lengths)
        starts, ends = starts[owners, places], (starts + lengths)[owners, places]
        # Within a rank, in the order given; over all ranks, in the order of positions.
        falls = (owners[1:] == owners[:-1]) & (starts[1:] < starts[:-1])
        if falls.any():
            rank = int(owners[falls.argmax()])
            raise ValueError(
                f"key_runs of a rank must ascend, got {self.table[rank].tolist()} of rank {rank}"
            )
        order = np.argsort(starts, kind="stable")
        overlaps = ends[order][:-1] > starts[order][1:]
        if overlaps.any():
            position = int(starts[order][1:][overlaps.argmax()])
            raise ValueError(f"key_runs must hold a position once at most, not so {position}")
        if self.end > LARGEST:
            raise ValueError(f"key_runs must end at or before {LARGEST}, got {self.end}")

    @cached_property
    def end(self) -> int:
        """One more than the last position that a rank holds; 0 if none is held."""
        starts, lengths = self.table[..., 0], self.table[..., 1]
        return int((starts + lengths)[lengths > 0].max(initial=0))

    @property
    def num_bytes(self) -> int:
        """Memory of the table and of the object, in bytes."""
        return 1000 + 2 * self.table.nbytes

    def num_local(self, rank: int) -> int:
        """Columns of a rank."""
        return int(self.table[rank, :, 1].sum())

    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        if len(self.table) != world_size:
            raise ValueError(
                f"key_runs must have a row for each of the {world_size} ranks, got "
                f"{len(self.table)}"
            )
        return joined([Run(*run) for run in self.table[rank].tolist() if run[1]])
