"""What an attention mask of ones and zeros says: which tokens are padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel_plans.huggingface.core.documents import blocks, has_content, require

ONES_AND_ZEROS = (
    "attention_mask must be 1 for tokens and 0 for padding, and this one has other numbers{}: to "
    "mark packed documents, leave it out, and give position_ids that start again with each of "
    "them, or their boundaries as cu_seq_lens_q and cu_seq_lens_k"
)


def check_ones_and_zeros(attention_mask: Any) -> None:
    """Refuse a mask that numbers documents: transformers reads it as true and false.

    Raises:
        ValueError: if a mask `(B, S)` has other numbers than 0 and 1.
    """
    is_mask = isinstance(attention_mask, Tensor) and attention_mask.ndim == 2
    if not is_mask or attention_mask.dtype == torch.bool:
        return
    # A compiled graph cannot read numbers on the host, so there the check is one of its ops.
    is_traced = torch.compiler.is_compiling()
    if not is_traced and not has_content(attention_mask):
        return
    wrong = [((x != 0) & (x != 1)).any() for x in blocks(attention_mask)]
    is_right = ~torch.stack(wrong).any()
    got = "" if is_traced or is_right else f", such as {_number_of(attention_mask)}"
    require(is_right, ONES_AND_ZEROS.format(got))


def _number_of(attention_mask: Tensor) -> float:
    """Return a number of the mask that is not 0 or 1."""
    return attention_mask[(attention_mask != 0) & (attention_mask != 1)][0].item()
