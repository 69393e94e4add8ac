"""Positions of all ranks' keys, blocks of positions, and the size of a request for keys.

Everything here is integer arithmetic, without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.layout import Layout, Run, joined, run_positions
from dtensor_ring.planning.lru import cached_bytes
from dtensor_ring.planning.ranges import Span, as_count
from dtensor_ring.planning.run_table import RunTable, shard_table

# The largest number of keys that a query may select; models select 2,048.
MAX_SELECTED = 1 << 16

# How keys travel to the queries that selected them.
SELECTED, ALL = "selected", "all"
KEY_ROUTES = SELECTED, ALL


def checked_choice(
    k: int, block_size: int, local_blocks: int, pool_size: int
) -> tuple[int, int, int, int]:
    """Return how queries choose, as plain integers: the numbers of keys, and of their positions.

    Raises:
        TypeError: if one is not an integer.
        ValueError: if one is out of range, local blocks have no blocks, or pools have some.
    """
    block_size = as_count("block_size", block_size, 1, MAX_SELECTED)
    pool_size = as_count("pool_size", pool_size, 1, MAX_SELECTED)
    if block_size > 1 < pool_size:
        raise ValueError(
            f"keys are pools or chosen by blocks, got pool_size={pool_size} and "
            f"block_size={block_size}; leave one of them out"
        )
    k = as_count("k", k, 1, MAX_SELECTED // max(block_size, pool_size))
    local_blocks = as_count("local_blocks", local_blocks, 0)
    if local_blocks and block_size == 1:
        raise ValueError(f"local_blocks={local_blocks} needs blocks; pass block_size")
    return k, block_size, local_blocks, pool_size


def width_of(k: int, block_size: int, pool_size: int) -> int:
    """Return how many positions a query chooses at most.

    >>> width_of(2, 4, 1), width_of(2, 1, 4)
    (8, 11)
    """
    # Beside pools it gets the tokens after the last one that it sees.
    return k * block_size * pool_size + pool_size - 1


@dataclass(frozen=True, eq=False)
class KeyPositions:
    """The positions of the keys of all ranks, in the order of the ranks.

    Attributes:
        numbers: int32 `(S,)`, the positions of rank 0, then those of rank 1, and so on.
        offsets: the index in `numbers` at which each rank begins, then S.
        end: the position after the last one.

    >>> from dtensor_ring import ZigZag
    >>> key_positions(ZigZag(), 2, 8).of(0).tolist()
    [0, 1, 6, 7]
    """

    numbers: np.ndarray
    offsets: tuple[int, ...]
    end: int

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.offsets) - 1

    def span(self, rank: int) -> Span:
        """Return where the positions of a rank are in `numbers`."""
        return self.offsets[rank], self.offsets[rank + 1]

    def num_local(self, rank: int) -> int:
        """Return the number of keys of a rank."""
        return self.offsets[rank + 1] - self.offsets[rank]

    def of(self, rank: int) -> np.ndarray:
        """Return the positions of a rank's keys, which ascend."""
        return self.numbers[self.offsets[rank] : self.offsets[rank + 1]]


@cached_bytes(2**26, lambda found: found.numbers.nbytes + 64)
def key_positions(layout: Layout, world_size: int, seq_len: int) -> KeyPositions:
    """Return the positions of all ranks' keys; a cache keeps at most 64 MiB of them.

    Raises:
        ValueError: if the layout cannot shard the length.
    """
    table = shard_table(layout, world_size, seq_len)
    offsets = accumulate((table.num_local(rank) for rank in range(world_size)), initial=0)
    numbers = run_positions(chain.from_iterable(table.shards), np.int32)
    numbers.setflags(write=False)
    return KeyPositions(numbers, tuple(offsets), seq_len)


def columns_in(numbers: np.ndarray, cols: Cols) -> np.ndarray:
    """Return the entries of these columns, side by side.

    >>> columns_in(np.arange(10, 20), Cols(((0, 2), (5, 6)))).tolist()
    [10, 11, 15]
    """
    return np.concatenate([numbers[:0], *(numbers[begin:end] for begin, end in cols.spans)])


class PositionBlocks(NamedTuple):
    """The blocks of ascending positions.

    Attributes:
        numbers: the blocks that hold any of the positions, ascending, int32.
        index: the index in `numbers` of the block of each position, int64.
    """

    numbers: np.ndarray
    index: np.ndarray


def blocks_of(positions: np.ndarray, size: int) -> PositionBlocks:
    """Return the blocks of `size` positions that hold these positions.

    >>> [x.tolist() for x in blocks_of(np.array([0, 3, 4, 9]), 4)]
    [[0, 1, 2], [0, 0, 1, 2]]
    """
    numbers, index = np.unique(positions // size, return_inverse=True)
    return PositionBlocks(numbers.astype(np.int32), index.reshape(-1).astype(np.int64))


@cached_bytes(2**24, lambda table: table.num_bytes)
def pool_table(layout: Layout, world_size: int, seq_len: int, size: int) -> RunTable:
    """Return the tokens of each rank, if all tokens of a pool are where the last one is.

    Tokens after the last whole pool are where the last of them is.

    Args:
        layout: shards the sequence.
        world_size: number of ranks.
        seq_len: number of tokens of the sequence.
        size: tokens of a pool.

    Raises:
        ValueError: if the layout cannot shard the length.

    >>> from dtensor_ring import Contiguous
    >>> pool_table(Contiguous(), 2, 14, 4)
    RunTable([[(0, 4)], [(4, 10)]])
    """
    shards = shard_table(layout, world_size, seq_len).shards
    spans = [[x for run in runs for x in _pools_of(run, seq_len, size)] for runs in shards]
    rows = [[(x.start, x.length) for x in joined(of_rank)] for of_rank in spans]
    return RunTable(rows, "pools")


@cached_bytes(2**24, lambda table: table.num_bytes)
def pool_numbers(layout: Layout, world_size: int, seq_len: int, size: int) -> RunTable:
    """Return the numbers of the pools of each rank, which are where their last token is.

    Raises:
        ValueError: if the layout cannot shard the length.

    >>> from dtensor_ring import Contiguous
    >>> pool_numbers(Contiguous(), 2, 14, 4)
    RunTable([[(0, 1)], [(1, 2)]])
    """
    numbers = pool_table(layout, world_size, seq_len, size).numbers // size
    return RunTable(numbers, "pools")


@cached_bytes(2**24, lambda table: table.num_bytes)
def shifted_pools(layout: Layout, world_size: int, seq_len: int, size: int) -> RunTable:
    """Return the numbers of the pools before those of each rank.

    The pool before the first one is the last, so that each pool is on one rank.

    Raises:
        ValueError: if the layout cannot shard the length.

    >>> from dtensor_ring import Contiguous
    >>> shifted_pools(Contiguous(), 2, 14, 4)
    RunTable([[(2, 1)], [(0, 2)]])
    """
    pools = pool_numbers(layout, world_size, seq_len, size)
    rows: list[list[tuple[int, int]]] = []
    for runs in pools.numbers.tolist():
        # Pool 0 has none before it. Its rank gets the last pool in place of that, so none is lost.
        first = [(0, length - 1) for start, length in runs if start == 0 and length]
        others = [(start - 1, length) for start, length in runs if start and length]
        rows.append([*first, *others, *[(pools.end - 1, 1)] * len(first)])
    joined_rows = [
        [
            (x.start, x.length)
            for x in joined([Run(start, number) for start, number in row if number])
        ]
        for row in rows
    ]
    return RunTable(joined_rows, "pools")


def _pools_of(run: Run, seq_len: int, size: int) -> list[Run]:
    """Return the tokens of the pools whose last token is in a run."""
    if run.stride > 1:
        # Strided tokens are no neighbours: each brings its pool only if it is the pool's last.
        firsts = lasts = run_positions([run])
    else:
        firsts, lasts = np.array([run.start]), np.array([run.last])
    # A pool may begin on an earlier rank: its tokens there come to where it ends.
    begins = firsts // size * size
    # The last pool of a sequence may be short, and ends with it.
    ends = np.where(lasts == seq_len - 1, seq_len, (lasts + 1) // size * size)
    has_any = ends > begins
    pairs = zip(begins[has_any].tolist(), (ends - begins)[has_any].tolist(), strict=True)
    return [Run(start, length) for start, length in pairs]


# A call that selects at least this part of the keys moves all of them: its requests save nothing.
NEARLY_ALL = 7 / 8


def key_route(route: str | None, num_selected: int, seq_len: int) -> str:
    """Return how keys travel: the given route, or the one that a bound chooses.

    A query with S keys in sight selects `num_selected` of them, so a rank needs at least as many.
    If that is nearly all of S, requests would save nothing, and all keys travel without them.

    Args:
        route: "selected", "all", or `None`.
        num_selected: the largest number of keys that a query selects.
        seq_len: number of keys of all ranks, S.

    >>> key_route(None, 2048, 65536), key_route(None, 2048, 2048)
    ('selected', 'all')
    """
    return route or (ALL if num_selected >= NEARLY_ALL * seq_len else SELECTED)


def request_bytes(num_keys: int) -> int:
    """Return the bytes of a request for some of a rank's keys: one bit for each of them.

    >>> request_bytes(1000)
    125
    """
    return -(-num_keys // 8)
