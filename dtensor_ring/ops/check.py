"""Checks of the ops' tensors, before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Query, key and value.
Tensors = tuple[Tensor, Tensor, Tensor]
STRIDED = torch.strided


def check_strided(name: str, x: Tensor) -> None:
    """Refuse a tensor whose memory is not described by strides.

    Raises:
        ValueError: if it is nested, sparse or in another library's layout.
    """
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else x.layout
        dense = "torch.nested.to_padded_tensor" if x.is_nested else ".to_dense()"
        raise ValueError(f"{name} must be a dense, strided tensor, got a {kind} one; use {dense}")


def check_inputs(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> None:
    """Refuse inputs that ring attention does not support.

    Raises:
        ValueError: says what was given and what is supported.
    """
    tensors = query, key, value
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(f"query, key and value must be (B, N, L, H), got {_shapes(tensors)}")
    dtype = query.dtype
    if not dtype == key.dtype == value.dtype:
        raise ValueError(_differ("dtype", tensors))
    if not query.device == key.device == value.device:
        raise ValueError(_differ("device", tensors))
    if not query.layout is key.layout is value.layout is STRIDED:
        for name, x in zip(_NAMES, tensors, strict=True):
            check_strided(name, x)
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(f"attention needs a floating dtype of 16 bits or more, got {dtype}")
    # Each access to `shape` builds a new tuple, so read it once.
    batch, num_heads, _, head_dim = query.shape
    key_batch, num_key_heads, _, key_head_dim = key.shape
    if batch != key_batch or key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"query, key and value disagree in batch, heads or length: {_shapes(tensors)}"
        )
    if head_dim != key_head_dim:
        raise ValueError(f"query and key must have one head dim, got {_shapes(tensors)}")
    if num_key_heads == 0 or num_heads % num_key_heads:
        raise ValueError(
            f"the query heads must be a multiple of the key heads, got {_shapes(tensors)}; "
            "grouped-query heads are shared in order and need not be repeated"
        )
    if sinks is not None:
        check_sinks(query, sinks)


def check_exchanged(tensors: Sequence[Tensor]) -> None:
    """Refuse tensors that cannot be exchanged in one message.

    Raises:
        ValueError: says what was given and what is supported.
    """
    if not tensors or any(x.ndim != 4 for x in tensors):
        found = _listed(tensors) or "none"
        raise ValueError(f"tensors must be one or more (B, N, L, H), got {found}")
    first, *others = tensors
    # A compiler's sizes can be compared, but not collected in a set.
    if any(x.shape[0] != first.shape[0] or x.shape[2] != first.shape[2] for x in others):
        raise ValueError(f"tensors must have one batch size and one length, got {_listed(tensors)}")
    if any(x.device != first.device for x in others):
        devices = ", ".join(str(x.device) for x in tensors)
        raise ValueError(f"tensors must be on one device, got {devices}; use .to()")
    for x in tensors:
        check_strided("tensors", x)


def _listed(tensors: Sequence[Tensor]) -> str:
    return ", ".join(str(tuple(x.shape)) for x in tensors)


def check_num_queries(query: Tensor, largest: int) -> None:
    """Refuse no queries, and more than every rank should compute redundantly.

    Raises:
        ValueError: says the number.
    """
    if not 1 <= query.shape[2] <= largest:
        raise ValueError(
            f"query must have 1 to {largest} tokens to decode, got {query.shape[2]}; more are for "
            "ring_attention, which deals them to the ranks"
        )


def check_sinks(query: Tensor, sinks: Tensor) -> None:
    """Refuse sinks unless they are one logit for each query head."""
    if tuple(sinks.shape) != (query.shape[1],):
        raise ValueError(
            f"sinks must hold one logit per query head, shape ({query.shape[1]},), "
            f"got {tuple(sinks.shape)}; where heads are sharded, pass a DTensor or this rank's own"
        )
    if sinks.device != query.device:
        raise ValueError(f"sinks must be on {query.device}, got {sinks.device}; use .to()")
    if not sinks.is_floating_point() or sinks.dtype.itemsize < 2:
        raise ValueError(
            f"sinks must have a floating dtype of 16 bits or more, got {sinks.dtype}; use .float()"
        )


_NAMES = "query", "key", "value"


def _shapes(tensors: Tensors) -> str:
    return ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip(_NAMES, tensors, strict=True))


def _differ(what: str, tensors: Tensors) -> str:
    # The error names all three, to show which one differs.
    found = zip(_NAMES, tensors, strict=True)
    listed = ", ".join(f"{name} {getattr(x, what)}" for name, x in found)
    return f"query, key and value must have one {what}, got {listed}; use .to()"
