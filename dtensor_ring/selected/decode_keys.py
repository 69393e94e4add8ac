"""Top-k selection for a few replicated queries, over index keys that stay on their ranks.

Each rank takes the top k of its local keys. One message to each other rank carries their scores and
positions. All ranks merge the same lists in the same order, so they select the same keys. Then each
rank attends to the selected keys that it holds, and partial results merge by their lse.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dtensor_ring.compute.trace import Label
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.lru import cached_bytes
from dtensor_ring.planning.plan import Step
from dtensor_ring.selected.run import IndexQueries, KeyChoice, score_tile
from dtensor_ring.selected.top_keys import NO_KEY, BestKeys, best_keys
from dtensor_ring.transport.transport import P2P, Transport


@cached_bytes(2**26, lambda found: found.nbytes + 64)
def own_positions(layout: Layout, rank: int, world_size: int, seq_len: int) -> np.ndarray:
    """Return the positions of a rank's columns, ascending, int32."""
    runs = layout.runs(rank, world_size, seq_len)
    each = [run.start + run.stride * np.arange(run.length, dtype=np.int32) for run in runs]
    return np.concatenate([np.empty(0, np.int32), *each])


def columns_at(positions: Tensor, own: Tensor) -> Tensor:
    """Return the columns of positions that a rank has, int32, -1 for others.

    >>> columns_at(torch.tensor([3, 5, -1]), torch.tensor([1, 5, 7])).tolist()
    [-1, 1, -1]
    """
    if not len(own):
        return torch.full_like(positions, -1, dtype=torch.int32)
    columns = torch.searchsorted(own, positions, out_int32=True).clamp_(max=len(own) - 1)
    return columns.masked_fill(own[columns.long()] != positions, -1)


def decode_select(
    own: IndexQueries, key: Tensor, step: Step, choice: KeyChoice, at: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Return scores and positions of the best keys among a rank's columns, `(B, G, M, k)`.

    Args:
        own: the queries, the same on all ranks.
        key: this rank's index keys, `(B, 1, C, Di)`.
        step: what the queries see of them.
        choice: how queries choose.
        at: the positions of the columns, `(C,)`.
    """
    batch, heads, num_queries, _ = own.query.shape
    found = BestKeys((batch, heads if own.weights is None else 1, num_queries), choice.k, own.query)
    for tile in step.tiles:
        score_tile(found, own, key, tile, choice, at[slice(*tile.cols)])
    return found.lists


def merged_lists(
    scores: Tensor, positions: Tensor, rank: int, world_size: int, transport: Transport | None
) -> Tensor:
    """Return the positions of the best keys of all ranks, `(B, G, M, k)`, -1 for none.

    Args:
        scores: `(B, G, M, k)`, of this rank's best keys.
        positions: int32, likewise.
        rank: this rank.
        world_size: number of ranks.
        transport: what moves the messages; `None` if this rank has all keys.
    """
    if transport is None:
        return positions.masked_fill(positions == NO_KEY, -1)
    shape, k = scores.shape, scores.shape[-1]
    split = scores.nbytes, positions.nbytes
    mine = torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in (scores, positions)])
    everyone = _exchanged(mine, rank, world_size, transport)
    of_scores, of_positions = everyone.split(split, 1)
    scores, positions = (
        x.contiguous().view(dtype).view(world_size, *shape).movedim(0, -2).flatten(-2)
        for x, dtype in ((of_scores, scores.dtype), (of_positions, positions.dtype))
    )
    positions, order = positions.sort(-1)
    _, found = best_keys(scores.gather(-1, order), positions, k)
    return found.masked_fill(found == NO_KEY, -1)


def _exchanged(mine: Tensor, rank: int, world_size: int, transport: Transport) -> Tensor:
    """Return the message of each rank, `(W, bytes)`."""
    everyone = mine.new_empty(world_size, len(mine))
    everyone[rank] = mine
    label = Label("select", 0, rank)
    transport.prepare(mine.device)
    transport.at(label)
    others = [peer for peer in range(world_size) if peer != rank]
    receives = [P2P(everyone[peer], peer) for peer in others]
    works = transport.start(receives, [P2P(mine, peer) for peer in others])
    transport.at(label)
    for work in works:
        work.wait()
    return everyone
