"""One embedding for each document of a sharded sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtensor_ring import sum_over_sequence
from dtensor_ring.extension import positions_of, tokens_of


class DocumentSpans(NamedTuple):
    """Where documents are: of each its row, its first position, and that after its last one."""

    rows: Tensor
    begins: Tensor
    ends: Tensor


POOLINGS = ("last", "mean")


def pool_documents(
    hidden: Tensor,
    pooling: str = "mean",
    *,
    attention_mask: Tensor | None = None,
    cu_seq_lens: Tensor | None = None,
) -> Tensor:
    """Return one embedding for each document, the same on every rank.

    Each rank adds up its own tokens, and one sum over the axis joins them: no rank has the whole
    sequence. A loss of the embeddings has the gradients of one process; they average over the axis.

    Args:
        hidden: the hidden states of a model under a plan, `(B, S, E)`, or whole ones.
        pooling: "mean" of the tokens of a document, or its "last" token.
        attention_mask: 1 for the tokens of each row and 0 for padding on its left or right,
            `(B, S)`, the same on every rank. Each row is a document.
        cu_seq_lens: where the documents of one packed row begin, and the last one ends, `(D+1,)`.

    Returns:
        Embeddings in the dtype of the states, `(B, E)`; of a packed row `(D, E)`.

    Raises:
        ValueError: if the pooling is unknown, both ways to say documents are given, boundaries are
            not ascending within one row, or the states are no outputs of a plan.

    Example:
        >>> hidden = torch.arange(8.0).view(1, 4, 2)
        >>> pool_documents(hidden, cu_seq_lens=torch.tensor([0, 1, 4])).tolist()
        [[0.0, 1.0], [4.0, 5.0]]
    """
    if pooling not in POOLINGS:
        raise ValueError(f"unknown pooling {pooling!r}; known ones are {', '.join(POOLINGS)}")
    spans = _spans(hidden, attention_mask, cu_seq_lens)
    if pooling == "last":
        return hidden[spans.rows, spans.ends - 1]
    states, positions = _own(hidden)
    total = _sums(states, positions, spans, hidden.shape[1])
    if isinstance(hidden, DTensor):
        total = sum_over_sequence(total, hidden.device_mesh)
    return (total / (spans.ends - spans.begins)[:, None]).to(hidden.dtype)


def _spans(hidden: Tensor, mask: Tensor | None, cu_seq_lens: Tensor | None) -> DocumentSpans:
    num_rows, seq_len = hidden.shape[:2]
    if mask is not None and cu_seq_lens is not None:
        raise ValueError("attention_mask and cu_seq_lens both say documents; leave one out")
    if cu_seq_lens is not None:
        bounds = cu_seq_lens.long()
        is_ascending = bounds.ndim == 1 and bool((bounds.diff() > 0).all()) and len(bounds) > 1
        if num_rows != 1 or not is_ascending or bounds[0] < 0 or bounds[-1] > seq_len:
            raise ValueError(
                f"cu_seq_lens must be ascending boundaries of documents in one row of {seq_len} "
                f"tokens, got {cu_seq_lens.tolist()} and {num_rows} rows"
            )
        bounds = bounds.to(hidden.device)
        return DocumentSpans(torch.zeros_like(bounds[1:]), bounds[:-1], bounds[1:])
    rows = torch.arange(num_rows, device=hidden.device)
    if mask is None:
        return DocumentSpans(rows, torch.zeros_like(rows), torch.full_like(rows, seq_len))
    if mask.shape != (num_rows, seq_len):
        raise ValueError(
            f"attention_mask must be {(num_rows, seq_len)}, (B, S), got {tuple(mask.shape)}"
        )
    # A row begins with its first token that is no padding.
    begins = mask.to(hidden.device, torch.int8).argmax(1)
    return DocumentSpans(rows, begins, begins + mask.to(hidden.device, torch.int64).sum(1))


def _own(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's hidden states, and the positions of their tokens."""
    if not isinstance(hidden, DTensor):
        return hidden, torch.arange(hidden.shape[1], device=hidden.device)
    tokens = tokens_of(hidden.device_mesh)
    if tokens is None or not tokens.averages or not hidden.placements[0].is_shard(1):
        raise ValueError(
            "hidden states to pool are outputs of a model under a plan, sharded along dim 1, or "
            "whole tensors; of others say unshard_sequence(x, 1)"
        )
    rank, size = tokens.mesh.get_local_rank(), tokens.mesh.size()
    runs = tokens.layout.runs(rank, size, hidden.shape[1])
    return hidden.to_local(), positions_of(runs, hidden.device)


def _sums(states: Tensor, positions: Tensor, spans: DocumentSpans, seq_len: int) -> Tensor:
    """Add up the states of each document, `(B, L, E)` to `(D, E)`, in float32 at least."""
    rows = torch.arange(len(states), device=states.device)[:, None]
    places = (rows * seq_len + positions).flatten()
    begins, ends = (spans.rows * seq_len + x for x in (spans.begins, spans.ends))
    # Documents ascend, and the last one that begins at or before a token is the only candidate.
    number = torch.searchsorted(begins, places, right=True) - 1
    is_outside = (number < 0) | (places >= ends[number])
    number = number.masked_fill(is_outside, len(begins))  # as padding is
    dtype = torch.promote_types(states.dtype, torch.float32)
    total = torch.zeros(len(begins) + 1, states.shape[2], dtype=dtype, device=states.device)
    return total.index_add(0, number, states.flatten(0, 1).to(dtype))[:-1]
