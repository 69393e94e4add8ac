"""The kernel launches and merges of all steps of all ranks, each kind of step made once.

Planning 1,024 ranks means a million steps, most of which are alike: their tiles differ in nothing.
Alike steps are found by arrays, and then one of each kind is planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dtensor_ring.compute.accumulate import ON_GPUS
from dtensor_ring.compute.execute import launches
from dtensor_ring.compute.kernels.kernel import Launch
from dtensor_ring.compute.merge import MAX_PARTIALS
from dtensor_ring.lab.machine import FORMS
from dtensor_ring.lab.transfers import Transfers, mixed
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.plan import OwnSlices, PlanInputs, Step, own_slices, resident_tiles
from dtensor_ring.planning.ranges import expanded, length
from dtensor_ring.planning.run_table import ShardTable
from dtensor_ring.planning.tile import Tile


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
        """Add a partial with this number of rows on the active ranks."""
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


# Pairs of a slice of queries and a run of keys that are compared at once.
BLOCK = 2**16

# Stands for a bound of a band that hides nothing: more than any lag, and sums of it fit.
FAR = 2**40


class LaunchTable(NamedTuple):
    """The launches of kinds of steps: arrays `(K, M)` for K kinds and at most M launches.

    Kind 0 has no launches. All numbers are over all rows of the batch.

    Attributes:
        kinds: the kind of each step and rank, `(steps, W)`.
        counts: number of launches of each kind, `(K,)`.
        pairs: visible pairs of a query and a key.
        forms: index in `FORMS`.
        rows: queries.
        cols: keys.
    """

    kinds: np.ndarray
    counts: np.ndarray
    pairs: np.ndarray
    forms: np.ndarray
    rows: np.ndarray
    cols: np.ndarray


def launch_table(
    inputs: PlanInputs, transfers: Transfers, batch: int, has_segments: bool
) -> LaunchTable:
    """Return the launches of all steps.

    Args:
        inputs: how the sequence is sharded, and what queries see.
        transfers: what is resident in each step.
        batch: rows of the batch.
        has_segments: whether the kernel takes segments, see `launches`.
    """
    own = [own_slices(runs, inputs.slices) for runs in inputs.queries.shards]
    kinds, examples = _alike(inputs, transfers, own)
    steps = [_step(inputs, transfers, own[rank], step, rank) for step, rank in examples]
    found = [
        launches(made, (batch, inputs.queries.num_local(rank), len(made.cols)), has_segments)
        for made, (_, rank) in zip(steps, examples, strict=True)
    ]
    sizes = [
        [_sizes(x, batch, inputs.queries.num_local(rank), len(made.cols)) for x in of]
        for of, made, (_, rank) in zip(found, steps, examples, strict=True)
    ]
    counts = np.array([0, *map(len, found)])
    table = np.zeros((4, len(counts), max(1, counts.max())), dtype=np.int64)
    for kind, rows in enumerate(sizes, 1):
        table[:, kind, : len(rows)] = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    return LaunchTable(kinds, counts, *table)


def _step(inputs: PlanInputs, transfers: Transfers, own: OwnSlices, number: int, rank: int) -> Step:
    """Plan a step."""
    source = int(transfers.resident(number).sources[rank])
    cols = transfers.resident_cols(number, rank)
    return Step(number, source, cols, resident_tiles(own, inputs.keys.shards[source], cols))


def _sizes(launch: Launch, batch: int, num_rows: int, num_cols: int) -> tuple[int, int, int, int]:
    """Return visible pairs, form, queries and keys of a launch, over all rows of the batch."""
    in_batch, _, of_rows = launch.rows
    repeats = len(range(*in_batch.indices(batch)))
    rows = len(range(*of_rows.indices(num_rows)))
    cols = len(range(*launch.cols[2].indices(num_cols)))
    if launch.segments is None:
        pairs = repeats * Tile((0, rows), (0, cols), launch.mask).area
    else:
        bounds = launch.segments.rows, launch.segments.cols
        spans = zip(pairwise(bounds[0]), pairwise(bounds[1]), strict=True)
        pairs = sum(Tile(rows_at, cols_at, launch.mask).area for rows_at, cols_at in spans)
    return pairs, FORMS.index(form_of(launch.mask)), repeats * rows, repeats * cols


def form_of(mask: Mask) -> str:
    """Return the form of a tile with this mask, one of `FORMS`.

    >>> [form_of(x) for x in (Mask.full(), Mask.causal(), Mask.sliding(4))]
    ['full', 'causal', 'window']
    """
    num_bounds = (mask.left is not None) + (mask.right is not None)
    return ("full", "causal", "window")[num_bounds]


def _alike(
    inputs: PlanInputs, transfers: Transfers, own: Sequence[OwnSlices]
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Return the kind of each step and rank, and a step and a rank of each kind from 1 on.

    The tiles of two steps are equal if the same rows and columns have the same bands, in the same
    resident columns.
    """
    seen = _bands(inputs, own)
    num_rows = np.array([inputs.queries.num_local(rank) for rank in range(len(own))])
    ranks, numbers = np.arange(len(own)), []
    for step in range(transfers.num_steps):
        sources, _, contents = transfers.resident(step)
        bands = seen[ranks, sources]
        numbers.append(np.where(bands > 0, mixed(bands, contents, num_rows), np.uint64(0)))
    every = np.concatenate([np.zeros(1, dtype=np.uint64), *numbers])
    _, first, kinds = np.unique(every, return_index=True, return_inverse=True)
    # Entry 0 has no tiles, and 0 is the smallest number.
    examples = [divmod(int(x) - 1, len(own)) for x in first[1:]]
    return kinds[1:].reshape(-1, len(own)), examples


def _bands(inputs: PlanInputs, own: Sequence[OwnSlices]) -> np.ndarray:
    """Return a number for what each rank sees of each source, `(W, W)`; 0 for nothing."""
    found = np.zeros((len(own), len(own)), dtype=np.uint64)
    for pieces, keys in _in_reach(_PlacedQueries.of(own), inputs.keys):
        is_seen, number = _band(pieces, keys, inputs.keys)
        np.add.at(found, (pieces.ranks[is_seen], inputs.keys.owners[keys[is_seen]]), number)
    return found


class _PlacedQueries(NamedTuple):
    """Slices of queries of all ranks, see `QuerySlice`: arrays `(N,)`.

    Attributes:
        ranks: who has the queries.
        places: a number for the batch row, the first row of the shard, and the number of rows.
        num_rows: number of queries.
        positions: position of the first query.
        begins, ends: range of key positions.
        left, right: bounds of the band.
    """

    ranks: np.ndarray
    places: np.ndarray
    num_rows: np.ndarray
    positions: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    left: np.ndarray
    right: np.ndarray

    @classmethod
    def of(cls, own: Sequence[OwnSlices]) -> _PlacedQueries:
        """Collect the slices of all ranks."""
        rows = [
            (
                *(rank, -1 if batch is None else batch, x.row + x.span[0], length(x.span)),
                *(x.run.position(x.span[0]), *x.keys),
                *(FAR if bound is None else bound for bound in (x.left, x.right)),
            )
            for rank, by_batch in enumerate(own)
            for batch, pieces in by_batch
            for x in pieces
        ]
        ranks, batch, row, num_rows, *others = np.array(rows, dtype=np.int64).reshape(-1, 9).T
        return cls(ranks, mixed(batch, row, num_rows), num_rows, *others)


def _in_reach(
    queries: _PlacedQueries, keys: ShardTable
) -> Iterator[tuple[_PlacedQueries, np.ndarray]]:
    """Yield pairs of a slice of queries and a run of keys that it may see, in blocks."""
    first = np.zeros_like(queries.ranks)
    ends = np.full_like(first, len(keys.starts))
    if keys.stride == 1:  # runs do not interleave, so those in reach are adjacent
        first = np.searchsorted(keys.starts + keys.lengths, queries.begins, "right")
        ends = np.searchsorted(keys.starts, queries.ends, "left")
    cuts = np.flatnonzero(np.diff(np.cumsum(ends - first) // BLOCK)) + 1
    for where in np.split(np.arange(len(first)), cuts):
        number, run = expanded(first[where], ends[where])
        yield _PlacedQueries(*(x[where[number]] for x in queries)), run


def _band(
    queries: _PlacedQueries, keys: np.ndarray, table: ShardTable
) -> tuple[np.ndarray, np.ndarray]:
    """Return which pairs see anything, and a number for the band of each of those.

    Bounds become those of indices, as in `tile.shard_tiles`, and no larger than hides nothing.
    """
    _, places, num_rows, positions, begins, ends, left, right = queries
    starts, stride = table.starts[keys], table.stride
    first = np.maximum(0, -((starts - begins) // stride))
    num_cols = np.minimum(table.lengths[keys], -((starts - ends) // stride)) - first
    offset = positions - (starts + first * stride)
    left = np.minimum((left - offset) // stride, num_rows - 1)
    right = np.minimum((right + offset) // stride, num_cols - 1)
    is_seen = (num_cols > 0) & (left + right >= 0) & (right > -num_rows) & (left > -num_cols)
    # All of these are int32, so two of them fit into one number.
    cols = ((table.cols[keys] + first) << 32) + num_cols
    band = (left << 32) + (right & (2**32 - 1))
    return np.flatnonzero(is_seen), mixed(*(x[is_seen] for x in (places, cols, band)))
