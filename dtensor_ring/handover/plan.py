"""Plans which columns of a cache go from which rank to which, when it is transferred.

One group has the ranks of both sides: those that hold the cache, and those that will hold it. They
may be the same ranks, others, or some of both. Ranks are counted in that group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dtensor_ring.all_to_all.plan import head_shard_of
from dtensor_ring.paged.blocks import PooledSequence
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.layout import Serpentine
from dtensor_ring.planning.ranges import Span


class MovedTokens(NamedTuple):
    """Tokens of a sequence of one pool that go to a sequence of another pool.

    Attributes:
        source, target: the sequences.
        begin, end: the range of positions; `begin` is the first of a block.
    """

    source: PooledSequence
    target: PooledSequence
    begin: int
    end: int


class Side(NamedTuple):
    """The ranks that hold a cache.

    Attributes:
        runs: start and length of the runs of positions of each shard, `(W, R, 2)`; runs of a shard
            ascend, and runs of length 0 pad them.
        ranks: for each shard of columns the ranks that hold it, one for each shard of its heads.
    """

    runs: np.ndarray
    ranks: tuple[tuple[int, ...], ...]


class ShardMove(NamedTuple):
    """Columns that go from one rank to one rank, which may be the same.

    Attributes:
        source, target: the ranks.
        cols: columns of the source, columns of the target, and how many neighbours of each, `(K,
            3)`. Both ascend.
        heads: which shard of the heads goes, and how many shards there are.
    """

    source: int
    target: int
    cols: np.ndarray
    heads: tuple[int, int] = (0, 1)

    def of(self, rank: int) -> bool:
        """Return whether a rank has a part in it."""
        return rank in (self.source, self.target)

    def span_of(self, num_heads: int) -> Span:
        """Return the heads that go, of `num_heads`; fewer heads than shards are copied."""
        index, count = self.heads
        return head_span(index, count, num_heads)

    def source_cols(self) -> Cols:
        """Return the columns at the source."""
        return _cols(self.cols[:, 0], self.cols[:, 2])

    def target_cols(self) -> Cols:
        """Return the columns at the target, in the same order."""
        return _cols(self.cols[:, 1], self.cols[:, 2])


def head_span(index: int, count: int, num_heads: int) -> Span:
    """Return the heads of one of `count` ranks; fewer heads than ranks are copied to several.

    >>> [head_span(i, 2, 8) for i in range(2)], [head_span(i, 4, 2) for i in range(4)]
    ([(0, 4), (4, 8)], [(0, 1), (0, 1), (1, 2), (1, 2)])
    """
    return head_shard_of(index, count, num_heads).span(num_heads, num_heads)


def column_moves(source: Side, target: Side) -> tuple[ShardMove, ...]:
    """Return all moves that turn one side into the other; each column moves once.

    The k-th column of a move leaves the source for the k-th column of the target. The time grows
    with the number of runs of both sides.

    Raises:
        ValueError: if the sides do not hold the same positions.

    >>> zigzag = np.array([[[0, 2], [6, 2]], [[2, 4], [0, 0]]])  # 8 tokens over two ranks
    >>> moves = column_moves(Side(zigzag, ((0,), (1,))), Side(np.array([[[0, 8]]]), ((1,),)))
    >>> [(x.source, x.target, x.cols.tolist()) for x in moves]
    [(0, 1, [[0, 0, 2], [2, 6, 2]]), (1, 1, [[0, 2, 4]])]
    """
    before, after = _held(source.runs), _held(target.runs)
    if _covered(before) != _covered(after):
        raise ValueError(
            f"a cache changes hands whole: one side holds positions {_covered(before)} and the "
            f"other one {_covered(after)}"
        )
    # Cells: positions that are neighbours, on one rank, in each of the two sides.
    # Eight positions in zigzag over two ranks go to one rank: three cells, of 2, 4 and 2.
    #     source   0 0 1 1 1 1 0 0
    #     target   0 0 0 0 0 0 0 0
    #     cells    a a b b b b c c
    bounds = np.union1d(before.starts, after.starts)
    # The run of each side that a cell is in is the last one that begins no later.
    here, there = (np.searchsorted(x.starts, bounds, "right") - 1 for x in (before, after))
    sides = (before, here), (after, there)
    end_here, end_there = (side.starts[i] + side.lengths[i] for side, i in sides)
    ends = np.minimum(end_here, end_there)
    cols = [side.cols[i] + bounds - side.starts[i] for side, i in sides]
    cells = np.stack([*cols, ends - bounds], 1)
    shards = np.stack([before.shards[here], after.shards[there]], 1)
    moves = []
    for one, other in np.unique(shards, axis=0).tolist():
        joined = _joined(cells[(shards == (one, other)).all(1)])
        targets = target.ranks[other]
        # Ranks of the source have all heads, so a shard of columns is on one of them.
        (origin,) = source.ranks[one]
        moves += [
            ShardMove(origin, rank, joined, (index, len(targets)))
            for index, rank in enumerate(targets)
        ]
    return tuple(moves)


class _SideRuns(NamedTuple):
    """The runs of a side in the order of positions; `cols` is the first column of each."""

    starts: np.ndarray
    lengths: np.ndarray
    cols: np.ndarray
    shards: np.ndarray


def _held(runs: np.ndarray) -> _SideRuns:
    starts, lengths = runs.astype(np.int64).transpose(2, 0, 1)
    cols = np.cumsum(lengths, 1) - lengths
    shards = np.broadcast_to(np.arange(len(runs))[:, None], lengths.shape)
    there = lengths > 0
    order = np.argsort(starts[there])
    return _SideRuns._make(x[there][order] for x in (starts, lengths, cols, shards))


def _covered(held: _SideRuns) -> list[list[int]]:
    """Return begin and end of the positions that a side holds, without gaps."""
    ends = held.starts + held.lengths
    (gaps,) = np.nonzero(held.starts[1:] != ends[:-1])
    begins, stops = np.insert(gaps + 1, 0, 0), np.append(gaps, len(ends) - 1)
    return np.stack([held.starts[begins], ends[stops]], 1).tolist() if len(ends) else []


def _joined(cells: np.ndarray) -> np.ndarray:
    """Join cells that follow each other on both sides."""
    follows = (cells[1:, :2] == cells[:-1, :2] + cells[:-1, 2:]).all(1)
    firsts = np.flatnonzero(np.append(True, ~follows))
    joined = cells[firsts]
    joined[:, 2] = np.add.reduceat(cells[:, 2], firsts)
    return joined


def _cols(begins: np.ndarray, lengths: np.ndarray) -> Cols:
    return Cols.union(zip(begins.tolist(), (begins + lengths).tolist(), strict=True))


def closed_and_open(
    move: ShardMove, block: int, num_cols: tuple[int, int]
) -> tuple[ShardMove, ShardMove]:
    """Split a move of columns whose full blocks have scales of their own.

    Args:
        move: a move.
        block: columns of a block; the columns of a rank fill blocks, from the first one on.
        num_cols: the number of columns of the source, and of the target.

    Returns:
        The full blocks, counted in blocks; and the columns after the full blocks of a rank, counted
        from the first of these.

    Raises:
        ValueError: if a full block would be cut, or come to lie beside another place of its block.

    >>> move = ShardMove(0, 1, np.array([[0, 64, 70]]))
    >>> [x.cols.tolist() for x in closed_and_open(move, 64, (70, 134))]
    [[[0, 1, 1]], [[0, 0, 6]]]
    """
    here, there, lengths = move.cols.T
    cols, ends = move.cols[:, :2], move.cols[:, :2] + lengths[:, None]
    # Columns before the end of the last full block have scales; those after it are not rounded.
    full = np.array(num_cols) // block * block
    closed = np.maximum(0, np.minimum(ends, full) - cols)
    # A cut is harmless at the bound of a block, and among columns that have no scale.
    begins_whole = (cols % block == 0) | (cols >= full)
    ends_whole = (ends % block == 0) | (ends > full)
    # A column that has a scale on one side must have one on the other.
    same = closed[:, 0] == closed[:, 1]
    if not (begins_whole.all() and ends_whole.all() and same.all()):
        raise ValueError(
            f"eight bits have scales for blocks of {block} columns of a rank, and this hand-over "
            "would cut some: give both caches a layout of such blocks, as "
            f'layout="whole_blocks:{block}", and hand over before single tokens follow'
        )
    num_closed = closed[:, 0]
    blocks = np.stack([here // block, there // block, num_closed // block], 1)
    rest = np.stack([*(cols + closed - full).T, lengths - num_closed], 1)
    return tuple(move._replace(cols=x[x[:, 2] > 0]) for x in (blocks, rest))  # type: ignore[return-value]


class BlockMove(NamedTuple):
    """Blocks that go from one rank to one rank, which may be the same.

    Attributes:
        source, target: the ranks.
        blocks: index at the source, index at the target, and number of tokens of each block, from
            its first one on, `(K, 3)`.
    """

    source: int
    target: int
    blocks: np.ndarray


def block_moves(
    moved: Sequence[MovedTokens],
    dealings: tuple[Serpentine, Serpentine],
    ranks: tuple[Sequence[int], Sequence[int]],
) -> tuple[BlockMove, ...]:
    """Return all moves of blocks from one pool to another; each block moves once.

    Args:
        moved: what moves.
        dealings: how each pool shards blocks over its ranks. Both have blocks of the same size.
        ranks: the ranks of each pool.

    Raises:
        ValueError: if the pools have blocks of different sizes.
    """
    source, target = dealings
    if source.block != target.block:
        raise ValueError(
            "blocks move whole between pools, so both need blocks of the same size, got "
            f"{source.block} and {target.block} tokens"
        )
    # One entry for a pair of ranks, whose blocks travel together.
    by_pair: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for tokens in moved:
        for number, num_tokens in _blocks_of(tokens, source.block):
            one, other = source.owner(number), target.owner(number)
            # A rank has one block of each round of W blocks: its k-th is in round k.
            here = tokens.source.blocks[one][number // source.world_size]
            there = tokens.target.blocks[other][number // target.world_size]
            pair = ranks[0][one], ranks[1][other]
            by_pair.setdefault(pair, []).append((here, there, num_tokens))
    # Sorted, since ranks compare their moves, and post them in this order.
    return tuple(
        BlockMove(one, other, np.array(by_pair[one, other])) for one, other in sorted(by_pair)
    )


def _blocks_of(tokens: MovedTokens, block: int) -> Iterator[tuple[int, int]]:
    """Yield number and tokens of each block."""
    for number in range(tokens.begin // block, -(-tokens.end // block)):
        yield number, min(block, tokens.end - number * block)
