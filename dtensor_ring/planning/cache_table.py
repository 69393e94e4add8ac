"""A table of the positions of a growing sequence that each rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.ranges import MAX_RANKS, as_count, expanded
from dtensor_ring.planning.run_table import MARKED, deal
from dtensor_ring.planning.slice_tables import LARGEST

# Smallest number of runs per rank that a table has room for: a compiler then sees few shapes.
FEWEST_RUNS = 8

# Start and length of runs of consecutive positions.
Ranges = list[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class CacheTable:
    """The positions `0 ... seq_len - 1` of a sequence that grows at its end, sharded over ranks.

    A turn of many tokens (a prompt, or a chunk of it) is sharded by a layout on its own, so each
    turn is balanced. Single tokens go in blocks to the rank that has the fewest. A rank's tokens
    ascend in position: new ones are its last columns, and a crop removes its last columns.

    All ranks compute the same table without a message. It is a frozen value: each change makes
    another table in a few microseconds, whatever the number of runs. Without crops, the lengths of
    two ranks differ by at most one block, plus W - 1 tokens for each sharded turn.

    Attributes:
        block: tokens of a block.
        num_local, num_runs: number of tokens and of runs of each rank, W entries.
        numbers: start and length of each run, `(W, R, 2)`, int32, padded with runs of length 0.
        current: rank and first position of the block that single tokens go to.

    >>> table = CacheTable.empty(world_size=2, block=4).append_dealt(ZigZag(), 8).append(5)
    >>> table.runs
    (((0, 2), (6, 6)), ((2, 4), (12, 1)))
    >>> table.crop(7).runs
    (((0, 2), (6, 1)), ((2, 4),))
    """

    block: int
    num_local: tuple[int, ...]
    num_runs: tuple[int, ...]
    numbers: np.ndarray
    current: tuple[int, int] | None = None

    @classmethod
    def empty(cls, world_size: int, block: int = 256) -> CacheTable:
        """Return a table without tokens.

        Args:
            world_size: number of ranks, W.
            block: tokens of a block.

        Raises:
            ValueError: if there is no rank, or no token in a block.
            TypeError: if an argument is not an integer.
        """
        world_size = as_count("world_size", world_size, 1, MAX_RANKS)
        numbers = np.zeros((world_size, FEWEST_RUNS, 2), dtype=np.int32)
        block = as_count("block", block, 1, LARGEST)
        return cls(block, (0,) * world_size, (0,) * world_size, numbers)

    def __post_init__(self) -> None:
        self.numbers.setflags(write=False)  # the hash would not follow a change

    @property
    def world_size(self) -> int:
        """Number of ranks, W."""
        return len(self.num_local)

    @cached_property
    def seq_len(self) -> int:
        """Number of tokens of the sequence."""
        return sum(self.num_local)

    @property
    def num_reserved(self) -> tuple[int, ...]:
        """Number of tokens of each rank once the current block is full."""
        if self.current is None:
            return self.num_local
        rank, begin = self.current
        room = begin + self.block - self.seq_len
        return *self.num_local[:rank], self.num_local[rank] + room, *self.num_local[rank + 1 :]

    @cached_property
    def runs(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Start and length of the runs of each rank; they ascend, and adjacent runs are merged."""
        return tuple(tuple(self.runs_from(rank, 0)) for rank in range(self.world_size))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CacheTable):
            return NotImplemented
        return self._key == other._key and np.array_equal(self.numbers, other.numbers)

    def __hash__(self) -> int:
        return self._hash

    @property
    def _key(self) -> tuple[object, ...]:
        return self.block, self.num_local, self.num_runs, self.current

    @cached_property
    def _hash(self) -> int:
        return hash((self._key, self.numbers.tobytes()))

    def append_dealt(self, layout: Layout, num_tokens: int) -> CacheTable:
        """Return the table with one more turn, which the layout shards as a separate sequence.

        Raises:
            ValueError: if the layout cannot shard the turn, or does so in runs with gaps.
        """
        num_tokens = self._fitting(num_tokens)
        dealing = deal(layout, self.world_size, num_tokens)
        if dealing.stride != 1:
            raise ValueError(
                f"a cache holds runs of neighbouring positions, so {layout.spec!r} cannot deal its "
                "turns; use one that deals such runs, as BlockCyclic(256)"
            )
        rows = _Rows(self)
        for rank, shard in enumerate(dealing.shards):
            for run in shard:
                rows.add(rank, self.seq_len + run.start, run.length)
        # The turn ends the current block: the next single token chooses a rank again.
        return rows.table(None)

    def append(self, num_tokens: int = 1) -> CacheTable:
        """Return the table with `num_tokens` more single tokens.

        They go to the rank of the current block until it is full, then to the rank with the fewest
        tokens. Ties go to the first such rank from `position // block % W` on.
        """
        num_tokens = self._fitting(num_tokens)
        rows, position, current = _Rows(self), self.seq_len, self.current
        end = position + num_tokens
        while position < end:
            if current is None or position == current[1] + self.block:
                current = rows.shortest(position // self.block), position
            rank, begin = current
            length = min(end, begin + self.block) - position
            rows.add(rank, position, length)
            position += length
        return rows.table(current)

    def crop(self, seq_len: int) -> CacheTable:
        """Return the table of the first `seq_len` positions.

        The current block stays current if any of it is left.

        Raises:
            ValueError: if `seq_len` is negative or larger than the sequence.
        """
        seq_len = as_count("seq_len", seq_len, 0, self.seq_len)
        starts = self.numbers[..., 0]
        lengths = np.clip(seq_len - starts, 0, self.numbers[..., 1])
        # Runs ascend, so the crop keeps the first ones.
        runs = np.stack([np.where(lengths > 0, starts, 0), lengths], axis=-1)
        num_runs, num_local = (lengths > 0).sum(1).tolist(), lengths.sum(1, dtype=np.int64).tolist()
        current = self.current
        if current is not None and current[1] >= seq_len:
            current = None
        runs = runs[:, : _width(max(num_runs))].copy()
        return CacheTable(self.block, tuple(num_local), tuple(num_runs), runs, current)

    def runs_from(self, rank: int, begin: int) -> Ranges:
        """Return the runs of a rank from a position on; a run that contains it is cut there."""
        runs, found = self.numbers[rank], []
        # Search from the end: callers mostly want the last turn only.
        for number in range(self.num_runs[rank] - 1, -1, -1):
            start, length = runs[number].tolist()
            if start + length <= begin:
                break
            first = max(start, begin)
            found.append((first, start + length - first))
        return found[::-1]

    def turn(self, begin: int) -> np.ndarray:
        """Return the runs of all ranks from a position on, in the format of `numbers`."""
        rows = [self.runs_from(rank, begin) for rank in range(self.world_size)]
        numbers = np.zeros((self.world_size, _width(max(map(len, rows))), 2), dtype=np.int32)
        for rank, row in enumerate(rows):
            if row:
                numbers[rank, : len(row)] = row
        return numbers

    def marked(self, mark: int) -> np.ndarray:
        """Return `numbers` with a mark that must agree across ranks, in the format of `RunTable`.

        Args:
            mark: an integer whose lower 30 bits are stored; 0 means no mark.
        """
        width = self.numbers.shape[1]
        more = width if mark and self.num_runs[0] == width else 0
        numbers = np.pad(self.numbers, ((0, 0), (0, more), (0, 0)))
        if mark:
            numbers[0, -1, 0] = MARKED | mark & (MARKED - 1)
        return numbers

    def num_before(self, rank: int, position: int) -> int:
        """Count a rank's tokens before a position: the column of that position on its rank."""
        starts, lengths = self.numbers[rank].T
        return int(np.clip(position - starts, 0, lengths).sum(dtype=np.int64))

    def positions(self, rank: int) -> np.ndarray:
        """Return the position of each column of a rank, int64."""
        starts, lengths = self.numbers[rank].astype(np.int64).T
        return expanded(starts, starts + lengths)[1]

    def _fitting(self, num_tokens: int) -> int:
        """Return `num_tokens` as an int, or raise if the sequence would no longer fit int32."""
        return as_count("num_tokens", num_tokens, 0, LARGEST - self.seq_len)


class _Rows:
    """A mutable copy of the runs of a table, to which runs are added."""

    def __init__(self, table: CacheTable) -> None:
        self._block = table.block
        self._runs = table.numbers.copy()
        self._num_runs, self._num_local = list(table.num_runs), list(table.num_local)

    def add(self, rank: int, start: int, length: int) -> None:
        """Add a run to the end of a rank, or extend its last run if there is no gap between."""
        last = self._num_runs[rank] - 1
        if last >= 0 and int(self._runs[rank, last].sum()) == start:
            self._runs[rank, last, 1] += length
        else:
            if last + 1 == self._runs.shape[1]:
                self._runs = np.pad(self._runs, ((0, 0), (0, last + 1), (0, 0)))
            self._runs[rank, last + 1] = start, length
            self._num_runs[rank] += 1
        self._num_local[rank] += length

    def shortest(self, number: int) -> int:
        """Return the rank with the fewest tokens; ties go to the first from `number % W` on."""
        world_size, num_local = len(self._num_local), self._num_local
        return min(range(world_size), key=lambda x: (num_local[x], (x - number) % world_size))

    def table(self, current: tuple[int, int] | None) -> CacheTable:
        """Return the table of all runs."""
        num_local, num_runs = tuple(self._num_local), tuple(self._num_runs)
        return CacheTable(self._block, num_local, num_runs, self._runs, current)


def _width(num_runs: int) -> int:
    """Round a number of runs up to a power of two, so a compiler sees few shapes."""
    return max(FEWEST_RUNS, 1 << (num_runs - 1).bit_length())


def turn_runs(layout: Layout, num_tokens: int, world_size: int) -> np.ndarray:
    """Return the runs of consecutive positions that each rank holds of a turn.

    Args:
        layout: how the turn is sharded.
        num_tokens: the length of the turn, which the layout must be able to shard.
        world_size: the number of ranks, W.

    Returns:
        Start and length of each run, `(W, R, 2)`, int32, padded with runs of length 0.

    >>> turn_runs(ZigZag(), 8, 2)[:, :2].tolist()
    [[[0, 2], [6, 2]], [[2, 4], [0, 0]]]
    """
    return CacheTable.empty(world_size).append_dealt(layout, num_tokens).numbers
