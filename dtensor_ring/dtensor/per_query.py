"""What differs between queries besides their keys: a bias by distance, and a sink for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtensor_ring.dtensor.placement import describe
from dtensor_ring.ops.checks import check_strided


def with_bias(query: Tensor, bias: Any) -> Tensor:
    """Return the queries as the ops take them with a bias by distance, see `Kernel`.

    Args:
        query: `(B, N, L, H)`.
        bias: `(B, N, L, E)`, placed as the query.

    Returns:
        `(B, N, L, H + E)`.

    Raises:
        TypeError: if the bias is not a tensor, or not of the query's kind.
        ValueError: if it does not fit the query.
    """
    _check_rows("relative_bias", query, bias, 4, "(B, N, L, E), a bias for each distance")
    if not bias.shape[3]:
        raise ValueError("relative_bias needs a distance, got E = 0; leave it out")
    return torch.cat([query, bias.to(query.dtype)], -1)


def with_sinks(query: Tensor, out: Tensor, lse: Any, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return an attention with a sink of each query, which has a score and no value.

    Args:
        query: `(B, N, L, H)`.
        out: `(B, N, L, Hv)`, without sinks.
        lse: `(B, N, L)`, without sinks.
        sinks: the score of each query's sink, `(B, N, L)`, placed as the query.

    Returns:
        `(out, lse)` with the sinks.

    Raises:
        TypeError: if the sinks are not of the query's kind.
        ValueError: if they do not fit the query.
    """
    _check_rows("sinks", query, sinks, 3, "(N,), one for each query head, or (B, N, L)")
    sinks = sinks.to(lse.dtype)
    # Keys have a share of exp(lse) / (exp(lse) + exp(sink)): none in a row that sees none.
    share = torch.sigmoid(lse - sinks).unsqueeze(-1)
    return (out * share).to(out.dtype), torch.logaddexp(lse, sinks)


def _check_rows(name: str, query: Tensor, x: Any, ndim: int, form: str) -> None:
    """Refuse what has no row for each query."""
    if not isinstance(x, Tensor) or isinstance(x, DTensor) != isinstance(query, DTensor):
        raise TypeError(f"{name} must be a tensor of the query's kind, got {type(x).__name__}")
    check_strided(name, x)
    fits = x.ndim == ndim and x.shape[:3] == query.shape[:3] and x.device == query.device
    if isinstance(query, DTensor) and isinstance(x, DTensor):
        fits = fits and x.placements == query.placements and x.device_mesh == query.device_mesh
    if fits and x.is_floating_point():
        return
    given, wanted = (
        f"{tuple(y.shape)} {y.dtype}, {describe(y) if isinstance(y, DTensor) else y.device}"
        for y in (x, query)
    )
    raise ValueError(f"{name} must be {form}, placed as the query, {wanted}; got {given}")
