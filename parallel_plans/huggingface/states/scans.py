"""Scans of layers that start from a state of zero, and what another state adds to their outputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import unwrap
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from dtensor_ring import StateMap
from parallel_plans.huggingface.states.state_sources import StateSource

# Takes the map of the tokens of a call, and returns the state before them; `None` for zero.
PassOn = Callable[[StateMap], Tensor | None]


# Note [A scan from zero]: the state after some tokens is an affine function of the state before
# them, and outputs are linear in that state. So a scan runs from zero, which gives the state that
# its tokens leave; its source gives the state before them; and what that adds to outputs is added.
# The code of a layer looks its scan up as a global, so a copy of its forward gets globals with
# another scan, which calls the first one. So kernels that transformers would call are called.
def scan_of(forward: Callable[..., Any]) -> str | None:
    """Return the global name by which a layer's forward calls a scan that is known here."""
    names = unwrap(forward).__code__.co_names
    if all(name in names for name in LIGHTNING):
        return MASKED
    return next((name for name in SCANS if name in names), None)


def with_source(
    forward: Callable[..., Any], source: StateSource, layer: nn.Module
) -> Callable[..., Any]:
    """Return a copy of a layer's forward whose scans get the states before their tokens.

    Args:
        forward: the unbound forward of the layer, which calls one of `SCANS`, once or more often,
            or is that of lightning attention.
        source: gives the states.
        layer: the layer.
    """
    plain: Any = unwrap(forward)
    name, numbers = scan_of(plain), count()
    assert name is not None, f"{forward} calls no known scan"

    def pass_on(own: StateMap) -> Tensor | None:
        return source.scanned(("recurrent", next(numbers)), own)

    called = plain.__globals__[name]
    if name == MASKED:
        return _lightning(partial(_copied, plain), called, pass_on, layer)
    return _copied(plain, {name: SCANS[name](called, pass_on, source.continues)})


def _copied(plain: Any, changes: dict[str, Any]) -> Callable[..., Any]:
    """Return a copy of a function, some of whose globals are others."""
    names = plain.__globals__ | changes
    made = FunctionType(
        plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__
    )
    made.__kwdefaults__ = plain.__kwdefaults__
    return made


def _mamba1(scan: Callable[..., Any], pass_on: PassOn, continues: bool) -> Callable[..., Any]:
    """Return a selective scan of Mamba 1: each element of the state has its own decay."""

    def run(
        x: Tensor,  # (B, D, L)
        dt: Tensor,
        a: Tensor,  # (D, N)
        b: Tensor,
        c: Tensor,  # (B, N, L)
        *,
        z: Tensor,
        delta_bias: Tensor | None,
        delta_softplus: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        steps = {"delta_bias": delta_bias, "delta_softplus": delta_softplus}
        out, last = scan(x, dt, a, b, c, z=z, **steps, **options)
        step = (dt if delta_bias is None else dt + delta_bias[:, None]).float()
        # Decays multiply, so their logarithms add up: those of all tokens so far, by `a`.
        total = (softplus(step) if delta_softplus else step).cumsum(-1)
        before = pass_on(StateMap(last, decay=a * total[:, :, -1:]))
        if before is None:
            return out, last
        # The state before a token's own, as far as it is left: (B, D, L, N).
        left = torch.exp(a[:, None] * total[..., None]) * before[:, :, None]
        added = torch.einsum("bdln,bnl->bdl", left, c.to(left.dtype))
        return out + added * silu(z), last

    return run


def _mamba2(scan: Callable[..., Any], pass_on: PassOn, continues: bool) -> Callable[..., Any]:
    """Return a scan of Mamba 2: a state has one decay for each head."""

    def run(
        x: Tensor,  # (B, L, heads, P)
        dt: Tensor,  # (B, L, heads)
        a: Tensor,  # (heads,)
        b: Tensor,
        c: Tensor,  # (B, L, groups, N)
        *,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        initial_states: None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        steps = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
        out, last = scan(x, dt, a, b, c, z=z, **steps, **options)
        step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
        step = softplus(step) if dt_softplus else step
        # The logarithm of what is left of the state before these tokens, at each of them.
        total = (a.float() * step.clamp(dt_limit[0], dt_limit[1])).cumsum(1)
        before = pass_on(StateMap(last, decay=total[:, -1]))
        if before is None:
            return out, last
        added = _read_by_groups(before, c) * total.exp().unsqueeze(-1)
        return out + (added if z is None else added * silu(z)).to(out.dtype), last

    return run


def _read_by_groups(state: Tensor, c: Tensor) -> Tensor:
    """Return what tokens read from a state `(B, heads, P, N)`, `(B, L, heads, P)`.

    Heads of a group read by the same vectors, `c` of shape `(B, L, groups, N)`.
    """
    # (B, groups, heads of a group * P, N)
    by_group = state.unflatten(1, (c.shape[2], -1)).flatten(2, 3)
    read = c.transpose(1, 2).to(state.dtype) @ by_group.mT
    return read.unflatten(-1, (-1, state.shape[2])).transpose(1, 2).flatten(2, 3)


def _delta_rule(scan: Callable[..., Any], pass_on: PassOn, continues: bool) -> Callable[..., Any]:
    """Return a scan of a delta rule with gates: a state is multiplied by a matrix for each head."""
    # Values of zero, read from an identity as the state before them, give that matrix as their last
    # state, and as outputs the queries that read the state before the tokens. They are further
    # columns of the values, so that one call gives all: what belongs to keys is computed once.

    def run(
        query: Tensor,
        key: Tensor,  # (B, L, key heads, K)
        value: Tensor,  # (B, L, heads, V)
        *,
        initial_state: None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        size = key.shape[-1]
        if not continues:
            out, last = scan(query, key, value, initial_state=None, **options)
            pass_on(StateMap(last, matrix=last.new_zeros((*last.shape[:-1], size))))
            return out, last
        # The columns of the identity have no values to learn.
        zeros = value.new_zeros((*value.shape[:-1], size))
        shape = len(value), value.shape[2], size
        one = torch.eye(size, dtype=torch.float32, device=value.device).expand((*shape, size))
        # Zero for the values, as in a scan from zero, and the identity beside it.
        start = torch.cat([one.new_zeros((*shape, value.shape[-1])), one], -1)
        outs, ends = scan(query, key, torch.cat([value, zeros], -1), initial_state=start, **options)
        out, reads = outs.split([value.shape[-1], size], -1)
        last, matrix = ends.split([value.shape[-1], size], -1)
        before = pass_on(StateMap(last, matrix=matrix))
        if before is None:
            return out, last
        added = torch.einsum("blhk,bhkv->blhv", reads.to(before.dtype), before)
        return out + added.to(out.dtype), last

    return run


def _lightning(
    copied: Callable[..., Any], masked: Callable[..., Any], pass_on: PassOn, layer: Any
) -> Callable[..., Any]:
    """Return a forward of lightning attention, whose scan is a loop within it."""
    # Queries, keys and values are seen where they are masked. A norm follows the loop, so its input
    # gets what a state adds. The map of the tokens is computed apart: the loop shows it too late.

    def run(*args: Any, **kwargs: Any) -> Any:
        seen: list[Tensor] = []

        def mask(x: Tensor, padding: Tensor | None) -> Tensor:
            seen.append(masked(x, padding))
            return seen[-1]

        def add(norm: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            added = _lightning_added(seen[0], layer, pass_on)
            return inputs if added is None else (inputs[0] + added.to(inputs[0].dtype),)

        hook = layer.norm.register_forward_pre_hook(add)
        try:
            return copied({MASKED: mask})(*args, **kwargs)
        finally:
            hook.remove()

    return run


def _lightning_added(x: Tensor, layer: Any, pass_on: PassOn) -> Tensor | None:
    """Return what the state before tokens adds, given their queries, keys and values `(B, L, -1)`.

    A state has one decay for each head, the same at each token.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    query, key, value = x.unflatten(-1, (layer.num_attention_heads, -1)).chunk(3, -1)
    count = torch.arange(1, x.shape[1] + 1, device=x.device)
    total = -layer.slope_rate.view(-1).to(x.dtype) * count.unsqueeze(-1)  # (L, heads)
    # What is left of each token's share at the end of these tokens.
    rest = (total[-1] - total).exp().unsqueeze(-1)
    # S = sum over tokens t of exp(total[L] - total[t]) * k[t] v[t]^T, which the loop of the layer
    # adds up block by block.
    state = torch.einsum("blhk,blhv->bhkv", key * rest, value)
    before = pass_on(StateMap(state, decay=total[-1].expand(len(x), -1)))
    if before is None:
        return None
    # What is left of the state before these tokens at each of them.
    left = query * total.exp().unsqueeze(-1)
    return torch.einsum("blhk,bhkv->blhv", left, before.to(left.dtype)).flatten(2)


# The global by which lightning attention masks padding, and what its forward reads.
MASKED = "apply_mask_to_padding_states"
LIGHTNING = (MASKED, "slope_rate", "set_linear_cache")

# The scans that are known, by the names of functions in files of transformers.
SCANS: dict[str, Callable[[Callable[..., Any], PassOn, bool], Callable[..., Any]]] = {
    "mamba2_chunk_scan": _mamba2,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba_selective_scan": _mamba1,
}
