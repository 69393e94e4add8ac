"""Decode attention of the layers of a model for one token: what they share is bound once."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring.decode.api import are_of_heads, decode_attention, known_options
from dtensor_ring.decode.call import BoundDecode, Combining, Ready, bound_decode, kept_decode
from dtensor_ring.decode.op import run_bound
from dtensor_ring.decode.run import Combine
from dtensor_ring.ops import nodes
from dtensor_ring.ops.checks import CALLER


class _Bound(NamedTuple):
    """A call that layers repeat.

    Attributes:
        call: the call.
        ready: what runs it on this rank.
        round: its messages, which each layer enters anew.
    """

    call: BoundDecode
    ready: Ready
    round: AbstractContextManager[Combine | None]


class SharedDecode:
    """Decode attention of layers that have the same keys' positions and the same new tokens.

    The first layer makes a call of `decode_attention`. The others find what was checked, planned
    and prepared for it by one look-up. Ranks compare each call, as those of `decode_attention`.

    Args:
        key_runs: as in `decode_attention`. Nobody may write to it while layers attend.
        mesh: the 1-D mesh of the axis; `None` if this rank holds all keys.
        kernel: the name of the block kernel.
        agree: integers that must be the same on all ranks. Nobody may write to them, either.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> attend = SharedDecode(torch.tensor([[[0, 9]]]), mesh)
        >>> q, k = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 9, 8)
        >>> [attend(q, k, k)[0].shape for layer in range(2)]
        [torch.Size([1, 4, 1, 8]), torch.Size([1, 4, 1, 8])]
    """

    def __init__(
        self,
        key_runs: Tensor,
        mesh: DeviceMesh | None,
        kernel: str | None = None,
        agree: Tensor | None = None,
    ) -> None:
        self._key_runs, self._mesh, self._kernel, self._agree = key_runs, mesh, kernel, agree
        self._bound: dict[Any, _Bound] = {}

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        sinks: Tensor | None = None,
        needs_lse: bool = True,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return `(out, lse)` of a layer, see `decode_attention`.

        Args:
            query: `(B, N, M, H)`.
            key: `(B, Nkv, C, H)`.
            value: `(B, Nkv, C, Hv)`.
            sinks: those of the layer.
            needs_lse: whether the lse is read; it may be `None` otherwise.
            options: other options of `decode_attention`.
        """
        if torch.compiler.is_compiling():
            return self._attend(query, key, value, sinks, options)
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            return self._attend(query, key, value, sinks, options)
        kind = _kind(query, key, value, sinks, options)
        # By hash, which for tensors is that of the object: `==` would compare their elements.
        bound = self._bound.get(kind)
        if bound is None:
            bound = self._first(kind, query, key, value, sinks, options)
        elif nodes.is_any_mode_on():  # it began after the first layer, see `_first`
            bound = None
        elif isinstance(bound.round, Combining):
            bound.round.again(CALLER.layer)
        if bound is None:
            return self._attend(query, key, value, sinks, options)
        call, ready, round = bound
        # Above autograd, which records nothing here: to enter below it costs more than its look.
        return run_bound(call, round, ready, query, key, value, sinks, needs_lse)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        return decode_attention(
            query,
            key,
            value,
            key_runs=self._key_runs,
            mesh=self._mesh,
            kernel=self._kernel,
            agree=self._agree,
            sinks=sinks,
            return_lse=True,
            **options,
        )

    def _first(
        self,
        kind: tuple[Any, ...] | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        options: dict[str, Any],
    ) -> _Bound | None:
        """Bind the call of a layer that is the first of its kind, if its options were checked."""
        if kind is None:
            return None
        boundaries, starts = options.get("cu_seqlens"), options.get("query_starts")
        integers = boundaries, None, self._key_runs, starts, self._agree
        names = "mask", "scale", "softcap", "merge"
        mask, scale, softcap, merge = map(options.get, names, (None, None, 0.0, None))
        asked = False, mask, scale, softcap, self._kernel, merge
        known = known_options(query, key, value, self._mesh, integers, asked)
        tensors = (query, key, value) if sinks is None else (query, key, value, sinks)
        if known is None or not nodes.is_plain(*tensors):
            return None
        before, after = known
        # Over an axis, keys grow with each token, so that no later call is equal to this one.
        bind = bound_decode if self._mesh is None else kept_decode
        call = bind((*integers, *before, sinks, *after), query, key, value)
        if not call.is_kept:
            return None
        ready = call.ready(query, key, value)
        # The line of the caller is that of all layers.
        round = call.checked(query, sys._getframe())
        found = self._bound[kind] = _Bound(call, ready, round)
        return found


def _kind(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, options: dict[str, Any]
) -> tuple[Any, ...] | None:
    """Return all that layers may differ in, `None` if this is no call that they repeat.

    Tensors among the options are those of one step: the same object has the same content.
    """
    if not type(query) is type(key) is type(value) is Tensor:
        return None
    if not (sinks is None or are_of_heads(sinks)):
        return None
    if query.is_nested or key.is_nested or value.is_nested:
        return None
    if "relative_bias" in options or "slices" in options:  # of each layer's own
        return None
    of_sinks = None if sinks is None else (sinks.shape, sinks.dtype, sinks.device)
    shapes = query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype
    return *shapes, query.device, key.device, value.device, of_sinks, *options.items()
