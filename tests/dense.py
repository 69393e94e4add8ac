"""Attention written out in float64: what every path is compared with.

Built from the mask's definition alone (positions and document ids), without planner code.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from dtensor_ring import Mask


@dataclass
class Result:
    """Outputs, and gradients once `backward` was called, of the whole sequence in float64."""

    out: Tensor
    lse: Tensor
    inputs: list[Tensor]

    def backward(self, grad_out: Tensor, grad_lse: Tensor | None = None) -> list[Tensor]:
        """Gradients of query, key, value and, if given, sinks."""
        outputs, grads = [self.out], [grad_out.double()]
        if grad_lse is not None:
            outputs, grads = [*outputs, self.lse], [*grads, grad_lse.double()]
        return list(torch.autograd.grad(outputs, self.inputs, grads, retain_graph=True))


def largest(errors: Iterable[float]) -> float:
    """The largest of some errors, which is NaN if any is: `max` may pass over it."""
    return torch.tensor(list(errors), dtype=torch.float64).max().item()


def visible(
    mask: Mask,
    seq_lens: tuple[int, int],
    batch: int,
    cu_seqlens: Tensor | None = None,
    key_cu_seqlens: Tensor | None = None,
) -> Tensor:
    """`(B, 1, S, T)`: which query (row) sees which key (column); both count from position 0."""
    query, key = torch.arange(seq_lens[0]).unsqueeze(1), torch.arange(seq_lens[1])
    lag = query - key
    seen = torch.ones(batch, 1, *seq_lens, dtype=torch.bool)
    if mask.left is not None:
        seen &= lag <= mask.left
    if mask.chunk is not None:
        seen &= query // mask.chunk == key // mask.chunk
    query_ids, _ = document_ids(seq_lens[0], batch, cu_seqlens)
    key_ids, key_starts = document_ids(
        seq_lens[1], batch, cu_seqlens if key_cu_seqlens is None else key_cu_seqlens
    )
    if mask.right is not None:
        in_prefix = (key - key_starts < (mask.prefix or 0))[:, None, None]
        seen &= (-lag <= mask.right) | in_prefix
    same_document = query_ids.unsqueeze(2) == key_ids.unsqueeze(1)
    return seen & (same_document & (query_ids >= 0).unsqueeze(2)).unsqueeze(1)


def document_ids(seq_len: int, batch: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Each token's document, -1 if it is in none, and where that starts: both `(B, S)`."""
    ids = torch.full((batch, seq_len), 0 if cu_seqlens is None else -1)
    starts = torch.zeros(batch, seq_len, dtype=torch.int)
    if cu_seqlens is not None:
        for row, bounds in enumerate(cu_seqlens.expand(batch, -1).tolist()):
            for document, (begin, end) in enumerate(pairwise(bounds)):
                ids[row, begin:end], starts[row, begin:end] = document, begin
    return ids, starts


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    *,
    cu_seqlens: Tensor | None = None,
    key_cu_seqlens: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    seen: Tensor | None = None,
    factors: Tensor | None = None,
) -> Result:
    """Softmax attention of `(B, N, S, H)` in float64; a row that sees nothing is (0, -inf).

    `seen` `(B, S, T)` says who sees what in place of mask and documents. `factors` `(B, N, S, T)`
    are those of the weights under dropout. A query that is wider than keys has a bias by distance
    there, for the key as many positions before, from 0 on.
    """
    inputs = [x.detach().double().requires_grad_() for x in (query, key, value)]
    if sinks is not None:
        inputs.append(sinks.detach().double().requires_grad_())
    q, k, v = inputs[:3]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    q, biases = q.tensor_split([k.shape[-1]], -1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if num_biases := biases.shape[-1]:
        lags = torch.arange(scores.shape[2]).unsqueeze(1) - torch.arange(scores.shape[3])
        at = lags.clamp(0, num_biases - 1).expand_as(scores)
        scores = scores + biases.gather(-1, at) * ((lags >= 0) & (lags < num_biases))
    num_rows, num_cols = scores.shape[2:]
    if seen is None:
        bounds = cu_seqlens, key_cu_seqlens
        seen = visible(mask, (num_rows, num_cols), q.shape[0], *bounds)[:, 0]
    scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
    if sinks is not None:
        column = inputs[3].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()
    weights = weights[..., : k.shape[2]]
    return Result((weights if factors is None else weights * factors) @ v, lse, inputs)


def dropout_factors(rate: float, seed: int, shape: tuple[int, ...]) -> Tensor:
    """Factors of the weights `(B, N, S, T)`: SplitMix64 of each index, one dim after another."""
    step, state = np.uint64(0x9E3779B97F4A7C15), np.array(seed, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for size in shape:
            state = state[..., None] + step * np.arange(size, dtype=np.uint64)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state ^= state >> np.uint64(31)
    kept = state.view(np.int64) >= int(rate * 2**64) - 2**63
    return torch.from_numpy(kept).double() / (1 - rate)
