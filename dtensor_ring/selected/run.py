"""The loop of a selection: index keys travel, and each rank keeps the best keys of its queries.

Index keys go the way of the keys of any attention: a plan says which columns travel at which hop,
and which tiles a rank scores.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dtensor_ring.compute.kernels.emulated import hidden, row_blocks
from dtensor_ring.compute.memory import part_of, region
from dtensor_ring.compute.trace import Label
from dtensor_ring.planning.layout import Run
from dtensor_ring.planning.plan import Plan, own_slices
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.tile import Tile
from dtensor_ring.selected.plan import KeyPositions, blocks_of, columns_in
from dtensor_ring.transport.rotation import ShardRotation
from dtensor_ring.transport.transport import Transport

# The position of no key. It is larger than any, so that a sort moves it to the end.
NO_KEY = 2**31 - 1


def _index_scores(query: Tensor, key: Tensor, weights: Tensor | None, scale: float) -> Tensor:
    """Return the scores of a tile, `(B, G, R, C)`, in float32 or wider.

    With weights they are `sum_h weights[h] * relu(scale * query[h] . key)`, for all heads together
    (DeepSeek-AI, 2025, "DeepSeek-V3.2", equation 1), and G is 1. Without, they are the products of
    each head, and G is Hi.

    Args:
        query: `(B, Hi, R, Di)`.
        key: `(B, 1, C, Di)`.
        weights: `(B, Hi, R)`, or `None`.
        scale: factor of the products.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    by_row = query.transpose(1, 2).to(wide)  # (B, R, Hi, Di)
    # Keys have one head, so all heads of all queries are the rows of one product.
    products = by_row.flatten(1, 2) @ key[:, 0].to(wide).mT
    products = products.unflatten(1, by_row.shape[1:3])
    if scale != 1.0:
        products.mul_(scale)
    if weights is None:
        return products.transpose(1, 2)
    heads = weights.transpose(1, 2).to(wide).unsqueeze(2)  # (B, R, 1, Hi)
    return (heads @ products.relu_()).transpose(1, 2)


def best_keys(scores: Tensor, positions: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return scores and positions of the best k of n keys, in the order of the keys.

    Keys with a score of -inf are left out. Where fewer are left, -inf and `NO_KEY` stand for none.

    Args:
        scores: `(..., n)`.
        positions: int32, `(n,)` or `(..., n)`, ascending.
        k: the number of keys.

    Returns:
        Both `(..., min(n, k))`. If n exceeds k, what stands for none comes last.

    >>> best_keys(torch.tensor([2.0, 1.0, 2.0, 2.0]), torch.tensor([0, 3, 5, 8]).int(), 2)
    (tensor([2., 2.]), tensor([0, 5], dtype=torch.int32))
    """
    positions = positions.expand_as(scores)
    is_seen = scores > -torch.inf
    if scores.shape[-1] <= k:
        return scores, positions.masked_fill(~is_seen, NO_KEY)
    # `topk` may take any of equal scores, so it gives only the score of the last key that is in.
    last = scores.topk(k, dim=-1).values[..., -1:]
    is_in, is_last = (scores > last) & is_seen, (scores == last) & is_seen
    room = k - is_in.sum(-1, keepdim=True)
    is_in |= is_last & (is_last.cumsum(-1) <= room)
    return _packed(scores, is_in, k, -torch.inf), _packed(positions, is_in, k, NO_KEY)


def _packed(x: Tensor, is_in: Tensor, k: int, none: float) -> Tensor:
    """Return the entries that are in side by side, `(..., k)`; there are at most k."""
    # What is not in goes to a column beyond the last, which is dropped.
    slots = is_in.cumsum(-1).sub_(1).masked_fill_(~is_in, k)
    found = x.new_full((*x.shape[:-1], k + 1), none)
    return found.scatter_(-1, slots, x)[..., :k]


# Note [Lists merge exactly]: a list of best keys is kept in the order of positions. Two lists merge
# exactly: the best k of both are the best k of all keys, and of equal scores the lower position
# wins. So the result depends neither on the number of ranks, nor on the order in which keys arrive.
class BestKeys:
    """The best k keys, or blocks of keys, that each local query has seen so far.

    Args:
        shape: `(B, G, L)`: batch, groups of heads, local queries.
        k: number of keys of a query.
        like: a tensor with the dtype of the scores, and their device.
    """

    def __init__(self, shape: tuple[int, int, int], k: int, like: Tensor) -> None:
        wide = torch.promote_types(like.dtype, torch.float32)
        self._k = k
        self._scores = like.new_full((*shape, k), -torch.inf, dtype=wide)
        self._positions = like.new_full((*shape, k), NO_KEY, dtype=torch.int32)

    def add(self, batches: slice, rows: slice, scores: Tensor, positions: Tensor) -> None:
        """Add keys, none of which these rows have seen; a block may be one that they have.

        Args:
            batches: batch rows.
            rows: local queries.
            scores: `(B', G, R, C)`, -inf where a query does not see a key.
            positions: ascending, int32, `(C,)`: positions, or numbers of blocks.
        """
        # With k = 2, a row has the keys 3 and 8 so far, and meets 1 and 5:
        #     position   1    3    5    8
        #     score     0.7  0.5  0.9  0.9
        #     kept                 x    x
        there = batches, slice(None), rows
        # Of these keys only their own k best can be among the best of all.
        scores, positions = best_keys(scores, positions, self._k)
        found = torch.cat((self._scores[there], scores), -1)
        at = torch.cat((self._positions[there], positions), -1)
        # Keys arrive by source rank, not by position; see Note [Lists merge exactly].
        at, order = at.sort(-1)
        found = _joined(found.gather(-1, order), at)
        self._scores[there], self._positions[there] = best_keys(found, at, self._k)

    @property
    def lists(self) -> tuple[Tensor, Tensor]:
        """Scores and positions, `(B, G, L, k)`, sorted by position; `NO_KEY` marks none."""
        return self._scores, self._positions

    def result(self) -> Tensor:
        """Return the positions, `(B, G, L, k)`, int32: ascending, then -1 for none."""
        return self._positions.masked_fill(self._positions == NO_KEY, -1)


def _joined(scores: Tensor, numbers: Tensor) -> Tensor:
    """Give a number that stands twice its better score where it is first, and -inf after that."""
    # A block has keys on several ranks, or in several tiles. No number stands more than twice.
    is_same = (numbers[..., 1:] == numbers[..., :-1]) & (numbers[..., 1:] != NO_KEY)
    first, second = scores[..., :-1], scores[..., 1:]
    joined = scores.clone()
    joined[..., :-1] = torch.where(is_same, torch.maximum(first, second), first)
    joined[..., 1:].masked_fill_(is_same, -torch.inf)
    return joined


# Products of a chunk of queries with the keys of a hop, on CPUs and on GPUs.
SCORES, SCORES_ON_GPUS = 1 << 22, 1 << 27


class KeyChoice(NamedTuple):
    """How queries choose keys.

    Attributes:
        k: number of keys, or of blocks, of a query.
        scale: factor of the products.
        block_size: positions of a block that is chosen as a whole; 1 chooses keys.
        local_blocks: number of last blocks of a query that are always chosen.
        pool_size: tokens of a key: key n is a pool of those from position `n * pool_size` on.
    """

    k: int
    scale: float = 1.0
    block_size: int = 1
    local_blocks: int = 0
    pool_size: int = 1


class IndexQueries(NamedTuple):
    """The local queries of an indexer.

    Attributes:
        query: `(B, Hi, L, Di)`.
        weights: `(B, Hi, L)`, or `None`.
        positions: int32 `(L,)`.
        host: the same on the CPU, to skip pools that end after them; `None` to skip none.
    """

    query: Tensor
    weights: Tensor | None
    positions: Tensor
    host: np.ndarray | None = None


def ring_select(
    own: IndexQueries,
    key: Tensor,
    plan: Plan,
    choice: KeyChoice,
    positions: KeyPositions,
    transport: Transport,
) -> Tensor:
    """Return the positions of the best keys or the numbers of the best blocks, `(B, G, L, k)`.

    Args:
        own: the local queries.
        key: the local index keys, `(B, 1, C, Di)`.
        plan: this rank's plan.
        choice: how queries choose.
        positions: the positions of all keys.
        transport: what moves the messages.
    """
    batch, heads, num_queries, _ = own.query.shape
    best = BestKeys((batch, heads if own.weights is None else 1, num_queries), choice.k, own.query)
    # Index keys have no values: a packet holds keys of this width, and nothing beside them.
    with ShardRotation(transport, plan, (key, key[..., :0])) as shards:
        for step in plan.steps:
            label = Label("select", step.number, step.source)
            keys, _ = shards.begin_step(step, label)
            at = columns_in(positions.of(step.source), step.cols)
            with label("tile"):
                for tile in step.tiles:
                    score_tile(best, own, keys, tile, choice, at[tile.cols[0] : tile.cols[1]])
            shards.end_step(step, label)
    return best.result()


def score_tile(
    found: BestKeys, own: IndexQueries, key: Tensor, tile: Tile, choice: KeyChoice, at: np.ndarray
) -> None:
    """Add the keys of a tile, by chunks of its rows; `at` are their positions, `(C,)`."""
    keys = part_of(key, region(tile.batch, tile.cols))
    rows = region(tile.batch, tile.rows)
    query, weights = part_of(own.query, rows), own.weights
    weights = None if weights is None else part_of(weights, rows)
    num_rows, num_cols = query.shape[2], keys.shape[2]
    size = rows_at_once(query, num_cols)
    for block, seen in row_blocks(num_rows, num_cols, tile.mask, size):
        there = slice(tile.rows[0] + block.start, tile.rows[0] + block.stop)
        if choice.pool_size > 1 and own.host is not None:
            # The mask shows all pools: those that end after the last of these rows are skipped.
            ended = (int(own.host[there].max()) + 1) // choice.pool_size
            seen = slice(seen.start, seen.start + int(np.searchsorted(at[seen], ended)))
            if seen.start == seen.stop:
                continue
        some = None if weights is None else weights[:, :, block]
        scores = _index_scores(query[:, :, block], keys[:, :, seen], some, choice.scale)
        outside = hidden((block, seen), tile.mask, scores.device)
        if outside is not None:
            scores = scores.masked_fill(outside, -torch.inf)
        numbers = torch.from_numpy(at[seen]).to(scores.device)
        # After the mask: a block counts by the best of its keys that the query sees.
        if choice.block_size > 1:
            scores, numbers = _by_block(scores, at[seen], own.positions[there], choice)
        if choice.pool_size > 1:
            pools_seen = _pools_before(own.positions[there], choice.pool_size)
            scores = scores.masked_fill(numbers >= pools_seen.unsqueeze(-1), -torch.inf)
        found.add(rows[0], there, scores, numbers)


def _pools_before(positions: Tensor, size: int) -> Tensor:
    """Return how many pools end at or before each position, int32."""
    return (positions + 1) // size


def rows_at_once(query: Tensor, num_cols: int) -> int:
    """Return how many of the queries `(B, Hi, R, Di)` to score at once with `num_cols` keys."""
    batch, heads, _, _ = query.shape
    most = SCORES if query.is_cpu else SCORES_ON_GPUS
    return max(1, most // max(1, batch * heads * num_cols))


def _by_block(
    scores: Tensor, at: np.ndarray, of_rows: Tensor, choice: KeyChoice
) -> tuple[Tensor, Tensor]:
    """Return the score of each block, that of its best key, and the numbers of the blocks.

    Args:
        scores: `(B, G, R, C)`.
        at: the positions of the keys, `(C,)`.
        of_rows: the positions of the queries, `(R,)`.
        choice: how queries choose.
    """
    size, device = choice.block_size, scores.device
    numbers, index = (torch.from_numpy(x).to(device) for x in blocks_of(at, size))
    by_block = scores.new_full((*scores.shape[:-1], len(numbers)), -torch.inf)
    by_block.scatter_reduce_(-1, index.expand_as(scores), scores, "amax")
    # How many blocks a block is before that of the query; blocks that are not seen stay so.
    back = (of_rows // size).unsqueeze(-1) - numbers
    is_local = (back >= 0) & (back < choice.local_blocks) & (by_block > -torch.inf)
    # Infinite, so that local blocks come before all others and still count among the k.
    return by_block.masked_fill_(is_local, torch.inf), numbers


def tokens_of_pools(pools: Tensor, size: int, of_rows: Tensor) -> Tensor:
    """Return the positions in pools, and of the tokens from the last pool that ended to the query.

    Args:
        pools: numbers of pools that queries see, `(B, G, L, k)`, -1 for none.
        size: tokens of a pool.
        of_rows: the positions of the queries, int32 `(L,)`.

    Returns:
        `(B, G, L, k * size + size - 1)`, int32, ascending, then -1.

    >>> tokens_of_pools(torch.tensor([[[[0], [-1]]]]).int(), 2, torch.tensor([2, 0]).int()).tolist()
    [[[[0, 1, 2], [0, -1, -1]]]]
    """
    inside = torch.arange(size, dtype=torch.int32, device=pools.device)
    at = (pools.unsqueeze(-1) * size + inside).masked_fill(pools.unsqueeze(-1) < 0, NO_KEY)
    # After the last pool that ended there are fewer than `size` tokens, or it would be another.
    after = (_pools_before(of_rows, size) * size).unsqueeze(-1) + inside[:-1]
    after = after.masked_fill(after > of_rows.unsqueeze(-1), NO_KEY)
    at = torch.cat([at.flatten(-2), after.expand((*pools.shape[:2], -1, -1))], -1)
    at = at.sort(-1).values
    return at.masked_fill_(at == NO_KEY, -1)


def tokens_of_blocks(
    blocks: Tensor, size: int, of_rows: Tensor, runs: tuple[Run, ...], slices: Slices
) -> Tensor:
    """Return the positions in blocks that each query sees, `(B, G, L, k * size)`, int32.

    Args:
        blocks: numbers of blocks, `(B, G, L, k)`, -1 for none.
        size: positions of a block.
        of_rows: the positions of the queries, `(L,)`.
        runs: the same as runs.
        slices: what queries see.
    """
    inside = torch.arange(size, dtype=torch.int32, device=blocks.device)
    at = (blocks.unsqueeze(-1) * size + inside).flatten(-2)
    is_seen = torch.zeros_like(at, dtype=torch.bool)
    for batch, pieces in own_slices(runs, slices):
        for piece in pieces:
            first, end = piece.row + piece.span[0], piece.row + piece.span[1]
            there = region(batch, (first, end))
            keys, lags = at[there], of_rows[first:end].unsqueeze(-1) - at[there]
            seen = (keys >= piece.keys[0]) & (keys < piece.keys[1])
            if piece.left is not None:
                seen &= lags <= piece.left
            if piece.right is not None:
                seen &= -lags <= piece.right
            # A block is chosen whole, yet a query sees only those of its tokens that are in its
            # slices.
            is_seen[there] |= seen
    is_seen &= (blocks >= 0).repeat_interleave(size, -1)
    # What is not seen becomes the greatest number, so that sorting puts it last.
    at = at.masked_fill_(~is_seen, NO_KEY).sort(-1).values
    return at.masked_fill_(at == NO_KEY, -1)
