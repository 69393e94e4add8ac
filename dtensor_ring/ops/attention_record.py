"""The call record of an op, as the ranks of its ring compare it: what records of all ops share."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dtensor_ring.agreement.call_record import CallRecord
from dtensor_ring.compute.kernels import Scores
from dtensor_ring.planning.changing import ChangingDocuments
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.mask import Documents, Mask
from dtensor_ring.planning.run_table import MARKED, RunTable
from dtensor_ring.planning.slices import Slices


class AttentionFacts(NamedTuple):
    """The fields that all attention calls have in their records."""

    direction: str
    dtype: torch.dtype
    device: str
    batch: int
    num_heads: int
    head_dim: int
    num_key_heads: int
    value_head_dim: int
    sinks: torch.dtype | None
    scale: float
    softcap: float
    kernel: str | None
    dropout_p: float


def attention_facts(
    direction: str, query: Tensor, value: Tensor, scores: Scores, heads: tuple[int, int]
) -> AttentionFacts:
    """Return what a record says of an attention of `heads` heads of queries and of keys."""
    # The planner knows the mask. The shape of sinks follows from the query's heads.
    _, scale, softcap, sinks, kernel, dropout_p, *_ = scores
    return AttentionFacts(
        direction=direction,
        dtype=query.dtype,
        device=query.device.type,
        batch=query.shape[0],
        num_heads=heads[0],
        head_dim=query.shape[3],
        num_key_heads=heads[1],
        value_head_dim=value.shape[3],
        sinks=None if sinks is None else sinks.dtype,
        scale=scale,
        softcap=softcap,
        kernel=kernel,
        dropout_p=dropout_p,
    )


class RequestFields(Protocol):
    """What the planner is asked by a call of any op of attention."""

    @property
    def seq_len(self) -> int: ...
    @property
    def mask(self) -> Mask: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def documents(self) -> Documents | None: ...
    @property
    def slices(self) -> Slices | None: ...


def record_of(
    attention: AttentionFacts, request: RequestFields, own: dict[str, object]
) -> CallRecord:
    """Build a call record, see `fields_of`."""
    return CallRecord(fields_of(attention, request, own))


def fields_of(
    attention: AttentionFacts, request: RequestFields, own: dict[str, object]
) -> dict[str, str]:
    """Return the fields of a call record: those that all ops share, and an op's own."""
    fields = {
        "direction": attention.direction,
        "dtype": attention.dtype,
        "device": attention.device,
        "batch": attention.batch,
        "query heads": attention.num_heads,
        "key heads": attention.num_key_heads,
        "head dim": attention.head_dim,
        "value head dim": attention.value_head_dim,
        "tokens": request.seq_len,
        "mask": request.mask,
        "scale": attention.scale,
        "softcap": attention.softcap,
        "sinks": attention.sinks,
        "kernel": attention.kernel,
        "dropout_p": attention.dropout_p,
        "layout": layout_text(request.layout),
        "cu_seqlens": boundaries_text(request.documents),
        "slices": slices_text(request.slices),
    }
    return {name: str(value) for name, value in (fields | own).items()}


def layout_text(layout: Layout) -> str:
    """Return the spec of a layout; one that belongs to a batch has its name only."""
    return layout.name if layout.per_batch else layout.spec


def boundaries_text(documents: Documents | None) -> str:
    """Describe the boundaries of each batch row."""
    if isinstance(documents, ChangingDocuments):
        return f"those of a DocumentRoom, at most {len(documents.bounds) - 1}"
    return "none" if documents is None else ", ".join(map(numbers_text, documents.arrays))


def slices_text(slices: Slices | None) -> str:
    """Describe the slices of each batch row."""
    if slices is None:
        return "none"
    rows = slices.numbers if slices.numbers.ndim == 3 else [slices.numbers]
    return ", ".join(numbers_text(row.reshape(-1)) for row in rows)


def runs_text(layout: Layout | None) -> str:
    """Describe the start and length of each run, rank by rank, and the table's mark."""
    if not isinstance(layout, RunTable):
        return "none"
    text = numbers_text(layout.numbers.reshape(-1))
    if not layout.mark:
        return text
    return f"{text}, sequences selected or kv_dtype ({layout.mark - MARKED:x})"


MAX_NUMBERS = 24


def numbers_text(listed: np.ndarray) -> str:
    """Describe a list of numbers; a long one by both ends and a digest."""
    if listed.size <= MAX_NUMBERS:
        return str(listed.tolist())
    begin, end = (", ".join(map(str, part.tolist())) for part in (listed[:8], listed[-2:]))
    digest = blake2b(np.ascontiguousarray(listed).tobytes(), digest_size=6).hexdigest()
    return f"[{begin}, ..., {end}] ({listed.size:,} numbers, digest {digest})"
