"""Converts the tensors that describe a batch for the planner, each of them once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dtensor_ring.compute.capture import refuse_capture
from dtensor_ring.planning.changing import ChangingDocuments
from dtensor_ring.planning.lru import ByteStore
from dtensor_ring.planning.mask import Documents, as_documents
from dtensor_ring.planning.run_table import RunTable
from dtensor_ring.planning.slice_tables import LARGEST
from dtensor_ring.planning.slices import NUM_FIELDS, Slices


def run_table(runs: Tensor, name: str = "runs") -> RunTable:
    """Convert the runs of each rank; `name` is the argument's name, for errors.

    Raises:
        ValueError: if they are not int32 or int64, of shape (W, R, 2), do not ascend or overlap.
    """
    check_integers(runs, name)
    if runs.ndim != 3 or runs.shape[2] != 2:
        raise ValueError(
            f"{name} must hold start and length of the runs of each rank, shape (W, R, 2), got "
            f"{tuple(runs.shape)}; see sequence_runs"
        )
    return _converted(runs, name, partial(RunTable, argument=name))


def know_runs(runs: Tensor, table: RunTable) -> None:
    """Keep the table that these runs were made of, so that they are not converted."""
    content = runs.numpy()
    _keep(_address(content, table.argument, runs), content, content.shape[-1], table)


def _keep(key: object, content: np.ndarray, width: int, value: Any) -> _KnownBoundaries:
    """Keep a value under the key of the tensor with this content."""
    # Bytes, not the array: the tensor may be written to in place for the next batch.
    compared = _compared(content, width)
    # About 1,500 bytes of overhead: the key, two tuples, the arrays, and the store's entry.
    known = _KnownBoundaries(width, compared, value, 1500 + len(compared) + value.num_bytes)
    return _KNOWN.put(key, known)


def _address(content: np.ndarray, kind: object, x: Tensor) -> tuple[object, ...]:
    """Return the key of a tensor in the store of known ones."""
    return x.data_ptr(), content.shape, content.strides, kind


# Note [Known tensors]: the layers of a model pass the same boundaries again and again. The
# converted value is looked up by address and shape, and used if the content is still the same.
# Memory that was written to, or that belongs to another tensor by now, is converted again. If
# boundaries are padded by repeating the last value, only their head and that value are compared.
# This costs the same for 8,192 tokens and for a million, but a write into the padding alone goes
# unnoticed. Tensors on a GPU are copied to the CPU in each call: tensor versions would not show
# every write, because collectives do not raise them.
class _KnownBoundaries(NamedTuple):
    """The value made from a tensor, and the part of the content that decides it.

    Attributes:
        width: how many columns of the last dim are compared, besides the last one.
        content: the compared columns.
        value: what they were converted to.
        num_bytes: the memory of all.
    """

    width: int
    content: bytes
    value: Any
    num_bytes: int

    def is_of(self, content: np.ndarray) -> bool:
        # Behind these columns, ascending rows can only repeat their last value.
        return _compared(content, self.width) == self.content


def _compared(content: np.ndarray, width: int) -> bytes:
    if width == content.shape[-1]:  # the last column is one of them
        return content.tobytes()
    return content[..., :width].tobytes() + content[..., -1:].tobytes()


_KNOWN: ByteStore[_KnownBoundaries] = ByteStore(max_bytes=32 << 20, size_of=attrgetter("num_bytes"))

# Documents that change, by the tensor that stands for them; see Note [Changing documents].
_CHANGING: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def know_changing(cu_seqlens: Tensor, documents: ChangingDocuments) -> None:
    """Let a tensor stand for documents that change, whatever it holds."""
    _CHANGING[cu_seqlens] = documents


INTEGERS = (torch.int32, torch.int64)


def documents_of(cu_seqlens: Tensor, name: str, batch: int, is_numbered: bool = False) -> Documents:
    """Convert boundaries `(D+1,)` or `(B, D+1)` for the planner.

    Args:
        cu_seqlens: int32 or int64, in global positions.
        name: the argument's name, for errors.
        batch: the number of batch rows B.
        is_numbered: keep empty documents, because documents of keys are matched by number.

    Raises:
        ValueError: if they are not int32 or int64, of shape (D+1,) or (batch, D+1).
    """
    check_integers(cu_seqlens, name)
    if cu_seqlens.ndim not in (1, 2) or (cu_seqlens.ndim == 2 and len(cu_seqlens) != batch):
        raise ValueError(
            f"{name} must have shape (D+1,) or ({batch}, D+1), got {tuple(cu_seqlens.shape)}"
        )

    changing = _CHANGING.get(cu_seqlens) if _CHANGING else None
    if changing is not None:
        if is_numbered:
            raise ValueError("a DocumentRoom has no key_cu_seqlens; pass cu_seqlens alone")
        return changing

    def convert(content: np.ndarray) -> Documents | None:
        return as_documents(content, name=name, keep_empty=is_numbered)

    return _converted(cu_seqlens, is_numbered, convert, _width)


def documents_of_both(
    queries: Tensor | None, keys: Tensor | None, batch: int
) -> tuple[Documents | None, Documents | None]:
    """Convert the boundaries of queries, `cu_seqlens`, and of keys, `key_cu_seqlens`.

    Raises:
        ValueError: if they are not int32 or int64, of shape (D+1,) or (batch, D+1).
    """
    # Documents of queries and keys match by number, so empty ones must stay.
    is_numbered = keys is not None
    return (
        None if queries is None else documents_of(queries, "cu_seqlens", batch, is_numbered),
        None if keys is None else documents_of(keys, "key_cu_seqlens", batch, is_numbered),
    )


def _converted(
    x: Tensor,
    kind: object,
    convert: Callable[[np.ndarray], Any],
    width_of: Callable[[np.ndarray], int] | None = None,
) -> Any:
    """Return the converted value of a tensor; see Note [Known tensors]."""
    content = on_host(x).numpy()
    # Look up by address first, to avoid reading all content in each call.
    key = _address(content, kind, x)
    known = _KNOWN.get(key)
    if known is None or not known.is_of(content):
        value = convert(content)
        width = content.shape[-1] if width_of is None else width_of(content)
        known = _keep(key, content, width, value)
    return known.value


def _width(content: np.ndarray) -> int:
    """Return the number of columns after which each row only repeats its last value."""
    if not content.size:
        return 0
    if (np.diff(content) < 0).any():
        return content.shape[-1]  # the planner refuses them
    # Bisection does not read the padding.
    ends = [int(np.searchsorted(row, row[-1])) for row in np.atleast_2d(content)]
    return max(ends) + 1


def starts_of(query_starts: Tensor, batch: int) -> tuple[int, ...]:
    """Return the position of the first query, for the whole batch or for each batch row.

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
    """Convert slices `(N, 6)` or `(B, N, 6)` for the planner, see `sequence_slices`.

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
    return _converted(slices, "slices", _slices)


def _slices(content: np.ndarray) -> Slices:
    """Convert slices; equal rows become one table, whose tiles take one launch for all rows."""
    is_alike = content.ndim == 3 and len(content) > 1 and (content == content[:1]).all()
    return Slices.of_numbers(content[0] if is_alike else content)


def on_host(x: Tensor) -> Tensor:
    """Return the tensor on the CPU, copied if necessary.

    Raises:
        RuntimeError: during the capture of a CUDA graph, which would keep the present content.
    """
    if x.is_cpu:
        return x
    refuse_capture(
        x.device,
        "cu_seqlens, runs, slices or their like are on the GPU, where the host cannot read them",
        "pass them on the CPU, by .cpu() before: the graph is for these numbers only",
    )
    return x.cpu()


def check_integers(x: Tensor, name: str) -> None:
    """Refuse a tensor without integers that the ring can be planned with.

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
