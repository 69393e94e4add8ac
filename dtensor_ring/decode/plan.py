"""What a few queries see of the keys of one rank, and which positions each rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.layout import Layout, Run, WholeBlocks
from dtensor_ring.planning.lru import cached_bytes
from dtensor_ring.planning.mask import Documents, Mask
from dtensor_ring.planning.plan import Step, checked_slices
from dtensor_ring.planning.ranges import MAX_RANKS, as_count, expanded, length, moved
from dtensor_ring.planning.run_table import MARKED, RunTable, shard_table
from dtensor_ring.planning.slice_tables import LARGEST
from dtensor_ring.planning.slices import Rows, Slices, rows_of
from dtensor_ring.planning.tile import (
    FULL,
    QuerySlice,
    Tile,
    coalesce,
    query_slices_of,
    shard_tiles,
)

# Smallest number of runs per rank that a table has room for: a compiler then sees few shapes.
FEWEST_RUNS = 8

# Start and length of runs of consecutive positions.
Ranges = list[tuple[int, int]]


class DecodeRequest(NamedTuple):
    """What the step of a rank follows from.

    Attributes:
        layout: how the keys are sharded, or a `RunTable`.
        mask: what a query sees.
        rank: this rank's index on the axis.
        world_size: ranks on the axis.
        seq_len: number of positions of keys; queries may come after them.
        starts: position of the first query, for the whole batch or for each batch row.
        num_queries: number of queries, at consecutive positions.
        documents: boundaries, see `plan`; they may reach beyond `seq_len`.
        slices: what a query sees, instead of mask and documents; they may reach beyond `seq_len`.
    """

    layout: Layout
    mask: Mask
    rank: int
    world_size: int
    seq_len: int
    starts: tuple[int, ...]
    num_queries: int
    documents: Documents | None = None
    slices: Slices | None = None

    @property
    def num_bytes(self) -> int:
        """Estimated memory of runs, boundaries and slices, in bytes: a cache counts its keys."""
        return sum(getattr(x, "num_bytes", 0) for x in self)

    def step(self, num_columns: int) -> Step:
        """Plan the step of this rank, which holds `num_columns` keys.

        Raises:
            ValueError: if the rank holds more or fewer columns than its runs, or options do not
                fit.
        """
        # One tile is made faster than found.
        step = _whole_step(self) if self.sees_all else decode_step(self)
        if len(step.cols) != num_columns:
            raise ValueError(
                f"key must hold the {len(step.cols)} tokens that {self._runs()} gives rank "
                f"{self.rank} of {self.world_size}, got {num_columns}"
            )
        return step

    @property
    def sees_all(self) -> bool:
        """Whether all queries see all keys."""
        is_cut = self.documents is not None or self.slices is not None
        if is_cut or self.mask.left is not None or self.mask.chunk is not None:
            return False
        # The first query sees least.
        right = self.mask.right
        return right is None or min(self.starts, default=0) + right >= self.seq_len - 1

    def seen(self) -> Slices:
        """Return what queries see as slices, which may reach beyond the last key."""
        longest = max(self.seq_len, max(self.starts, default=0) + self.num_queries)
        # A power of two, so a growing sequence reuses one table: positions without keys add no
        # tiles.
        horizon = 1 << max(10, (longest - 1).bit_length())
        if self.documents is not None or self.slices is not None:
            horizon = LARGEST  # they may describe the sequence at its final length
        lengths = horizon, horizon
        documents = self.documents
        return checked_slices(self.mask, self.world_size, lengths, documents, None, self.slices)

    def _runs(self) -> str:
        if isinstance(self.layout, RunTable):
            return self.layout.argument
        return f"the layout {self.layout.spec} of {self.seq_len} positions"


@dataclass(frozen=True, eq=False)
class CacheTable:
    """The positions `0 ... seq_len - 1` of a sequence that grows at its end, sharded over ranks.

    An append step of many tokens (a prompt, or a chunk of it) is sharded by a layout on its own, so
    each append step is balanced. Single tokens go in blocks to the rank that has the fewest. A
    rank's tokens ascend in position: new ones are its last columns, and a crop removes its last
    columns.

    All ranks compute the same table without a message. It is a frozen value: each change makes
    another table in a few microseconds, whatever the number of runs. Without crops, the lengths of
    two ranks differ by at most one block, plus W - 1 tokens for each sharded append step.

    Attributes:
        block: tokens of a block.
        num_local, num_runs: number of tokens and of runs of each rank, W entries.
        numbers: start and length of each run, `(W, R, 2)`, int32, padded with runs of length 0.
        current: rank and first position of the block that single tokens go to.

    >>> table = CacheTable.empty(world_size=2, block=4).append_sharded(ZigZag(), 8).append(5)
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

    def append_sharded(self, layout: Layout, num_tokens: int) -> CacheTable:
        """Return the table with one more append step, sharded as a sequence of its own.

        Raises:
            ValueError: if the layout cannot shard the append step, or does so in runs with gaps.
        """
        num_tokens = as_count("num_tokens", num_tokens, 0, LARGEST - self.seq_len)
        sharding = shard_table(layout, self.world_size, num_tokens)
        if sharding.stride != 1:
            raise ValueError(
                f"a cache holds runs of neighbouring positions, so {layout.spec!r} cannot shard "
                "its append steps; use one with such runs, as BlockCyclic(256)"
            )
        rows = _Rows(self)
        for rank, shard in enumerate(sharding.shards):
            for run in shard:
                rows.add(rank, self.seq_len + run.start, run.length)
        # The append step ends the current block: the next single token chooses a rank again. Only
        # a layout of the same blocks goes on with its last one, which stays on one rank.
        is_open = self.seq_len % self.block == 0 and num_tokens % self.block > 0
        if not (is_open and layout == WholeBlocks(self.block)):
            return rows.table(None)
        end = self.seq_len + num_tokens
        return rows.table((rows.last_owner(), end - num_tokens % self.block))

    def append(self, num_tokens: int = 1) -> CacheTable:
        """Return the table with `num_tokens` more single tokens.

        They go to the rank of the current block until it is full, then to the rank with the fewest
        tokens. Ties go to the first such rank from `position // block % W` on.
        """
        num_tokens = as_count("num_tokens", num_tokens, 0, LARGEST - self.seq_len)
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
        # Search from the end: callers mostly want the last append step only.
        for number in range(self.num_runs[rank] - 1, -1, -1):
            start, length = runs[number].tolist()
            if start + length <= begin:
                break
            first = max(start, begin)
            found.append((first, start + length - first))
        return found[::-1]

    def numbers_from(self, begin: int) -> np.ndarray:
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
        if not mark:
            return self.numbers
        width = self.numbers.shape[1]
        more = width if self.num_runs[0] == width else 0
        numbers = np.pad(self.numbers, ((0, 0), (0, more), (0, 0)))
        numbers[0, -1, 0] = MARKED | mark & (MARKED - 1)
        return numbers

    def run_table(self, mark: int) -> RunTable:
        """Return the table of the `key_runs` with a mark, see `marked`."""
        mark = MARKED | mark & (MARKED - 1) if mark else 0
        numbers = self.numbers[:, : max(self.num_runs)]
        return RunTable.of_checked(numbers, mark, self.seq_len, "key_runs")

    def num_before(self, rank: int, position: int) -> int:
        """Count a rank's tokens before a position: the column of that position on its rank."""
        starts, lengths = self.numbers[rank].T
        return int(np.clip(position - starts, 0, lengths).sum(dtype=np.int64))

    def positions(self, rank: int) -> np.ndarray:
        """Return the position of each column of a rank, int64."""
        starts, lengths = self.numbers[rank].astype(np.int64).T
        return expanded(starts, starts + lengths)[1]


class _Rows:
    """A mutable copy of the runs of a table, to which runs are added."""

    def __init__(self, table: CacheTable) -> None:
        self._block = table.block
        self._runs = table.numbers.copy()
        self._num_runs, self._num_local = list(table.num_runs), list(table.num_local)

    def add(self, rank: int, start: int, length: int) -> None:
        """Add a run to the end of a rank, or extend its last run if there is no gap between."""
        last = self._num_runs[rank] - 1
        # A sum by numpy takes longer than both numbers.
        before = self._runs[rank, last].tolist() if last >= 0 else (-1, 0)
        if before[0] + before[1] == start:
            self._runs[rank, last, 1] += length
        else:
            if last + 1 == self._runs.shape[1]:
                self._runs = np.pad(self._runs, ((0, 0), (0, last + 1), (0, 0)))
            self._runs[rank, last + 1] = start, length
            self._num_runs[rank] += 1
        self._num_local[rank] += length

    def last_owner(self) -> int:
        """Return the rank of the last position."""
        return int(self._runs.sum(-1).max(1).argmax())

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


def append_runs(layout: Layout, num_tokens: int, world_size: int) -> np.ndarray:
    """Return the runs of consecutive positions that each rank holds of an append step.

    Args:
        layout: how the append step is sharded.
        num_tokens: the length of the append step, which the layout must be able to shard.
        world_size: the number of ranks, W.

    Returns:
        Start and length of each run, `(W, R, 2)`, int32, padded with runs of length 0.

    >>> append_runs(ZigZag(), 8, 2)[:, :2].tolist()
    [[[0, 2], [6, 2]], [[2, 4], [0, 0]]]
    """
    return CacheTable.empty(world_size).append_sharded(layout, num_tokens).numbers


@cached_bytes(2**24, lambda step: 2000 + 330 * len(step.tiles))
def decode_step(request: DecodeRequest) -> Step:
    """Return the only step of a rank, from a cache of 16 MiB.

    Its tiles pair all queries with the rank's own columns. The time grows with the number of runs
    of this rank, and of runs at an edge of what a query sees. Keys that all see are one tile.

    Raises:
        ValueError: if runs, documents or slices do not fit.
    """
    if request.sees_all:
        return _whole_step(request)
    columns = _columns(request.layout, request.rank, request.world_size, request.seq_len)
    tiles = _tiles(columns, rows_of(request.seen()), request.starts, request.num_queries)
    return Step(0, request.rank, _held(request), tuple(tiles))


def _whole_step(request: DecodeRequest) -> Step:
    """Return the step of a rank all of whose columns are seen by all queries: one tile."""
    cols = _held(request)
    tiles = (Tile((0, request.num_queries), cols.spans[0], FULL),) if cols.spans else ()
    return Step(0, request.rank, cols, tiles)


def _held(request: DecodeRequest) -> Cols:
    """Return the columns of the rank."""
    layout, rank, world_size = request.layout, request.rank, request.world_size
    if not isinstance(layout, RunTable):
        shard_table(layout, world_size, request.seq_len)  # it may not shard any length
    num_tokens = layout.num_tokens(rank, world_size, request.seq_len)
    return Cols(((0, num_tokens),) if num_tokens else ())


def _tiles(
    columns: _Columns, rows: Rows, starts: tuple[int, ...], num_queries: int
) -> Iterator[Tile]:
    """Yield the tiles of all batch rows."""
    for batch, start, table in _batch_rows(rows, starts):
        query_slices = query_slices_of(_queries(start, num_queries, columns.stride), table)
        found = [tile for query_slice in query_slices for tile in columns.tiles(query_slice, batch)]
        yield from coalesce(sorted(found, key=lambda tile: (tile.rows, tile.cols)))


def _batch_rows(
    rows: Rows, starts: tuple[int, ...]
) -> Iterator[tuple[int | None, int, np.ndarray]]:
    """Yield the batch row (`None` for all rows), its first query position, and its slices."""
    if len(set(starts)) == 1:
        yield from ((batch, starts[0], table) for batch, table in rows)
        return
    for batch, start in enumerate(starts):
        yield batch, start, rows[batch if len(rows) > 1 else 0][1]


def _queries(start: int, num_queries: int, stride: int) -> list[Run]:
    """Return the queries as runs; against keys with gaps, each query is a run of its own."""
    if stride == 1:
        return [Run(start, num_queries)]
    return [Run(start + index, 1) for index in range(num_queries)]


class _Columns:
    """The columns of a rank, in which its runs lie side by side.

    Args:
        starts: first position of each run, ascending.
        lengths: number of tokens of each run, at least 1.
        stride: the stride of all runs.
    """

    def __init__(self, starts: np.ndarray, lengths: np.ndarray, stride: int) -> None:
        self._starts, self._lengths, self.stride = starts, lengths, stride
        self._lasts = starts + (lengths - 1) * stride
        self._offsets = np.append(0, np.cumsum(lengths))
        self.num_tokens = int(self._offsets[-1])

    def tiles(self, query_slice: QuerySlice, batch: int | None) -> Iterator[Tile]:
        """Yield the tiles that the queries of a query slice see, in no defined order."""
        first, last = (
            query_slice.run.position(query_slice.span[0]),
            query_slice.run.position(query_slice.span[1] - 1),
        )
        begin, end = query_slice.keys
        # All queries see the keys from `inner` to `outer`; only some see the other keys.
        inner = begin if query_slice.left is None else max(begin, last - query_slice.left)
        outer = end if query_slice.right is None else min(end, first + query_slice.right + 1)
        if inner >= outer:
            inner = outer = begin
        cols = self._below(inner), self._below(outer)
        if length(cols):
            yield Tile(moved(query_slice.span, query_slice.row), cols, FULL, batch)
        for span in ((begin, inner), (outer, end)):
            if length(span):
                yield from self._edge(query_slice._replace(keys=span), batch)

    def _below(self, position: int) -> int:
        """Return the number of columns before a position."""
        index = int(np.searchsorted(self._lasts, position))
        if index == len(self._lasts):
            return self.num_tokens
        return int(self._offsets[index]) + self._run(index).indices(position, position)[0]

    def _edge(self, query_slice: QuerySlice, batch: int | None) -> Iterator[Tile]:
        """Yield the tiles of the runs that hold keys of a query slice."""
        first, end = np.searchsorted(self._lasts, query_slice.keys).tolist()
        runs = tuple(map(self._run, range(first, min(end + 1, len(self._lasts)))))
        for tile in shard_tiles([query_slice], runs, batch):
            cols = moved(tile.cols, int(self._offsets[first]))
            yield Tile(tile.rows, cols, tile.mask, batch)

    def _run(self, index: int) -> Run:
        return Run(int(self._starts[index]), int(self._lengths[index]), self.stride)


def _columns(layout: Layout, rank: int, world_size: int, seq_len: int) -> _Columns:
    if isinstance(layout, RunTable):  # a cache may have dropped positions
        starts, lengths = layout.numbers_of(rank, world_size)
        return _Columns(starts, lengths, stride=1)
    sharding = shard_table(layout, world_size, seq_len)
    is_here = sharding.owners == rank
    return _Columns(sharding.starts[is_here], sharding.lengths[is_here], sharding.stride)
