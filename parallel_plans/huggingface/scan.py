"""Continues scans of Mamba 1 from a state.

Note [A scan from zero]: transformers' own scan of several tokens begins without a state, with or
without a kernel. Its state after a token is `decay * state + input`, so it is linear in the initial
state. The contribution of the initial state to each output is computed separately and added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import unwrap
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

# The global name by which forwards of layers call the scan.
SCAN = "mamba_selective_scan"


def scans(forward: Callable[..., Any]) -> bool:
    """Return whether a layer's forward calls the scan."""
    return SCAN in unwrap(forward).__code__.co_names


def going_on(forward: Callable[..., Any], state: Tensor) -> Callable[..., Any]:
    """Return a copy of a layer's forward whose scan continues from a state.

    Args:
        forward: the unbound forward of the layer.
        state: the state of D channels with N numbers each, `(B, D, N)`; if each head calls the
            scan, `(B, heads, D, N)`.
    """
    # The code looks the scan up as a global, so the copy gets globals with another scan.
    plain: Any = unwrap(forward)
    parts = iter(state.unbind(1) if state.dim() == 4 else (state,))
    names = plain.__globals__ | {SCAN: _from(plain.__globals__[SCAN], parts)}
    made = FunctionType(
        plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__
    )
    made.__kwdefaults__ = plain.__kwdefaults__
    return made


def _from(scan: Callable[..., Any], states: Iterator[Tensor]) -> Callable[..., Any]:
    """Return a scan in which each call continues from the next of `states`."""

    def whole(
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        *,
        z: Tensor,
        delta_bias: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        out, last = scan(x, dt, a, b, c, z=z, delta_bias=delta_bias, **options)
        biased = dt if delta_bias is None else dt + delta_bias[:, None]
        decay = torch.exp(a[None, :, None] * softplus(biased.float()).cumsum(-1)[..., None])
        kept = decay * next(states)[:, :, None]  # (B, D, L, N)
        added = torch.einsum("bdln,bnl->bdl", kept, c.to(kept.dtype))
        return out + added * silu(z), last + kept[:, :, -1]

    return whole
