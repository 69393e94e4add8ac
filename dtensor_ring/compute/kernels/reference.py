"""The kernel that defines the semantics, for any device, any floating dtype and every option."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from dtensor_ring.compute.dropout import Dropout
from dtensor_ring.compute.kernels.emulated import Block, hidden, row_blocks, unfold_heads
from dtensor_ring.compute.kernels.kernel import (
    Gradients,
    Kernel,
    Launch,
    Problem,
    Result,
    Saved,
    Scores,
)
from dtensor_ring.compute.lags import Lags
from dtensor_ring.compute.memory import Region
from dtensor_ring.planning.mask import Mask

# What queries see: a band, or the numbers of `Intervals`.
Seen = Mask | Tensor


class Reference(Kernel):
    """Plain softmax attention, computed in float32, or in float64 for float64 inputs."""

    name = "reference"
    has_segments = True
    has_dropout = True
    has_bias = True
    bitwise_by_block = True

    def missing(self) -> str | None:
        return None

    def supports(self, problem: Problem) -> str | None:
        if not problem.dtype.is_floating_point or problem.dtype.itemsize < 2:
            return f"it needs a floating dtype of 16 bits or more, got {problem.dtype}"
        if problem.by_block and problem.device_type != "cpu":
            return f"its bits are known on a CPU only, the tensors are on {problem.device_type}"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores) -> Result:
        if launch.by_block:
            return _forward_by_head(q, k, v, launch.mask, scores)
        if launch.segments is None:
            return _forward(q, k, v, _seen(launch, q), scores, launch.dropout, launch.lags)
        num_rows, heads = q.shape[:2]
        wide = torch.promote_types(q.dtype, torch.float32)
        # Rows without keys keep (0, -inf).
        lse = q.new_full((heads, num_rows), -torch.inf, dtype=wide)
        out = q.new_zeros(num_rows, heads, v.shape[2])
        for rows, cols in launch.segments.tiles():
            query, key, value = _by_head(q[rows]), _by_head(k[cols]), _by_head(v[cols])
            dropout = _dropout_of(launch, rows, cols)
            tile_out, tile_lse = _forward(query, key, value, launch.mask, scores, dropout)
            out[rows], lse[:, rows] = tile_out[0].transpose(0, 1), tile_lse[0]
        return out, lse

    def backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores
    ) -> Gradients:
        if launch.by_block:
            return _backward_by_head(saved, q, k, v, launch.mask, scores)
        if launch.segments is None:
            seen = _seen(launch, q)
            return _backward(saved, q, k, v, seen, scores, launch.dropout, launch.lags)
        # Rows without keys, and keys without rows, get no gradient from any segment.
        grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows, cols in launch.segments.tiles():
            query, key, value = _by_head(q[rows]), _by_head(k[cols]), _by_head(v[cols])
            here, dropout = _of_tile(saved, rows), _dropout_of(launch, rows, cols)
            parts = _backward(here, query, key, value, launch.mask, scores, dropout)
            for grad, part, region in zip(grads, parts, (rows, cols, cols), strict=True):
                grad[region] = part[0].transpose(0, 1)
        return grads


def _seen(launch: Launch, query: Tensor) -> Seen:
    return launch.mask if launch.intervals is None else launch.intervals.on(query.device)


def _dropout_of(launch: Launch, rows: slice, cols: slice) -> Dropout | None:
    """Return the dropout of a segment, in the shapes of a tile."""
    if launch.dropout is None:
        return None
    part = launch.dropout.part(rows, cols)
    return Dropout(part.rate, part.rows.unsqueeze(0), part.cols)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Seen,
    scores: Scores,
    dropout: Dropout | None = None,
    lags: Lags | None = None,
) -> Result:
    """Return `(out, lse)` of a tile, or of intervals."""
    batch, heads, rows, _ = query.shape
    # Sums in 16 bits would lose what small weights add.
    wide = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_empty(batch, heads, rows, dtype=wide)
    out = query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)
    # By blocks of rows, so that the scores of a tile never stand in memory as a whole.
    for block, seen in _blocks(rows, key.shape[2], mask):
        keys, values = (x[:, :, seen].to(wide) for x in (key, value))
        near = None if lags is None else lags.part(block, seen)
        scored, _ = _scored(_grouped(query[:, :, block], keys), keys, scores, near)
        scored = _hide(scored, block, seen, mask)
        factors = _factors(dropout, block, seen, scored)
        out[:, :, block], lse[:, :, block] = _weighted(scored, values, heads, factors)
    return out, lse


def _factors(dropout: Dropout | None, block: slice, seen: slice, scored: Tensor) -> Tensor | None:
    """Return the factors of the weights of some queries and keys, in the shape of their scores."""
    if dropout is None:
        return None
    return dropout.part(block, seen).factors(scored.dtype).view_as(scored)


def _heads(query: Tensor, key: Tensor) -> Iterator[tuple[Region, Region]]:
    """Yield the regions of each batch row and key head: its queries, and the head itself."""
    # A product of a head that is copied first has the same bits, whatever lies beside the head.
    group = query.shape[1] // max(1, key.shape[1])
    for row, head in product(range(query.shape[0]), range(key.shape[1])):
        rows = slice(row, row + 1)
        yield (
            (rows, slice(head * group, (head + 1) * group), slice(None)),
            (rows, slice(head, head + 1), slice(None)),
        )


def _own(x: Tensor, where: Region) -> Tensor:
    return x[where].clone(memory_format=torch.contiguous_format)


def _forward_by_head(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scores: Scores) -> Result:
    """Return `(out, lse)` of a tile, each batch row and key head by itself."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=wide)
    for rows, cols in _heads(q, k):
        out[rows], lse[rows] = _forward(_own(q, rows), _own(k, cols), _own(v, cols), mask, scores)
    return out, lse


def _backward_by_head(
    saved: Saved, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scores: Scores
) -> Gradients:
    """Return the gradients of a tile, each batch row and key head by itself."""
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    # One head at a time, so that only its scores are in memory.
    for rows, cols in _heads(q, k):
        slopes = None if saved.grad_lse is None else _own(saved.grad_lse, rows)
        grad_out, out, lse = (_own(x, rows) for x in (saved.grad_out, saved.out, saved.lse))
        own = Saved(grad_out, out, lse, slopes)
        found = _backward(own, _own(q, rows), _own(k, cols), _own(v, cols), mask, scores)
        for grad, where, x in zip(grads, (rows, cols, cols), found, strict=True):
            grad[where] = x
    return grads


def _weighted(scored: Tensor, values: Tensor, heads: int, factors: Tensor | None = None) -> Result:
    """Return `(out, lse)` of scores `(B, Nkv, N / Nkv, R, C)`, -inf where a key is hidden."""
    lse = scored.logsumexp(-1)
    # A row with only scores of -inf gets weights of 0; -inf - -inf would be nan.
    base = lse.masked_fill(lse == -torch.inf, 0.0)
    weights = (scored - base.unsqueeze(-1)).exp_()
    if factors is not None:
        weights *= factors
    # The heads of a group share keys: with their rows joined, one product serves all.
    return unfold_heads(weights.flatten(2, 3) @ values, heads), lse.flatten(1, 2)


def attend_visible(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scores: Scores
) -> Result:
    """Return `(out, lse)` of queries that each see any of the keys, float32 or wider.

    This is one launch for rows of different lengths whose keys were padded to one. It computes the
    scores of all pairs, so it is for few keys.

    Args:
        query: `(B, N, R, H)`.
        key: `(B, Nkv, C, H)`.
        value: `(B, Nkv, C, Hv)`.
        visible: which columns each row sees, `(B, R, C)`, bool.
        scores: scale and softcap.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    keys, values = key.to(wide), value.to(wide)
    scored, _ = _scored(_grouped(query, keys), keys, scores)
    scored = scored.masked_fill(~visible[:, None, None], -torch.inf)
    return _weighted(scored, values, query.shape[1])


def _backward(
    saved: Saved,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Seen,
    scores: Scores,
    dropout: Dropout | None = None,
    lags: Lags | None = None,
) -> Gradients:
    """Return the gradients of query, key and value of a tile, or of intervals.

    See the formula of `Kernel`.
    """
    heads, rows = query.shape[1:3]
    wide = saved.lse.dtype
    grad_query = torch.empty_like(query)
    grad_key, grad_value = (torch.zeros_like(x, dtype=wide) for x in (key, value))
    # Each row's sum of p * dp; computed from the final out, it needs no extra pass over keys.
    delta = (saved.grad_out.to(wide) * saved.out).sum(-1)
    if saved.grad_lse is not None:
        delta -= saved.grad_lse
    # In intervals a row may see nothing, here and elsewhere; -inf - -inf would be nan.
    lse = saved.lse if isinstance(mask, Mask) else saved.lse.masked_fill(saved.lse == -torch.inf, 0)
    for block, seen in _blocks(rows, key.shape[2], mask):
        keys, values = (x[:, :, seen].to(wide) for x in (key, value))
        queries, grads = (_grouped(x[:, :, block], keys) for x in (query, saved.grad_out))
        near = None if lags is None else lags.part(block, seen)
        scored, slope = _scored(queries, keys, scores, near)
        scored = _hide(scored, block, seen, mask)
        per_row = (*scored.shape[:-1], 1)
        # lse is over the whole row, so these are the weights among all keys of the ring.
        weights = (scored - lse[:, :, block].reshape(per_row)).exp_()
        grad_weights = (grads.flatten(2, 3) @ values.mT).view_as(scored)
        factors = _factors(dropout, block, seen, scored)
        if factors is not None:
            grad_weights *= factors
        grad_scored = weights * (grad_weights - delta[:, :, block].reshape(per_row))
        grad_table = _of_table(near, grad_scored, queries, keys)
        grad_scored *= slope
        # Products over the joined rows of a group sum the gradients of shared keys.
        flat_weights, flat_scored = weights.flatten(2, 3), grad_scored.flatten(2, 3)
        if factors is not None:
            flat_weights *= factors.flatten(2, 3)
        grad_value[:, :, seen] += flat_weights.mT @ grads.flatten(2, 3)
        grad_key[:, :, seen] += flat_scored.mT @ queries[..., : keys.shape[3]].flatten(2, 3)
        grad_queries = flat_scored @ keys
        if grad_table is not None:
            grad_queries = torch.cat([grad_queries, grad_table], -1)
        grad_query[:, :, block] = unfold_heads(grad_queries, heads)
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


def _of_tile(saved: Saved, rows: slice) -> Saved:
    """Return the saved tensors of a segment's rows, in the shapes of a tile."""
    slopes = None if saved.grad_lse is None else saved.grad_lse[:, rows].unsqueeze(0)
    lse = saved.lse[:, rows].unsqueeze(0)
    return Saved(_by_head(saved.grad_out[rows]), _by_head(saved.out[rows]), lse, slopes)


def _by_head(x: Tensor) -> Tensor:
    """Reshape `(T, N, H)` to `(1, N, T, H)`."""
    return x.transpose(0, 1).unsqueeze(0)


def _grouped(x: Tensor, keys: Tensor) -> Tensor:
    """Group query heads by key head: `(B, N, R, H)` to `(B, Nkv, N / Nkv, R, H)`."""
    return x.to(keys.dtype).unflatten(1, (keys.shape[1], -1))


def _of_table(
    lags: Lags | None, grad_scored: Tensor, queries: Tensor, keys: Tensor
) -> Tensor | None:
    """Return the gradient of the bias by distance, `(B, Nkv, N / Nkv * R, E)`, if there is one."""
    if lags is None:
        return None
    return lags.gradient(grad_scored, queries.shape[-1] - keys.shape[-1]).flatten(2, 3)


def _scored(
    queries: Tensor, keys: Tensor, scores: Scores, lags: Lags | None = None
) -> tuple[Tensor, Tensor | float]:
    """Return scores `(B, Nkv, N / Nkv, R, C)` and their derivative with respect to `q.k`."""
    scale, softcap = scores.scale, scores.softcap
    if lags is not None:
        queries, table = queries.tensor_split([keys.shape[-1]], -1)
        scored, slope = _scored(queries, keys, scores)
        return scored + lags.bias(table), slope
    scored = (queries.flatten(2, 3) @ keys.mT).unflatten(2, queries.shape[2:4]) * scale
    if not softcap:
        return scored, scale
    # The derivative of softcap * tanh(x / softcap) is 1 - tanh**2.
    saturation = (scored / softcap).tanh_()
    return saturation * softcap, (1 - saturation.square()) * scale


# Queries per block; this bounds the scores in memory to `B * N * BLOCK_ROWS * C`.
BLOCK_ROWS = 128


def _blocks(num_rows: int, num_cols: int, mask: Seen) -> list[Block]:
    """Return blocks of rows, each with the columns to score; with intervals these are all."""
    band = mask if isinstance(mask, Mask) else Mask.full()
    return row_blocks(num_rows, num_cols, band, BLOCK_ROWS)


def _hide(scored: Tensor, block: slice, seen: slice, mask: Seen) -> Tensor:
    """Set scores of keys that a row does not see to -inf."""
    if isinstance(mask, Mask):
        outside = hidden((block, seen), mask, scored.device)
    else:
        outside = _outside(mask[..., block], scored.shape[-1]).unsqueeze(1).unsqueeze(1)
    return scored if outside is None else scored.masked_fill(outside, -torch.inf)


def _outside(ends: Tensor, num_cols: int) -> Tensor:
    """Return a boolean `(B, R, C)`, true where no interval of a row has a column.

    Args:
        ends: the numbers of `Intervals`, `(B, F, R)`.
        num_cols: number of columns.
    """
    cols = torch.arange(num_cols, device=ends.device)
    passed = torch.stack([cols >= end.unsqueeze(-1) for end in ends.unbind(1)])
    # A column lies in an interval if it is past its begin and not past its end, so past an even
    # number of them: key 0 is the begin that is not written down.
    return passed.sum(0) % 2 == 1
