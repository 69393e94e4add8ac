"""What an attention mask says of a cached sequence: the padding on the left of its rows."""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_plans.huggingface.core.documents import has_content, require
from parallel_plans.huggingface.core.padding import check_ones_and_zeros


def left_padding(attention_mask: Tensor, num_tokens: int) -> Tensor | None:
    """Return the left padding of each row of a cached sequence, `(B,)` on the CPU, or `None`.

    Raises:
        ValueError: if the mask does not cover all tokens, cached and new, has other numbers than 0
            and 1, or other holes.
    """
    if attention_mask.ndim != 2 or attention_mask.shape[1] != num_tokens:
        raise ValueError(
            f"attention_mask must be (B, {num_tokens}), of all tokens that are cached or new, got "
            f"{tuple(attention_mask.shape)}"
        )
    if _is_of_ones(attention_mask):
        return None
    check_ones_and_zeros(attention_mask)
    is_token = attention_mask.bool().cpu()
    # The place of the first 1 is the number of zeros before it. A row may be padding so far: its
    # tokens come with a later chunk of the prompt.
    padding = is_token.int().argmax(-1).masked_fill(~is_token.any(-1), num_tokens)
    require(
        (is_token.sum(-1) == num_tokens - padding).all(),
        "attention_mask must have no padding but on the left of each row, if there is a cache: "
        'tokenizer.padding_side = "left"; generate takes tokens of the pad id for padding, unless '
        "it is given an attention_mask",
    )
    return padding if padding.any() else None


def check_same_padding(given: Tensor | None, cached: Tensor | None, num_cached: int) -> None:
    """Refuse a mask that shows cached padding, or hides cached tokens.

    Args:
        given: the left padding of each row by the mask of all tokens, `(B,)`; `None` without any.
        cached: the same by the mask with which the cached tokens came.
        num_cached: the number of cached tokens.

    Raises:
        ValueError: if a row has another number of cached tokens that are padding.
    """
    like = cached if given is None else given
    if like is None or not num_cached:
        return
    now, before = (
        torch.zeros_like(like) if x is None else x.clamp(max=num_cached) for x in (given, cached)
    )
    # A wrong number of rows is refused later.
    if now.shape == before.shape and not torch.equal(now, before):
        raise ValueError(
            f"attention_mask hides {now.tolist()} of the cached tokens at the start of the rows, "
            f"and {before.tolist()} were hidden when they came, which cannot change: give the same "
            "zeros before the ones of new tokens, or call cache.reset()"
        )


def _is_of_ones(mask: Tensor) -> bool:
    """Return whether a mask on the CPU is seen to hide nothing, as that of most tokens."""
    # A device would have to be waited for, and is read once by what follows.
    is_read = type(mask) is Tensor and mask.is_cpu and mask.dtype in (torch.int64, torch.bool)
    if not is_read or not has_content(mask):
        return False
    # Two ops: numpy's take twice as long where they run once a token.
    return torch.equal(mask, torch.ones_like(mask))
