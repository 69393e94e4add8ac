"""Tensors that describe a batch, as the planner wants them; each is converted once.

Note [Known tensors]: layers of a model pass the same boundaries again and again. What was made of
them is found by their address and shape, and used if their content is still the same: memory that
was written to since, or that belongs to another tensor by now, is converted again. Of boundaries
that are padded by repeating the last value only the head and that value are compared, so that this
costs the same for 8,192 tokens and for a million: writing into the padding alone goes unnoticed.
What is on a GPU is copied to the CPU in each call: nothing tells whether it was written to, as a
collective does not raise the version of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dtensor_ring.planning.lru import ByteStore
from dtensor_ring.planning.mask import Documents, as_documents
from dtensor_ring.planning.run_table import RunTable
from dtensor_ring.planning.slice_tables import LARGEST
from dtensor_ring.planning.slices import NUM_FIELDS, Slices


class _Known(NamedTuple):
    """The value made from a tensor, and the part of the tensor's content that decides it."""

    width: int
    """How many of its last dim's numbers are compared, beside the last one."""
    content: bytes
    value: Any

    @property
    def num_bytes(self) -> int:
        # The objects around them: a key, two tuples, arrays, and an entry of the store.
        return 1500 + len(self.content) + self.value.num_bytes

    def is_of(self, content: np.ndarray) -> bool:
        # After these columns, rows that ascend can only repeat their last value.
        return _compared(content, self.width) == self.content


def _compared(content: np.ndarray, width: int) -> bytes:
    return content[..., :width].tobytes() + content[..., -1:].tobytes()


_KNOWN: ByteStore[_Known] = ByteStore(max_bytes=32 << 20, size_of=lambda known: known.num_bytes)

INTEGERS = (torch.int32, torch.int64)


def documents_of(cu_seqlens: Tensor, name: str, batch: int, is_numbered: bool = False) -> Documents:
    """The boundaries `(D+1,)` or `(B, D+1)` as the planner wants them; errors use `name`.

    Args:
        cu_seqlens: int32 or int64, in global positions.
        name: of the argument.
        batch: the rows B that it may have.
        is_numbered: keep empty documents, because documents of keys are matched by number.

    Raises:
        ValueError: if they are not int32 or int64, of shape (D+1,) or (batch, D+1).
    """
    check_integers(cu_seqlens, name)
    if cu_seqlens.ndim not in (1, 2) or (cu_seqlens.ndim == 2 and len(cu_seqlens) != batch):
        raise ValueError(
            f"{name} must have shape (D+1,) or ({batch}, D+1), got {tuple(cu_seqlens.shape)}"
        )

    def convert(content: np.ndarray) -> Documents | None:
        return as_documents(content, name=name, keep_empty=is_numbered)

    return _converted(cu_seqlens, is_numbered, _width, convert)


def documents_of_both(
    queries: Tensor | None, keys: Tensor | None, batch: int
) -> tuple[Documents | None, Documents | None]:
    """The boundaries of queries, `cu_seqlens`, and of keys, `key_cu_seqlens`, if there are any.

    Raises:
        ValueError: if they are not int32 or int64, of shape (D+1,) or (batch, D+1).
    """
    # Documents of queries and keys match by their number, so empty ones count, too.
    is_numbered = keys is not None
    return (
        None if queries is None else documents_of(queries, "cu_seqlens", batch, is_numbered),
        None if keys is None else documents_of(keys, "key_cu_seqlens", batch, is_numbered),
    )


def _converted(
    x: Tensor,
    kind: object,
    width_of: Callable[[np.ndarray], int],
    convert: Callable[[np.ndarray], Any],
) -> Any:
    """The value made from a tensor, converted if that kind of it is not known; see the Note."""
    content = on_host(x).numpy()
    # By address first: reading all content in each call is what this avoids.
    key = x.data_ptr(), content.shape, content.strides, kind
    known = _KNOWN.get(key)
    if known is None or not known.is_of(content):
        value, width = convert(content), width_of(content)
        # Bytes, not the array: the tensor may be written to in place for the next batch.
        known = _KNOWN.put(key, _Known(width, _compared(content, width), value))
    return known.value


def _width(content: np.ndarray) -> int:
    """How many columns it takes until all rows have reached their last value."""
    if not content.size:
        return 0
    if (np.diff(content) < 0).any():
        return content.shape[-1]  # whoever plans with them refuses them
    # Bisection: the padding is not read.
    ends = [int(np.searchsorted(row, row[-1])) for row in np.atleast_2d(content)]
    return max(ends) + 1


def run_table(runs: Tensor, name: str = "runs") -> RunTable:
    """The positions that each rank holds, of the argument of that name.

    Raises:
        ValueError: if they are not int32 or int64, of shape (W, R, 2), do not ascend or overlap.
    """
    check_integers(runs, name)
    if runs.ndim != 3 or runs.shape[2] != 2:
        raise ValueError(
            f"{name} must hold start and length of the runs of each rank, shape (W, R, 2), got "
            f"{tuple(runs.shape)}; see sequence_runs"
        )
    return _converted(
        runs, name, lambda content: content.shape[-1], lambda content: RunTable(content, name)
    )


def starts_of(query_starts: Tensor, batch: int) -> tuple[int, ...]:
    """The position of the first query, for the whole batch or for each batch row.

    Raises:
        ValueError: if they are not int32 or int64, of shape (1,) or (batch,), or negative.
    """
    check_integers(query_starts, "query_starts")
    if query_starts.shape not in ((1,), (batch,)):
        raise ValueError(
            f"query_starts must have shape (1,) or ({batch},), got {tuple(query_starts.shape)}"
        )
    starts = tuple(on_host(query_starts).tolist())
    if min(starts, default=0) < 0 or max(starts, default=0) > LARGEST // 2:
        raise ValueError(f"query_starts must be from 0 to {LARGEST // 2}, got {list(starts)}")
    return starts


def slices_of_table(slices: Tensor, batch: int) -> Slices:
    """The slices `(N, 6)` or `(B, N, 6)` as the planner wants them, see `sequence_slices`.

    Raises:
        ValueError: if they are not int32 or int64, of shape (N, 6) or (batch, N, 6).
    """
    check_integers(slices, "slices")
    shape = tuple(slices.shape)
    if shape[-1:] != (NUM_FIELDS,) or shape[:-2] not in ((), (batch,)) or len(shape) < 2:
        raise ValueError(
            f"slices must have shape (N, {NUM_FIELDS}) or ({batch}, N, {NUM_FIELDS}), got {shape}; "
            "see sequence_slices"
        )
    return _converted(slices, "slices", lambda content: content.shape[-1], _slices)


def _slices(content: np.ndarray) -> Slices:
    """One table for rows that are alike: its tiles are one launch for all of them."""
    is_alike = content.ndim == 3 and len(content) > 1 and (content == content[:1]).all()
    return Slices.of_numbers(content[0] if is_alike else content)


def on_host(x: Tensor) -> Tensor:
    """The tensor itself if it is on the CPU, else a copy of it that is.

    Raises:
        ValueError: if a CUDA graph is captured, which would go on with the numbers of this moment.
    """
    if x.is_cpu:
        return x
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "cu_seqlens, runs, slices and their like must be on the CPU while a CUDA graph is "
            "captured: it is for these numbers only, whatever the tensors hold later; use .cpu()"
        )
    return x.cpu()


def check_integers(x: Tensor, name: str) -> None:
    """Refuse a tensor that holds no integers to plan the ring with.

    Raises:
        ValueError: if it is not int32 or int64, or has no content.
    """
    if x.dtype not in INTEGERS:
        raise ValueError(f"{name} must be int32 or int64, got {x.dtype}; use .int()")
    if x.device.type == "meta":
        raise ValueError(
            f"{name} must have content, with which the ring is planned, got a tensor on meta; "
            "make it on the CPU"
        )
