"""The best keys of each query, as tiles arrive: scores of an indexer, and a running top-k.

A list of best keys is kept in the order of positions. Two lists merge exactly: the best k of both
are the best k of all keys, and of equal scores the lower position wins. So the result depends
neither on the number of ranks, nor on the order in which keys arrive.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The position of no key. It is larger than any, so that a sort moves it to the end.
NO_KEY = 2**31 - 1


def index_scores(query: Tensor, key: Tensor, weights: Tensor | None, scale: float) -> Tensor:
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
        there = batches, slice(None), rows
        both = (self._scores[there], self._positions[there]), best_keys(scores, positions, self._k)
        found, at = (torch.cat(sides, -1) for sides in zip(*both, strict=True))
        at, order = at.sort(-1)
        found = _joined(found.gather(-1, order), at)
        self._scores[there], self._positions[there] = best_keys(found, at, self._k)

    @property
    def lists(self) -> tuple[Tensor, Tensor]:
        """Scores and positions, `(B, G, L, k)`, in the order of the positions; `NO_KEY` is none."""
        return self._scores, self._positions

    def result(self) -> Tensor:
        """Return the positions, `(B, G, L, k)`, int32: ascending, then -1 for none."""
        return self._positions.masked_fill(self._positions == NO_KEY, -1)


def _joined(scores: Tensor, numbers: Tensor) -> Tensor:
    """Give a number that stands twice its better score in the first place, and -inf in the second.

    A block has keys on several ranks, or in several tiles. No number stands more than twice.
    """
    is_same = (numbers[..., 1:] == numbers[..., :-1]) & (numbers[..., 1:] != NO_KEY)
    first, second = scores[..., :-1], scores[..., 1:]
    joined = scores.clone()
    joined[..., :-1] = torch.where(is_same, torch.maximum(first, second), first)
    joined[..., 1:].masked_fill_(is_same, -torch.inf)
    return joined
