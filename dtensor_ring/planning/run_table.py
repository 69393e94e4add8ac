"""Layouts that belong to one batch, as they travel and as an axis knows them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from dtensor_ring.planning.layout import Layout, non_empty
from dtensor_ring.planning.run import Run, shard_length


@dataclass(frozen=True)
class RunTable(Layout):
    """Runs written out as data, as a layout that belongs to one batch travels.

    `table` holds, for each rank, `(start, length)` of its runs of neighbouring positions; runs
    without a token fill its rows up.

    Raises:
        ValueError: if the runs do not hold each position once, those of a rank do not ascend, or a
            rank does not get the number of tokens that `shard_length` says.
    """

    name: ClassVar[str] = "balanced"
    per_batch: ClassVar[bool] = True

    table: tuple[tuple[tuple[int, int], ...], ...]
    _seq_len: int = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        end = 0
        # Sorted by position, each run must begin where the one before ends.
        for start, length in sorted(run for row in self.table for run in row if run[1]):
            if start != end or length < 0:
                raise ValueError(f"runs must hold each position once, not so position {end}")
            end += length
        filled = ([run for run in row if run[1]] for row in self.table)
        if any(row != sorted(row) for row in filled):
            raise ValueError("the runs of a rank must be in ascending order, see sequence_runs")
        lengths = [sum(length for _, length in row) for row in self.table]
        expected = [shard_length(rank, len(lengths), end) for rank in range(len(lengths))]
        if lengths != expected:
            raise ValueError(f"runs must give the ranks {expected} tokens, got {lengths}")
        # Known for good: the planner hashes a layout in every call, and asks every rank's runs.
        object.__setattr__(self, "_seq_len", end)
        object.__setattr__(self, "_hash", hash(self.table))

    def __hash__(self) -> int:
        return self._hash

    @property
    def num_bytes(self) -> int:
        """Memory of the table, in bytes: a tuple of two integers for each run."""
        return 128 * sum(map(len, self.table))

    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        if (len(self.table), self._seq_len) != (world_size, seq_len):
            raise ValueError(
                f"these runs deal {self._seq_len} tokens to {len(self.table)} ranks, not {seq_len} "
                f"tokens to {world_size}; make a layout for each batch, see sequence_runs"
            )
        # Runs without a token only fill the table up.
        return non_empty(*(Run(start, length) for start, length in self.table[rank]))


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
