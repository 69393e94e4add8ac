"""The runs of all ranks as arrays, and layouts made from a spec or from a table of runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import ClassVar

import numpy as np

from dtensor_ring.planning.layout import (
    BlockCyclic,
    Contiguous,
    Layout,
    Run,
    Striped,
    WholeBlocks,
    ZigZag,
    joined,
)
from dtensor_ring.planning.lru import cached_bytes
from dtensor_ring.planning.ranges import FrozenArrays
from dtensor_ring.planning.slice_tables import LARGEST


def as_layout(layout: Layout | str) -> Layout:
    """Return a layout, given as a layout or its spec.

    Args:
        layout: a layout, or its `spec`: `"zigzag"`, `"block_cyclic:128"`; `"balanced"` stands for
            the layouts that belong to a batch.

    Raises:
        ValueError: if the spec is unknown.
        TypeError: if `layout` is neither a layout nor a string.

    >>> as_layout("block_cyclic:128"), as_layout(ZigZag()).spec
    (BlockCyclic(block=128), 'zigzag')
    """
    if isinstance(layout, str):
        # A bare name bypasses the cache, because a compiler that traces `lru_cache` warns.
        kind = LAYOUTS.get(layout)
        return _parse(layout) if kind is None or kind.parameters else kind()
    if not isinstance(layout, Layout):
        raise TypeError(f"a layout is a Layout or its name, got {type(layout).__name__}")
    # A layout of another class is not in the table, so its spec cannot be parsed back.
    if not layout.per_batch and type(layout) is not LAYOUTS.get(layout.name):
        raise ValueError(f"unknown layout {layout!r}; known layouts: {', '.join(_known_specs())}")
    return layout


@dataclass(frozen=True, eq=False)
class ShardTable:
    """How a layout shards one sequence over all ranks.

    Attributes:
        shards: the runs of each rank.
        starts: first position of each run; the arrays list all runs, in the order of `starts`.
        lengths: number of tokens of each run.
        owners: the rank that holds each run.
        cols: index in its owner's shard at which each run begins.
    """

    shards: tuple[tuple[Run, ...], ...]
    starts: np.ndarray
    lengths: np.ndarray
    owners: np.ndarray
    cols: np.ndarray

    @cached_property
    def stride(self) -> int:
        """Difference between neighbouring positions of a run, the same for all runs."""
        return next((shard[0].stride for shard in self.shards if shard), 1)

    def num_local(self, rank: int) -> int:
        """Return the number of tokens of a rank."""
        return sum(run.length for run in self.shards[rank])


# Memory of a `Run`, its integers, and its row in the arrays.
BYTES_PER_RUN = 200


@cached_bytes(2**26, lambda sharding: BYTES_PER_RUN * len(sharding.starts) + 64)
def shard_table(layout: Layout, world_size: int, seq_len: int) -> ShardTable:
    """Return the runs of all ranks; a cache keeps at most 64 MiB of them.

    Raises:
        ValueError: if the layout cannot shard the length, or violates the contract of
            `Layout.runs`.
    """
    shards = tuple(tuple(layout.runs(rank, world_size, seq_len)) for rank in range(world_size))
    expected = [layout.num_tokens(rank, world_size, seq_len) for rank in range(world_size)]
    wrong = _own_fault(shards, expected) or _common_fault(shards, seq_len)
    if wrong:
        raise ValueError(
            f"{layout!r} breaks the promise of Layout.runs for {seq_len} tokens on {world_size} "
            f"ranks: {wrong}"
        )
    if all(run.stride == 1 for shard in shards for run in shard):
        # Join adjacent runs, such as the two chunks of zigzag's last rank: fewer tiles.
        shards = tuple(joined(list(shard)) for shard in shards)
    rows = [
        (run.start, run.length, rank, col)
        for rank, shard in enumerate(shards)
        for run, col in zip(shard, _offsets(shard), strict=True)
    ]
    # Sort by position, because the searches rely on it.
    table = np.array(sorted(rows), dtype=np.int64).reshape(-1, 4)
    starts, lengths, owners, cols = np.ascontiguousarray(table.T)
    return ShardTable(shards, starts, lengths, owners, cols)


def _offsets(shard: tuple[Run, ...]) -> list[int]:
    """Return the index in the shard at which each run begins."""
    offsets, end = [], 0
    for run in shard:
        offsets.append(end)
        end += run.length
    return offsets


def _own_fault(shards: tuple[tuple[Run, ...], ...], expected: list[int]) -> str | None:
    """Check the runs of each rank on its own; return an error message or `None`."""
    for rank, shard in enumerate(shards):
        for run in shard:
            if run.length < 1 or run.stride < 1:
                return f"rank {rank} has an empty run, {run}"
        # Tiles are found by bisection, which is silently wrong if runs are out of order.
        for run, following in pairwise(shard):
            if following.start <= run.last:
                return f"the runs of rank {rank} do not ascend, {following} follows {run}"
        num_tokens = sum(run.length for run in shard)
        if num_tokens != expected[rank]:
            return f"rank {rank} has {num_tokens} tokens, but its shard has {expected[rank]}"
    return None


def _common_fault(shards: tuple[tuple[Run, ...], ...], seq_len: int) -> str | None:
    """Check that strides agree and each position is held once; return an error or `None`."""
    runs = [(run, rank) for rank, shard in enumerate(shards) for run in shard]
    stride = runs[0][0].stride if runs else 1
    for run, rank in runs:
        if run.stride != stride:
            return f"rank {rank} has a run of stride {run.stride}, others have stride {stride}"
    # Runs form one chain for each remainder modulo the stride: each begins where the last ended.
    runs.sort(key=lambda owned: (owned[0].start % stride, owned[0].start))
    expected, remainder = 0, -1
    for run, rank in runs:
        # A chain may begin anywhere: the number of tokens is right and all are in the sequence, so
        # none can be missing before the chain.
        if run.start % stride != remainder:
            expected, remainder = run.start, run.start % stride
        if run.start < 0 or run.last >= seq_len:
            return f"rank {rank} has {run}, outside of the sequence"
        if run.start != expected:
            missed = min(run.start, expected)
            return f"rank {rank} has {run}, so that position {missed} is not held exactly once"
        expected = run.last + stride
    return None


# Start and length of the runs of each rank: `(W, R, 2)`, or rows of different lengths.
Rows = np.ndarray | Sequence[Sequence[tuple[int, int]]]

# The smallest mark. No empty run starts here by chance.
MARKED = 1 << 30


# Python adds up to this many numbers faster than numpy does.
FEW = 64


class RunTable(FrozenArrays, Layout):
    """An explicit table of runs: of one batch, of one append step, or of the content of a cache.

    Each position is on at most one rank, and a rank holds any number of them. As a layout, the
    table must hold all positions from its first one to the end of the sequence.

    Args:
        rows: start and length of the runs of each rank; empty runs pad the rows. If an empty run
            ends the first row and starts at `MARKED` or later, its start is the `mark`, another
            number that must agree on all ranks.
        argument: the name of the argument that held the rows, for errors.

    Attributes:
        numbers: start and length of the runs, `(W, R, 2)`, int64, without empty runs between.
        mark: the mark of the rows, 0 without one.
        num_bytes: memory of the table and the object, in bytes.

    Raises:
        ValueError: if a number is negative or no int32, the runs of a rank do not ascend, or two
            runs hold the same position.

    >>> table = RunTable([[(4, 2), (9, 3)], [(6, 1)]])
    >>> table.begin, table.end, table.missing
    (4, 12, 7)
    """

    name: ClassVar[str] = "balanced"
    per_batch: ClassVar[bool] = True

    def __init__(self, rows: Rows, argument: str = "runs") -> None:
        self.argument = argument
        given = rows.astype(np.int64) if isinstance(rows, np.ndarray) else _filled(rows)
        wrong = (given < 0) | (given > LARGEST) | (given.sum(-1, keepdims=True) > LARGEST)
        if wrong.any():
            raise ValueError(
                f"{argument} must be from 0 to {LARGEST:,}, got {given[wrong.any(-1)][0].tolist()}"
            )
        # A cache marks its format and selections by an empty last run of row 0, so that tables of
        # other caches are other values.
        ends = given[:1, -1:].reshape(-1, 2)
        marks = ends[(ends[:, 1] == 0) & (ends[:, 0] >= MARKED), 0]
        self.numbers, _ = self._freeze([_compact(given), marks])
        self.mark = int(marks.sum())  # 0 without one
        self.num_bytes = 1000 + 2 * self.numbers.nbytes
        lengths = self.numbers[..., 1]
        if ((np.diff(self.numbers[..., 0], axis=1) < 0) & (lengths[:, 1:] > 0)).any():
            raise ValueError(
                f"the {argument} of a rank must be in ascending order, see sequence_runs"
            )
        starts, ends = self._ordered
        overlaps = starts[1:] < ends[:-1]
        if overlaps.any():
            raise self._not_once(int(starts[1:][overlaps.argmax()]))

    @classmethod
    def of_checked(cls, numbers: np.ndarray, mark: int, end: int, argument: str) -> RunTable:
        """Return the table of numbers that are known to be right.

        Args:
            numbers: start and length of the runs, `(W, R, 2)`, without empty runs between; they
                ascend, and hold each position at most once.
            mark: the mark, 0 without one.
            end: the position after the last one.
            argument: the name of the argument that holds the rows, for errors.
        """
        table = cls.__new__(cls)
        table.argument, table.mark, table.end = argument, mark, end
        marks = np.array([mark] if mark else [], dtype=np.int64)
        table.numbers, _ = table._freeze([numbers.astype(np.int64), marks])
        table.num_bytes = 1000 + 2 * table.numbers.nbytes
        return table

    @cached_property
    def _ordered(self) -> tuple[np.ndarray, np.ndarray]:
        """Begins and ends of all runs, in the order of positions."""
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

    def __repr__(self) -> str:
        rows = [[tuple(run) for run in row if run[1]] for row in self.numbers.tolist()]
        return f"RunTable({rows})"

    def num_tokens(self, rank: int, world_size: int, seq_len: int) -> int:
        lengths = self._row(rank, world_size)[:, 1]
        return sum(lengths.tolist()) if lengths.size <= FEW else int(lengths.sum())

    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        if self.missing is not None:
            raise self._not_once(self.missing)
        if (len(self.numbers), self.end) != (world_size, seq_len):
            raise ValueError(
                f"these {self.argument} shard {self.end} tokens over {len(self.numbers)} ranks, "
                f"not {seq_len} tokens over {world_size}; make a layout for each batch, see "
                "sequence_runs"
            )
        return self.held(rank, world_size)

    def held(self, rank: int, world_size: int) -> tuple[Run, ...]:
        """Return the runs of a rank, adjacent ones joined; the table may have missing positions.

        Raises:
            ValueError: if there is not one row for each rank.
        """
        starts, lengths = self.numbers_of(rank, world_size)
        return joined(list(map(Run, starts.tolist(), lengths.tolist())))

    def numbers_of(self, rank: int, world_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the start and the length of each run of a rank.

        Raises:
            ValueError: if there is not one row for each rank.
        """
        starts, lengths = self._row(rank, world_size).T
        return starts[lengths > 0], lengths[lengths > 0]

    def _row(self, rank: int, world_size: int) -> np.ndarray:
        if len(self.numbers) != world_size:
            raise ValueError(
                f"{self.argument} must have a row for each of the {world_size} ranks, got "
                f"{len(self.numbers)}"
            )
        return self.numbers[rank]

    def check_from(self, begin: int) -> None:
        """Refuse a table that begins after this position.

        Raises:
            ValueError: if it does; the message names the position.
        """
        if self.begin > begin:
            raise self._not_once(begin)

    def _not_once(self, position: int) -> ValueError:
        return ValueError(
            f"{self.argument} must hold each position once, not so position {position}"
        )


def _filled(rows: Sequence[Sequence[tuple[int, int]]]) -> np.ndarray:
    """Return rows of different lengths as one array `(W, R, 2)`, padded with empty runs."""
    filled = np.zeros((len(rows), max(map(len, rows), default=0), 2), dtype=np.int64)
    for row, runs in zip(filled, rows, strict=True):
        row[: len(runs)] = np.array(runs, dtype=np.int64).reshape(-1, 2)
    return filled


def _compact(given: np.ndarray) -> np.ndarray:
    """Drop empty runs and make the table as narrow as possible, so that equal runs are equal."""
    is_run = given[..., 1] > 0
    counts = is_run.sum(1, keepdims=True)
    numbers = np.zeros((len(given), counts.max(initial=0), 2), dtype=np.int64)
    numbers[np.arange(numbers.shape[1]) < counts] = given[is_run]
    return numbers


@dataclass(frozen=True)
class PerBatch(Layout):
    """A placeholder for a layout that comes with each batch, see `sequence_runs`."""

    name: ClassVar[str] = "balanced"
    per_batch: ClassVar[bool] = True

    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        raise ValueError(
            "the balanced layout belongs to one batch, so it is passed with it: "
            "ring_attention(..., runs=sequence_runs(Balanced(...))), and so to shard_sequence"
        )


# The layouts that a name and integers can describe.
LAYOUTS: dict[str, type[Layout]] = {
    layout.name: layout for layout in (Contiguous, Striped, ZigZag, BlockCyclic, WholeBlocks)
}


@lru_cache(maxsize=256)  # the ops pass the spec of their layout in every call
def _parse(spec: str) -> Layout:
    """Parse the spec of a layout."""
    # A per-batch layout takes no parameters: its runs come with the batch.
    if spec == PerBatch.name:
        return PerBatch()
    name, _, parameters = spec.partition(":")
    if spec == "auto":
        raise ValueError(
            'a layout is chosen before masks are seen, so "auto" is for plans that know the layers '
            "of a model, as context_parallel_plan; else pass choose_layout(mask, seq_len, "
            "world_size)"
        )
    if name not in LAYOUTS:
        raise ValueError(f"unknown layout {spec!r}; known layouts: {', '.join(_known_specs())}")
    return _parsed(LAYOUTS[name], spec, parameters)


def _parsed(kind: type[Layout], spec: str, parameters: str) -> Layout:
    """Return the layout with these parameters, separated by commas."""
    values = parameters.split(",") if ":" in spec else []
    try:
        if len(values) != len(kind.parameters):
            raise ValueError(f"takes {len(kind.parameters)} parameters, got {len(values)}")
        return kind(*map(int, values))
    except ValueError as error:
        raise ValueError(
            f"the layout {spec!r} has wrong parameters ({error}); "
            f"known layouts: {', '.join(_known_specs())}"
        ) from None


def layout_names() -> list[str]:
    """Return the names of the layouts without parameters, for errors."""
    return [name for name, kind in LAYOUTS.items() if not kind.parameters]


def _known_specs() -> list[str]:
    """Return the spec of each known layout, with the names of its parameters."""
    named = {name: ",".join(f"<{x}>" for x in kind.parameters) for name, kind in LAYOUTS.items()}
    return [f"{name}:{parameters}" if parameters else name for name, parameters in named.items()]
