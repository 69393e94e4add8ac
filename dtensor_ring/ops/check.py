"""Checks of the ops' tensors, before anything is sent."""

from __future__ import annotations

from torch import Tensor


def check_inputs(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> None:
    """Refuse what ring attention cannot serve.

    Raises:
        ValueError: with what was given and what is supported.
    """
    tensors = {"query": query, "key": key, "value": value}
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(f"query, key and value must be (B, N, L, H), got {_shapes(tensors)}")
    # Named one by one: the error shows which of the three differs.
    for what in ("dtype", "device"):
        found = getattr(query, what), getattr(key, what), getattr(value, what)
        if not found[0] == found[1] == found[2]:
            listed = ", ".join(f"{name} {kind}" for name, kind in zip(tensors, found, strict=True))
            raise ValueError(f"query, key and value must have one {what}, got {listed}; use .to()")
    if not query.dtype.is_floating_point or query.dtype.itemsize < 2:
        raise ValueError(f"attention needs a floating dtype of 16 bits or more, got {query.dtype}")
    if query.shape[0] != key.shape[0] or key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"query, key and value disagree in batch, heads or length: {_shapes(tensors)}"
        )
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"query and key must have one head dim, got {_shapes(tensors)}")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"the query heads must be a multiple of the key heads, got {_shapes(tensors)}; "
            "grouped-query heads are shared in order and need not be repeated"
        )
    if sinks is not None and tuple(sinks.shape) != (query.shape[1],):
        raise ValueError(
            f"sinks must hold one logit per query head, shape ({query.shape[1]},), "
            f"got {tuple(sinks.shape)}; where heads are sharded, pass a DTensor or this rank's own"
        )
    if sinks is not None and sinks.device != query.device:
        raise ValueError(f"sinks must be on {query.device}, got {sinks.device}; use .to()")
    if sinks is not None and not sinks.is_floating_point():
        raise ValueError(f"sinks must have a floating dtype, got {sinks.dtype}; use .float()")


def _shapes(tensors: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
