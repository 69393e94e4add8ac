"""The fixed order of sums: a grid of blocks that depends on the sequence alone, and a tree over it.

A rank that has some pieces of a block of keys adds up what it can: each node whose pieces are all
there becomes one gradient. These nodes, and not their sum, go straight to the owner of the keys,
which adds them by the tree. Ranks with neighbouring blocks have few of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.layout import Layout, Run
from dtensor_ring.planning.ranges import Span, length, moved
from dtensor_ring.planning.run_table import ShardTable, shard_table
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.tile import QuerySlice, Tile, tiles_by_run

T = TypeVar("T")

# A node of the tree: its level, and its number there. It covers `1 << level` blocks.
Node = tuple[int, int]

# The most blocks into which a sequence is cut by itself, half of them the fewest, and the sizes
# of a block, in tokens: 16 ranks get blocks, and kernels get large products.
MOST_BLOCKS, SMALLEST, LARGEST = 32, 16, 4096


def block_of(seq_lens: Iterable[int]) -> int:
    """Return the tokens of a block for sequences of these lengths: a power of two.

    >>> block_of([16384]), block_of([100]), block_of([1 << 20])
    (1024, 16, 4096)
    """
    size = max(seq_lens) * 2 // MOST_BLOCKS
    return min(LARGEST, max(SMALLEST, 1 << max(0, size.bit_length() - 1)))


class Tree(Generic[T]):
    """Adds up the values of some leaves by the tree over all numbers, in whatever order they come.

    Values are joined once both children of their node are there, so as few are kept as can be.

    Args:
        leaves: the numbers of all leaves that will come, on any rank, ascending.
        join: returns the value of a node from those of its first and second child.

    >>> tree = Tree([0, 1, 3], lambda first, second: f"({first}+{second})")
    >>> for number in (3, 1, 0):
    ...     tree.add((0, number), str(number))
    >>> tree.kept
    {(2, 0): '((0+1)+3)'}
    """

    def __init__(self, leaves: Sequence[int], join: Callable[[T, T], T]) -> None:
        self._leaves, self._join = leaves, join
        self._top = leaves[-1].bit_length()
        self.kept: dict[Node, T] = {}

    def add(self, node: Node, value: T) -> None:
        """Add the value of a leaf, level 0, or of a node that another rank added up."""
        level, number = node
        # A node and its sibling, whose numbers differ in the last bit, make the node above them:
        # nodes 4 and 5 of a level make node 2 of the next one, whichever of them comes first.
        while level < self._top:
            sibling = level, number ^ 1
            # A node without leaves is nothing to add: what stands beside it rises alone.
            if self._has_leaves(sibling):
                if sibling not in self.kept:
                    # The sibling comes later, and finds this node in `kept`.
                    break
                other = self.kept.pop(sibling)
                # Odd numbers stand right: the sum must not depend on which came first.
                value = self._join(other, value) if number & 1 else self._join(value, other)
            level, number = level + 1, number >> 1
        self.kept[level, number] = value

    @property
    def result(self) -> T:
        """The value of all leaves, which must have come."""
        ((node, value),) = self.kept.items()
        assert node == (self._top, 0), f"{node} is not the root"
        return value

    def _has_leaves(self, node: Node) -> bool:
        level, number = node
        first = bisect_left(self._leaves, number << level)
        return first < len(self._leaves) and self._leaves[first] < (number + 1) << level


class BlockPair(NamedTuple):
    """What one block of queries sees of one block of keys.

    Attributes:
        blocks: number of the block of queries and of that of keys.
        tiles: its tiles, in a fixed order.
        cols: the columns of each tile within those of the block of keys that this rank sees.
        is_whole: whether the only tile covers all rows of its block, and all columns.
    """

    blocks: tuple[int, int]
    tiles: tuple[Tile, ...]
    cols: tuple[Span, ...]
    is_whole: tuple[bool, bool]


class Part(NamedTuple):
    """One node of the gradients of a block of keys, in a message.

    Attributes:
        block: number of the block of keys.
        node: the node.
        cols: the columns that the sender sees, counted in the shard of the owner.
        span: where they are in the message.
    """

    block: int
    node: Node
    cols: Cols
    span: Span


class Sent(NamedTuple):
    """The nodes in one message, and its columns: those of the shard, once for each node."""

    parts: tuple[Part, ...] = ()
    cols: Cols = Cols()


# Note [Fixed order]: the positions of a sequence are cut at the multiples of a block. What one
# block of queries sees of one block of keys is a piece: its tiles are those of the planner for
# these two blocks, so they depend on the mask and the positions only, and never join tiles of other
# blocks. A tree of two children a node stands over the numbers of the blocks. The output of a block
# of queries is the merge of its pieces by the tree over its blocks of keys, and so is the gradient
# of the queries. The gradient of a block of keys is the sum of its pieces by the tree over its
# blocks of queries. A node without pieces is left out, and the other child takes its place. So the
# number of ranks, the layout and the route change which rank computes a piece, and when; they
# change no sum.
@dataclass(frozen=True, slots=True, eq=False)
class BlockOrder:
    """The pieces of a rank, and the nodes of gradients that it sends and gets.

    Attributes:
        rows: the local queries of each of its blocks.
        cols: the local keys of each of its blocks.
        keys_of: the blocks of keys that each of its blocks of queries sees.
        queries_of: the blocks of queries that see a block of keys, for all that it computes on.
        pieces: those of each step.
        sizes: for each step, the columns of each block of keys that this rank sees.
        departing: the nodes that it sends after each step.
        arriving: the nodes that it gets after each step, for its own keys.
        owners: the blocks of queries of each rank of the ring, by rank.
    """

    rows: dict[int, Span]
    cols: dict[int, Span]
    keys_of: dict[int, tuple[int, ...]]
    queries_of: dict[int, tuple[int, ...]]
    pieces: tuple[tuple[BlockPair, ...], ...]
    sizes: tuple[dict[int, int], ...]
    departing: tuple[Sent, ...]
    arriving: tuple[Sent, ...]
    owners: dict[int, tuple[int, ...]]


def blocks_of(
    layout: Layout, rank: int, world_size: int, seq_len: int, block: int
) -> dict[int, Span]:
    """Return the local tokens of each block of a rank, by the number of the block.

    Raises:
        ValueError: if the layout cannot shard the length, or cuts a block.

    >>> from dtensor_ring import ZigZag
    >>> blocks_of(ZigZag(), 0, 2, 16, 2)
    {0: (0, 2), 1: (2, 4), 6: (4, 6), 7: (6, 8)}
    """
    runs = _cut(shard_table(layout, world_size, seq_len).shards[rank], block, seq_len)
    return _spans(runs, block)


# Six blocks of queries on two ranks, a and b. Rank a adds up the nodes (1, 0) and (0, 5), rank b
# (1, 1) and (0, 4); whoever owns the keys joins these four by the tree.
#     level 2       0         1
#     level 1     0   1       2
#     level 0    0 1 2 3     4 5
#     rank       a a b b     b a
def nodes_of(own: Iterable[int], leaves: Sequence[int]) -> list[Node]:
    """Return the nodes that a rank can add up from its own leaves of all, ascending.

    >>> nodes_of([0, 1, 2], [0, 1, 2, 3])
    [(0, 2), (1, 0)]
    """
    tree = Tree(leaves, lambda first, second: None)
    for leaf in own:
        tree.add((0, leaf), None)
    return sorted(tree.kept)


class Grid:
    """The blocks of queries and keys, which rank has them, and which see one another.

    Args:
        block: tokens of a block.
        queries: how the queries are sharded.
        keys: how the keys are sharded.
        slices: what queries see.

    Raises:
        ValueError: if a shard begins or ends within a block.
    """

    def __init__(self, block: int, queries: ShardTable, keys: ShardTable, slices: Slices) -> None:
        self.block = block
        self.query_runs, self.key_runs = (
            [_cut(shard, block, _end(table)) for shard in table.shards] for table in (queries, keys)
        )
        counts = [-(-_end(table) // block) for table in (queries, keys)]
        self._seen = _seen_blocks(slices, block, counts[0], counts[1])

    def rows(self, rank: int) -> dict[int, Span]:
        """Return the local queries of each block of a rank."""
        return _spans(self.query_runs[rank], self.block)

    def cols(self, rank: int) -> dict[int, Span]:
        """Return the local keys of each block of a rank."""
        return _spans(self.key_runs[rank], self.block)

    def keys_of(self, query_block: int) -> tuple[int, ...]:
        """Return the blocks of keys that a block of queries sees."""
        return tuple(np.flatnonzero(self._seen[query_block]).tolist())

    def queries_of(self, key_block: int) -> tuple[int, ...]:
        """Return the blocks of queries that see a block of keys."""
        return tuple(np.flatnonzero(self._seen[:, key_block]).tolist())

    def pieces(
        self,
        own: Iterable[tuple[int | None, list[QuerySlice]]],
        source: int,
        resident: Cols,
        seen: Cols,
    ) -> tuple[BlockPair, ...]:
        """Return the pieces of a step, in the order of blocks.

        Args:
            own: the queries of the rank by batch row, cut by blocks and slices.
            source: the rank whose keys they see.
            resident: columns of the source's shard that the rank has.
            seen: those that it sees.
        """
        shard, block = self.cols(source), self.block
        found = [
            ((query.start // block, key.start // block), tile)
            for batch, slices in own
            for query, key, tile in tiles_by_run(slices, self.key_runs[source], batch)
        ]
        found.sort(key=itemgetter(0))  # stable: the tiles of a piece stay in their order
        sizes = {run.start // block: run.length for runs in self.query_runs for run in runs}
        pieces = []
        for blocks, group in groupby(found, key=itemgetter(0)):
            tiles, span = [tile for _, tile in group], shard[blocks[1]]
            # Seen columns of a block are neighbours in their packet: this is the first of them.
            begin = seen.packed((_clipped(seen, span).spans[0][0],) * 2)[0]
            places = tuple(moved(seen.packed(tile.cols), -begin) for tile in tiles)
            is_one = len(tiles) == 1 and tiles[0].batch is None
            whole = sizes[blocks[0]], length(span)
            covered = length(tiles[0].rows), length(tiles[0].cols)
            is_whole = is_one and covered[0] == whole[0], is_one and covered[1] == whole[1]
            packed = tuple(tile.on_cols(resident.packed(tile.cols)) for tile in tiles)
            pieces.append(BlockPair(blocks, packed, places, is_whole))
        return tuple(pieces)

    def order(
        self,
        rank: int,
        pieces: Sequence[tuple[BlockPair, ...]],
        sizes: Sequence[dict[int, int]],
        departing: Sequence[Sent],
        arriving: Sequence[Sent],
    ) -> BlockOrder:
        """Return the order of a rank from what it has for each step, see `BlockOrder`."""
        rows, cols = self.rows(rank), self.cols(rank)
        # Keys of other ranks, too: this rank adds up their gradients before it sends them.
        touched = {*cols, *(x.blocks[1] for of_step in pieces for x in of_step)}
        return BlockOrder(
            rows,
            cols,
            keys_of={x: self.keys_of(x) for x in rows},
            queries_of={x: self.queries_of(x) for x in touched},
            pieces=tuple(pieces),
            sizes=tuple(sizes),
            departing=tuple(departing),
            arriving=tuple(arriving),
            owners={x: tuple(self.rows(x)) for x in range(len(self.query_runs))},
        )

    def sizes(self, source: int, seen: Cols) -> dict[int, int]:
        """Return how many columns of each block of a source are seen, without blocks of none."""
        counts = ((number, len(_clipped(seen, span))) for number, span in self.cols(source).items())
        return {number: count for number, count in counts if count}

    def sent(self, sender: int, owner: int, seen: Cols) -> Sent:
        """Return the nodes that a rank sends to the owner of the keys that it sees."""
        of_sender = set(self.rows(sender))
        entries = []
        for number, span in self.cols(owner).items():
            cols, leaves = _clipped(seen, span), self.queries_of(number)
            own = [x for x in leaves if x in of_sender]
            if not cols or not own:
                continue
            nodes = enumerate(nodes_of(own, leaves))
            entries += [(n, number, node, cols) for n, node in nodes]
        # The n-th nodes of all blocks are like one more shard of keys, so that any message fits.
        entries.sort(key=lambda entry: (entry[0], entry[3].spans[0][0]))
        parts, columns, end, num_keys = [], [], 0, sum(map(length, self.cols(owner).values()))
        for n, number, node, cols in entries:
            parts.append(Part(number, node, cols, (end, end + len(cols))))
            end += len(cols)
            columns += [moved(span, n * num_keys) for span in cols.spans]
        return Sent(tuple(parts), Cols.union(columns))


def _spans(runs: Sequence[Run], block: int) -> dict[int, Span]:
    spans, end = {}, 0
    for run in runs:
        spans[run.start // block] = end, end + run.length
        end += run.length
    return spans


def _clipped(cols: Cols, span: Span) -> Cols:
    """Return the columns that lie within a span."""
    clipped = ((max(a, span[0]), min(b, span[1])) for a, b in cols.spans)
    return Cols(tuple((a, b) for a, b in clipped if a < b))


def _end(table: ShardTable) -> int:
    """Return the length of the sequence."""
    return int(table.lengths.sum())


def _cut(shard: Sequence[Run], block: int, seq_len: int) -> tuple[Run, ...]:
    """Cut the runs of a shard at the multiples of a block."""
    blocks = []
    for run in shard:
        if not _is_aligned(run, block, seq_len):
            raise ValueError(
                f'order="fixed" needs shards of whole blocks of {block} tokens, got {run}; call '
                "ring_attention or the attention of the axis, which exchange such shards first"
            )
        ends = range(run.start, run.start + run.length, block)
        blocks += [Run(start, min(block, run.start + run.length - start)) for start in ends]
    return tuple(blocks)


def _is_aligned(run: Run, block: int, seq_len: int) -> bool:
    end = run.last + 1
    return run.stride == 1 and run.start % block == 0 and (end % block == 0 or end == seq_len)


def has_whole_blocks(layout: Layout, world_size: int, seq_len: int, block: int) -> bool:
    """Return whether each block of a sequence lies on one rank of a layout.

    >>> from dtensor_ring import Contiguous
    >>> [has_whole_blocks(Contiguous(), 2, 12, block) for block in (2, 4)]
    [True, False]

    Raises:
        ValueError: if the layout cannot shard the length.
    """
    shards = shard_table(layout, world_size, seq_len).shards
    return all(_is_aligned(run, block, seq_len) for shard in shards for run in shard)


def _seen_blocks(slices: Slices, block: int, num_queries: int, num_keys: int) -> np.ndarray:
    """Return which blocks of queries see which blocks of keys in any batch row, `(Q, K)`, bool."""
    seen = np.zeros((num_queries, num_keys), dtype=bool)
    for q_begin, q_end, k_begin, k_end, left, right in np.concatenate(slices.tables).tolist():
        first, last = q_begin // block, -(-q_end // block)
        key_first, key_last = k_begin // block, -(-k_end // block)
        starts = np.arange(first, last)[:, None] * block
        key_starts = np.arange(key_first, key_last)[None] * block
        begins, ends = np.maximum(starts, q_begin), np.minimum(starts + block, q_end)
        key_begins, key_ends = (
            np.maximum(key_starts, k_begin),
            np.minimum(key_starts + block, k_end),
        )
        # The lags of a rectangle are all those between the ones of two of its corners.
        visible = (begins - (key_ends - 1) <= left) & (ends - 1 - key_begins >= -right)
        seen[first:last, key_first:key_last] |= visible
    return seen
