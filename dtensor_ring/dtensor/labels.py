"""Makes the labels of a language model, before its tokens are sharded."""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_ring.ops.checks import check_strided
from dtensor_ring.planning.ranges import as_int

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# The label of a token without a target, as in `torch.nn.functional.cross_entropy`.
IGNORE_INDEX = -100


def next_token_labels(
    tokens: Tensor, cu_seqlens: Tensor | None = None, ignore_index: int = IGNORE_INDEX
) -> Tensor:
    """Return the next token of each token within its document.

    Shift the whole sequence, then shard it: the next token may be on another rank.

    Args:
        tokens: `(B, S)` or `(S,)`, the whole sequence.
        cu_seqlens: boundaries of packed documents in tokens, `(D+1,)` or `(B, D+1)`, as in
            `ring_attention`; without them, each row is one document.
        ignore_index: the label of the last token of a document.

    Returns:
        The labels, of the same shape and dtype.

    Raises:
        TypeError: if `tokens` or `cu_seqlens` are not tensors of integers.
        ValueError: if they have a wrong shape, or a boundary is not in the sequence.

    Example:
        >>> next_token_labels(torch.tensor([5, 6, 7, 8]), torch.tensor([0, 2, 4]))
        tensor([   6, -100,    8, -100])
    """
    _check(tokens, cu_seqlens)
    _check_label(tokens, as_int("ignore_index", ignore_index))
    labels = torch.nn.functional.pad(tokens, (0, 1), value=ignore_index)[..., 1:]
    if cu_seqlens is None:
        return labels
    # The token before a boundary is the last of its document; empty documents repeat a boundary.
    ends = cu_seqlens[..., 1:].to(tokens.device, torch.int64)
    rows, seq_len = tokens.shape[:-1], tokens.shape[-1]
    is_last = tokens.new_zeros(*rows, seq_len + 1, dtype=torch.bool)
    is_last.scatter_(-1, ends.expand(*rows, -1), True)
    return labels.masked_fill(is_last[..., 1:], ignore_index)


def _check_label(tokens: Tensor, ignore_index: int) -> None:
    """Refuse a label that the dtype of the tokens cannot hold: it would wrap around."""
    bounds = torch.iinfo(tokens.dtype)
    if not bounds.min <= ignore_index <= bounds.max:
        raise ValueError(
            f"ignore_index must be from {bounds.min} to {bounds.max} beside tokens of "
            f"{tokens.dtype}, got {ignore_index}"
        )


def _check(tokens: Tensor, cu_seqlens: Tensor | None) -> None:
    for name, x in (("tokens", tokens), ("cu_seqlens", cu_seqlens)):
        if x is None and name == "cu_seqlens":
            continue
        if not isinstance(x, Tensor) or x.dtype not in INTEGERS:
            given = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name} must be a tensor of integers, got {given}")
        check_strided(name, x)
    if tokens.ndim not in (1, 2):
        raise ValueError(f"tokens must be (B, S) or (S,), got {tuple(tokens.shape)}")
    if cu_seqlens is None:
        return
    if cu_seqlens.is_meta:
        raise ValueError("cu_seqlens must be a tensor with content, got one on meta")
    rows = tokens.shape[:-1]
    if cu_seqlens.ndim != 1 and cu_seqlens.shape[:-1] != rows:
        raise ValueError(
            f"cu_seqlens must be (D+1,) or {(*rows, 'D+1')} for tokens {tuple(tokens.shape)}, got "
            f"{tuple(cu_seqlens.shape)}"
        )
    if cu_seqlens.numel() and not 0 <= cu_seqlens.min() <= cu_seqlens.max() <= tokens.shape[-1]:
        raise ValueError(
            f"cu_seqlens must lie in a sequence of {tokens.shape[-1]} tokens, got "
            f"{cu_seqlens.min()} to {cu_seqlens.max()}"
        )
