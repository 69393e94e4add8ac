"""Scans of Mamba 1 that go on from a state.

Note [A scan from zero]: transformers' own scan of several tokens begins without a state, be it a
kernel or not. Its state after a token is `decay * state + input`, so linear in the state before the
first one: what that would have added to each output is computed apart, and added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import unwrap
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

SCAN = "mamba_selective_scan"
"""The function, by the name under which forwards of layers call it."""


def scans(forward: Callable[..., Any]) -> bool:
    """Whether a layer's forward calls the scan."""
    return SCAN in unwrap(forward).__code__.co_names


def going_on(forward: Callable[..., Any], state: Tensor) -> Callable[..., Any]:
    """The same forward of a layer, whose scan goes on from a state.

    Args:
        forward: of a layer, not bound to it.
        state: `(B, D, N)` of D channels with N numbers, or `(B, heads, D, N)` of a scan by head.
    """
    # Its code calls the scan by a global name: a copy of it gets another one.
    plain: Any = unwrap(forward)
    parts = iter(state.unbind(1) if state.dim() == 4 else (state,))
    names = plain.__globals__ | {SCAN: _from(plain.__globals__[SCAN], parts)}
    made = FunctionType(
        plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__
    )
    made.__kwdefaults__ = plain.__kwdefaults__
    return made


def _from(scan: Callable[..., Any], states: Iterator[Tensor]) -> Callable[..., Any]:
    """The scan, each call of which goes on from the next of these states."""

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
