"""Attention of sequences in float64, as the kernels of GPUs split it into calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Lengths = tuple[Tensor | None, Tensor | None, int | None, int | None]
"""Boundaries of the queries and of the keys, and the longest of each."""


@dataclass(frozen=True)
class Scores:
    """How scores come from queries `(R, N, H)` and keys `(C, Nkv, H)` of one sequence.

    Row i sees column j iff `-right <= i + C - R - j <= left`, or without C - R.
    """

    scale: float
    softcap: float
    left: int | None = None
    right: int | None = None
    top_left: bool = False

    def of(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Scores `(N, R, C)`, -inf where not seen, and their slope by the product."""
        rows, cols, group = len(query), len(key), query.shape[1] // key.shape[1]
        keys = key.repeat_interleave(group, 1)
        scores = torch.einsum("rnh,cnh->nrc", query, keys) * self.scale
        slope = torch.full_like(scores, self.scale)
        if self.softcap:
            scores = self.softcap * (scores / self.softcap).tanh()
            slope *= 1 - (scores / self.softcap) ** 2
        lag = torch.arange(rows).unsqueeze(1) - torch.arange(cols)
        lag += 0 if self.top_left else cols - rows
        for bound, side in ((self.left, lag), (self.right, -lag)):
            if bound is not None:
                scores = scores.masked_fill(side > bound, -torch.inf)
        return scores, slope

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """`out` `(R, N, Hv)` and `lse` `(N, R)`."""
        scores, _ = self.of(query, key)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp()
        values = value.repeat_interleave(query.shape[1] // key.shape[1], 1)
        return torch.einsum("nrc,cnh->rnh", weights, values), lse

    def backward(
        self, dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients, with `out` and `lse` as they are given."""
        (scores, slope), group = self.of(query, key), query.shape[1] // key.shape[1]
        keys, values = (x.repeat_interleave(group, 1) for x in (key, value))
        weights = (scores - lse.unsqueeze(-1)).exp()
        delta = (dout * out).sum(-1).T.unsqueeze(-1)
        grad = weights * (torch.einsum("rnh,cnh->nrc", dout, values) - delta) * slope
        dq = torch.einsum("nrc,cnh->rnh", grad, keys)
        dk, dv = (
            torch.einsum("nrc,rnh->cnh", grad, query),
            torch.einsum("nrc,rnh->cnh", weights, dout),
        )
        return dq, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))


def sequences(query: Tensor, key: Tensor, lengths: Lengths) -> Iterator[tuple[Any, Any]]:
    """Where the queries and the keys of each sequence are: batch rows, or spans of tokens."""
    if lengths[0] is None:
        assert lengths[1] is None
        assert query.dim() == key.dim() == 4
        assert lengths[2:] in ((None, None), (query.shape[1], key.shape[1]))
        yield from ((row, row) for row in range(len(query)))
        return
    bounds = []
    for x, cu_seqlens, longest in zip((query, key), lengths[:2], lengths[2:], strict=True):
        assert cu_seqlens is not None
        assert longest is not None
        assert x.dim() == 3
        assert cu_seqlens.dtype == torch.int32
        assert longest >= cu_seqlens.diff().max()
        assert (cu_seqlens[0], cu_seqlens[-1]) == (0, len(x))
        bounds.append([slice(*span) for span in pairwise(cu_seqlens.tolist())])
    yield from zip(*bounds, strict=True)


def run_forward(
    scores: Scores, tensors: tuple[Tensor, ...], lengths: Lengths, no_keys: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Out and lse; those of rows without keys are `no_keys`."""
    query, key, value = tensors
    assert all(x.stride(-1) == 1 for x in tensors)
    out = torch.full((*query.shape[:-1], value.shape[-1]), torch.nan).double()
    lse = out[..., 0].transpose(-1, -2).contiguous()
    for rows, cols in sequences(query, key, lengths):
        where = (slice(None), rows) if isinstance(rows, slice) else rows
        if len(key[cols]):
            out[rows], lse[where] = scores.forward(*_double(query[rows], key[cols], value[cols]))
        else:
            out[rows], lse[where] = no_keys
    return out.to(query.dtype), lse.float()


def run_backward(
    scores: Scores,
    dout: Tensor,
    tensors: tuple[Tensor, ...],
    saved: tuple[Tensor, Tensor],
    lengths: Lengths,
) -> list[Tensor]:
    """Gradients of query, key and value."""
    query, key, value = tensors
    out, lse = saved
    assert all(x.stride(-1) == 1 for x in (dout, *tensors, out))
    assert lse.is_contiguous()
    assert lse.dtype == torch.float32
    assert lse.shape == out[..., 0].transpose(-1, -2).shape
    grads = [torch.zeros_like(x, dtype=torch.float64) for x in tensors]
    for rows, cols in sequences(query, key, lengths):
        where = (slice(None), rows) if isinstance(rows, slice) else rows
        if len(query[rows]) and len(key[cols]):
            parts = (dout[rows], query[rows], key[cols], value[cols], out[rows], lse[where])
            shares = scores.backward(*_double(*parts))
            for grad, span, share in zip(grads, (rows, cols, cols), shares, strict=True):
                grad[span] = share
    return [grad.to(x.dtype) for grad, x in zip(grads, tensors, strict=True)]


def _double(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.double() for x in tensors)
