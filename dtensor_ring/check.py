"""What the ops refuse, before anything is sent."""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_ring.plan import Documents


def check_shapes(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> None:
    """Refuse what no ring can serve.

    Raises:
        ValueError: with what was given and what is supported.
    """
    tensors = {"query": query, "key": key, "value": value}
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
    if any(x.ndim != 4 for x in tensors.values()):
        raise ValueError(f"query, key and value must be (B, N, L, H), got {shapes}")
    for what in ("dtype", "device"):
        found = {name: getattr(x, what) for name, x in tensors.items()}
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{name} {kind}" for name, kind in found.items())
            raise ValueError(f"query, key and value must have one {what}, got {listed}; use .to()")
    if not query.dtype.is_floating_point or query.dtype.itemsize < 2:
        raise ValueError(f"attention needs a floating dtype of 16 bits or more, got {query.dtype}")
    if query.shape[0] != key.shape[0] or key.shape[:3] != value.shape[:3]:
        raise ValueError(f"query, key and value disagree in batch, heads or length: {shapes}")
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"query and key must be shards of one sequence, got {shapes}")
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"query and key must have one head dim, got {shapes}")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"the query heads must be a multiple of the key heads, got {shapes}; "
            "grouped-query heads are shared in order and need not be repeated"
        )
    if sinks is not None and tuple(sinks.shape) != (query.shape[1],):
        raise ValueError(
            f"sinks must hold one logit per query head, shape ({query.shape[1]},), "
            f"got {tuple(sinks.shape)}"
        )
    if sinks is not None and sinks.device != query.device:
        raise ValueError(f"sinks must be on {query.device}, got {sinks.device}; use .to()")
    if sinks is not None and not sinks.is_floating_point():
        raise ValueError(f"sinks must have a floating dtype, got {sinks.dtype}; use .float()")


def documents_of(cu_seqlens: Tensor, batch: int) -> Documents:
    """The boundaries as the planner wants them.

    Raises:
        ValueError: if they are not int32 on the CPU, of shape (D+1,) or (batch, D+1).
    """
    if cu_seqlens.device.type != "cpu":
        raise ValueError(
            f"cu_seqlens must be on the CPU, where the ring is planned, got {cu_seqlens.device}; "
            "move it once per batch with cu_seqlens.cpu()"
        )
    if cu_seqlens.dtype != torch.int32:
        raise ValueError(f"cu_seqlens must be int32, got {cu_seqlens.dtype}; use .int()")
    if cu_seqlens.ndim not in (1, 2) or (cu_seqlens.ndim == 2 and len(cu_seqlens) != batch):
        raise ValueError(
            f"cu_seqlens must have shape (D+1,) or ({batch}, D+1), got {tuple(cu_seqlens.shape)}"
        )
    rows = cu_seqlens.tolist()
    return tuple(map(tuple, rows)) if cu_seqlens.ndim == 2 else (tuple(rows),)
