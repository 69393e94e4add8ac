"""The kernel that defines the semantics: any device, any floating dtype, every option."""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_ring.kernels.band import hidden, row_blocks
from dtensor_ring.kernels.kernel import Kernel, Problem
from dtensor_ring.mask import Mask
from dtensor_ring.segments import Segments

BLOCK_ROWS = 128
"""Queries per block: bounds the scores held at a time to `B * N * BLOCK_ROWS * C`."""


class Reference(Kernel):
    """Softmax attention, written out; float32 inside, float64 for float64 inputs."""

    name = "reference"
    has_segments = True

    def missing(self) -> str | None:
        return None

    def supports(self, problem: Problem) -> str | None:
        if not problem.dtype.is_floating_point or problem.dtype.itemsize < 2:
            return f"it needs a floating dtype of 16 bits or more, got {problem.dtype}"
        return None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        batch, heads, rows, _ = query.shape
        lse = query.new_empty(
            batch, heads, rows, dtype=torch.promote_types(query.dtype, torch.float32)
        )
        out = query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)
        for block, seen in row_blocks(rows, key.shape[2], mask, BLOCK_ROWS):
            keys, values = (x[:, :, seen].to(lse.dtype) for x in (key, value))
            scores, _ = _scores(_grouped(query[:, :, block], keys), keys, scale, softcap)
            scores = _hide(scores, block, seen, mask)
            block_lse = scores.logsumexp(-1)
            lse[:, :, block] = block_lse.flatten(1, 2)
            weights = (scores - block_lse.unsqueeze(-1)).exp_()
            out[:, :, block] = _ungrouped(weights.flatten(2, 3) @ values, heads)
        return out, lse

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        grad_lse: Tensor | None,
        mask: Mask,
        scale: float,
        softcap: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, rows = query.shape[1:3]
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (torch.zeros_like(x, dtype=lse.dtype) for x in (key, value))
        delta = (grad_out.to(lse.dtype) * out).sum(-1)
        if grad_lse is not None:
            delta -= grad_lse
        for block, seen in row_blocks(rows, key.shape[2], mask, BLOCK_ROWS):
            keys, values = (x[:, :, seen].to(lse.dtype) for x in (key, value))
            queries, grads = (_grouped(x[:, :, block], keys) for x in (query, grad_out))
            scores, slope = _scores(queries, keys, scale, softcap)
            scores = _hide(scores, block, seen, mask)
            per_row = (*scores.shape[:-1], 1)
            weights = (scores - lse[:, :, block].reshape(per_row)).exp_()
            grad_weights = (grads.flatten(2, 3) @ values.mT).view_as(scores)
            grad_scores = weights * (grad_weights - delta[:, :, block].reshape(per_row)) * slope
            flat_weights, flat_scores = weights.flatten(2, 3), grad_scores.flatten(2, 3)
            grad_value[:, :, seen] += flat_weights.mT @ grads.flatten(2, 3)
            grad_key[:, :, seen] += flat_scores.mT @ queries.flatten(2, 3)
            grad_query[:, :, block] = _ungrouped(flat_scores @ keys, heads)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)

    def forward_segments(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: Segments,
        scale: float,
        softcap: float,
    ) -> tuple[Tensor, Tensor]:
        num_rows, heads = query.shape[:2]
        wide = torch.promote_types(query.dtype, torch.float32)
        lse = query.new_full((heads, num_rows), -torch.inf, dtype=wide)
        out = query.new_zeros(num_rows, heads, value.shape[2])
        for rows, cols in segments.tiles():
            tile_out, tile_lse = self.forward(
                *(_by_head(query[rows]), _by_head(key[cols]), _by_head(value[cols])),
                *(segments.mask, scale, softcap),
            )
            out[rows], lse[:, rows] = tile_out[0].transpose(0, 1), tile_lse[0]
        return out, lse

    def backward_segments(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        segments: Segments,
        scale: float,
        softcap: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for rows, cols in segments.tiles():
            of_tile = self.backward(
                *(_by_head(grad_out[rows]), _by_head(query[rows])),
                *(_by_head(key[cols]), _by_head(value[cols]), _by_head(out[rows])),
                *(lse[:, rows].unsqueeze(0), None, segments.mask, scale, softcap),
            )
            for grad, part, at in zip(grads, of_tile, (rows, cols, cols), strict=True):
                grad[at] = part[0].transpose(0, 1)
        return grads


def _by_head(x: Tensor) -> Tensor:
    """`(T, N, H)` to `(1, N, T, H)`."""
    return x.transpose(0, 1).unsqueeze(0)


def _grouped(x: Tensor, keys: Tensor) -> Tensor:
    """`(B, N, R, H)` to `(B, Nkv, N / Nkv, R, H)`: the query heads by key head."""
    return x.to(keys.dtype).unflatten(1, (keys.shape[1], -1))


def _ungrouped(x: Tensor, heads: int) -> Tensor:
    """`(B, Nkv, N / Nkv * R, H)` back to `(B, N, R, H)`."""
    batch, kv_heads, rows, head_dim = x.shape
    return x.reshape(batch, heads, kv_heads * rows // heads, head_dim)


def _scores(
    queries: Tensor, keys: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor | float]:
    """Scores `(B, Nkv, N / Nkv, R, C)` and their derivative by the raw product."""
    scores = (queries.flatten(2, 3) @ keys.mT).unflatten(2, queries.shape[2:4]) * scale
    if not softcap:
        return scores, scale
    saturation = (scores / softcap).tanh_()
    return saturation * softcap, (1 - saturation.square()) * scale


def _hide(scores: Tensor, block: slice, seen: slice, mask: Mask) -> Tensor:
    """Scores outside the band become -inf."""
    outside = hidden((block, seen), mask, scores.device)
    return scores if outside is None else scores.masked_fill(outside, -torch.inf)
