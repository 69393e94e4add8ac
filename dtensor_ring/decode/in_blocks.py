"""Decoding whose sums have a fixed order, see Note [Fixed order].

The queries are one block. A rank computes the pieces of the blocks of keys that it holds, and adds
up each node of the tree whose pieces are all there. These nodes go to all ranks, which add them
by the same tree. So which rank holds a block changes no bit.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dtensor_ring.compute.execute import Pair
from dtensor_ring.compute.kernels import Kernel, Scores
from dtensor_ring.compute.ordered import Mean, OrderedOutput
from dtensor_ring.compute.trace import Label
from dtensor_ring.decode.plan import DecodeRequest, decode_step
from dtensor_ring.decode.run import Combine
from dtensor_ring.planning.block_order import BlockOrder, BlockPair, Node, nodes_of
from dtensor_ring.planning.layout import Layout, Run
from dtensor_ring.planning.lru import cached_bytes
from dtensor_ring.planning.plan import Step
from dtensor_ring.planning.ranges import length, moved
from dtensor_ring.planning.run_table import RunTable, shard_table
from dtensor_ring.planning.tile import Tile


class DecodePieces(NamedTuple):
    """The pieces of a rank, and the nodes of outputs that each rank adds up.

    Attributes:
        order: the pieces of this rank, of one step and one block of queries, number 0.
        nodes: the nodes, by rank.
    """

    order: BlockOrder
    nodes: tuple[tuple[Node, ...], ...]


class _Held(NamedTuple):
    """What a rank holds of a block: start and length of runs, and the first of its columns."""

    runs: list[tuple[int, int]]
    col: int


@cached_bytes(2**22, lambda pieces: 2000 + 500 * len(pieces.order.keys_of[0]))
def decode_pieces(block: int, request: DecodeRequest) -> DecodePieces:
    """Return the pieces of a rank; a block has `block` positions.

    Raises:
        ValueError: if several ranks hold parts of a block, or documents or slices do not fit.
    """
    shards = _shards(request.layout, request.world_size, request.seq_len)
    held = [_blocks(shard, block) for shard in shards]
    _check_whole(held, block)
    alone = request._replace(rank=0, world_size=1)
    tiles = {
        number: decode_step(alone._replace(layout=RunTable([of_block.runs]))).tiles
        for of_rank in held
        for number, of_block in of_rank.items()
    }
    num_queries = request.num_queries
    leaves = tuple(sorted(number for number, found in tiles.items() if found))
    nodes = tuple(_nodes([x for x in leaves if x in own], leaves) for own in held)
    own = {number: x for number, x in held[request.rank].items() if tiles[number]}
    pieces = tuple(_piece(x, own[x].col, tiles[x], num_queries) for x in sorted(own))
    order = BlockOrder(
        rows={0: (0, num_queries)},
        cols={},
        keys_of={0: leaves},
        queries_of={},
        pieces=(pieces,),
        sizes=({},),
        departing=(),
        arriving=(),
        owners={},
    )
    return DecodePieces(order, nodes)


def decode_in_blocks(
    query: Tensor,
    kv: Pair,
    step: Step,
    pieces: DecodePieces,
    kernel: Kernel,
    scores: Scores,
    combine: Combine | None,
) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)` of the queries over the columns of all ranks, summed in a fixed order.

    Args:
        query: `(B, N, M, H)`, the same on every rank.
        kv: keys and values that this rank holds.
        step: this rank's step.
        pieces: its pieces.
        kernel: the block kernel.
        scores: how a query scores a key.
        combine: sends the nodes; `None` if this rank has all keys.
    """
    label = Label("decode", 0, step.source)
    running = OrderedOutput(query, kv[1].shape[3], scores.sinks, pieces.order)
    running.step(step, kv, kernel, scores, label, in_flight=False)
    if combine is not None:
        with label("merge"):
            _exchange(running, pieces.nodes, step.source, combine)
    return running.result()


def _exchange(
    running: OrderedOutput, nodes: tuple[tuple[Node, ...], ...], rank: int, combine: Combine
) -> None:
    """Send the nodes of this rank to all ranks, and add theirs."""
    # Messages of one size, so that a buffer has a row for each rank.
    most = max(map(len, nodes))
    if not most:  # no query sees a key
        return
    own, rows = running.nodes(0), running.message(most)
    for row, node in zip(rows, nodes[rank], strict=False):
        row[..., :-2], row[..., -2], row[..., -1] = own[node]
    for sender, received in enumerate(combine.gather(rows.flatten(1))):
        if sender != rank:
            for row, node in zip(received.view_as(rows), nodes[sender], strict=False):
                running.add(0, node, Mean(row[..., :-2], row[..., -2], row[..., -1]))


def _shards(layout: Layout, world_size: int, seq_len: int) -> list[tuple[Run, ...]]:
    """Return the runs of each rank."""
    if isinstance(layout, RunTable):  # a cache may have dropped positions
        return [tuple(layout.held(rank, world_size)) for rank in range(world_size)]
    return [*shard_table(layout, world_size, seq_len).shards]


def _blocks(shard: tuple[Run, ...], block: int) -> dict[int, _Held]:
    """Return what a rank holds of each block, by the number of the block."""
    found: dict[int, _Held] = {}
    col = 0
    for run in shard:
        # In a run with gaps no two positions are neighbours: each counts as a run.
        size = run.length if run.stride == 1 else 1
        for index in range(0, run.length, size):
            start = run.position(index)
            end = start + size
            while start < end:
                stop = min(end, (start // block + 1) * block)
                held = found.setdefault(start // block, _Held([], col))
                held.runs.append((start, stop - start))
                start, col = stop, col + stop - start
    return found


def _check_whole(held: list[dict[int, _Held]], block: int) -> None:
    """Refuse a block of which several ranks hold parts."""
    owners: dict[int, int] = {}
    for rank, of_rank in enumerate(held):
        for number in of_rank:
            first = owners.setdefault(number, rank)
            if first != rank:
                raise ValueError(
                    f"decoding in a fixed order needs each block of {block} positions whole on "
                    f"one rank, and ranks {first} and {rank} hold parts of the one at position "
                    f'{number * block}; shard the keys by the layout "whole_blocks:{block}", and '
                    f'keep them in a ShardedCache of layout="whole_blocks:{block}" and '
                    f"block={block}"
                )


def _nodes(own: list[int], leaves: tuple[int, ...]) -> tuple[Node, ...]:
    return tuple(nodes_of(own, leaves)) if own else ()


def _piece(number: int, col: int, tiles: tuple[Tile, ...], num_queries: int) -> BlockPair:
    """Return the piece of a block of keys whose columns begin at `col`."""
    placed = tuple(tile.on_cols(moved(tile.cols, col)) for tile in tiles)
    is_one = len(tiles) == 1 and tiles[0].batch is None
    has_all_rows = is_one and length(tiles[0].rows) == num_queries
    return BlockPair((0, number), placed, (), (has_all_rows, False))
