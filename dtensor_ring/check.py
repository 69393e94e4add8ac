"""What the ops refuse, before anything is sent."""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_ring.layout import RunTable
from dtensor_ring.plan import Documents


def check_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    grad_dtype: torch.dtype | None,
) -> None:
    """Refuse what no ring can serve.

    Raises:
        ValueError: with what was given and what is supported.
    """
    tensors = {"query": query, "key": key, "value": value}
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(f"query, key and value must be (B, N, L, H), got {_shapes(tensors)}")
    for what in ("dtype", "device"):
        found = [getattr(x, what) for x in tensors.values()]
        if found != found[:1] * 3:
            listed = ", ".join(f"{name} {kind}" for name, kind in zip(tensors, found, strict=True))
            raise ValueError(f"query, key and value must have one {what}, got {listed}; use .to()")
    if not _is_wide_enough(query.dtype):
        raise ValueError(f"attention needs a floating dtype of 16 bits or more, got {query.dtype}")
    if grad_dtype is not None and not _is_wide_enough(grad_dtype):
        raise ValueError(f"grad_dtype must be floating, 16 bits or more, got {grad_dtype}")
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


def _is_wide_enough(dtype: torch.dtype) -> bool:
    """Whether a ring computes with it."""
    return dtype.is_floating_point and dtype.itemsize >= 2


def documents_of(cu_seqlens: Tensor, name: str, batch: int, is_numbered: bool = False) -> Documents:
    """The boundaries as the planner wants them; errors call them by that name.

    Rows that are all alike are one. Without keys of other documents, whose numbers would have to
    match, empty documents are left out.

    Raises:
        ValueError: if they are not int32 on the CPU, of shape (D+1,) or (batch, D+1).
    """
    _check_host(cu_seqlens, name)
    if cu_seqlens.ndim not in (1, 2) or (cu_seqlens.ndim == 2 and len(cu_seqlens) != batch):
        raise ValueError(
            f"{name} must have shape (D+1,) or ({batch}, D+1), got {tuple(cu_seqlens.shape)}"
        )
    rows = cu_seqlens.unbind() if cu_seqlens.ndim == 2 else (cu_seqlens,)
    if not is_numbered:
        rows = [row.unique_consecutive() for row in rows]
    documents = tuple(tuple(row.tolist()) for row in rows)
    return documents[:1] if len(set(documents)) == 1 else documents


def run_table(runs: Tensor) -> RunTable:
    """The layout that was made for this batch.

    Raises:
        ValueError: if the runs are not int32 on the CPU, of shape (W, R, 2), or deal no sequence.
    """
    _check_host(runs, "runs")
    if runs.ndim != 3 or runs.shape[2] != 2:
        raise ValueError(
            "runs must hold start and length of the runs of each rank, shape (W, R, 2), got "
            f"{tuple(runs.shape)}; see sequence_runs"
        )
    rows = ((run for run in row if run[1]) for row in runs.tolist())
    return RunTable(tuple(tuple((start, length) for start, length in row) for row in rows))


def _check_host(x: Tensor, name: str) -> None:
    if x.device.type != "cpu":
        raise ValueError(
            f"{name} must be on the CPU, where the ring is planned, got {x.device}; "
            f"move it once per batch with {name}.cpu()"
        )
    if x.dtype != torch.int32:
        raise ValueError(f"{name} must be int32, got {x.dtype}; use .int()")
