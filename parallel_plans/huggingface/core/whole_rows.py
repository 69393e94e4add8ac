"""Rows that are one document from their first token on, as layers need that count places in a row.

An index of blocks counts keys by their places in the row, and queries by `position_ids`. With
padding on the left or packed documents these differ, and the stock model chooses other blocks than
for each document alone. Pools would begin in each row, or in each document, at other tokens, and
some stock models pool tokens of several documents.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_plans.huggingface.core.documents import blocks, require
from parallel_plans.huggingface.core.patterns import AXES_WITH_TEXT

WHOLE_ROWS = (
    "layers of this model choose blocks or pools of keys, which are counted from the start of the "
    "row, so over a sharded sequence each row must be one document: without padding on the left, "
    "packed documents, or position_ids that do not count from 0. In other rows they would begin at "
    "other tokens than in each document alone; put one document into each row, with padding after "
    "it"
)


def are_whole(mask: Tensor | None, positions: Tensor | None, begin: int = 0) -> Tensor:
    """Return whether rows begin with a token, and positions count places, `()`.

    Args:
        mask: 1 for tokens and 0 for padding, `(B, L)`.
        positions: position ids, `(B, L)`; those of padding do not count. Of four axes the first
            counts tokens, and of three none does.
        begin: the place in the row of the first of these tokens.

    Example:
        >>> are_whole(torch.tensor([[1, 1, 0]]), torch.tensor([[0, 1, 1]]))
        tensor(True)
    """
    found = [] if mask is None or begin or not mask.numel() else [mask[:, 0].bool().all()]
    if positions is not None and positions.ndim == 3:
        positions = positions[0] if len(positions) == AXES_WITH_TEXT else None
    padding = None if mask is None else blocks(mask)
    for number, block in enumerate(() if positions is None else blocks(positions)):
        end = begin + block.shape[1]
        is_right = block == torch.arange(begin, end, device=block.device)
        begin = end
        if padding is not None:
            is_right = is_right | ~padding[number].bool()
        found.append(is_right.all())
    return torch.stack(found).all() if found else torch.ones((), dtype=torch.bool)


def check_whole_rows(mask: Tensor | None, positions: Tensor | None, begin: int = 0) -> None:
    """Refuse rows that are not one document from their first token on, see `are_whole`.

    Raises:
        ValueError: saying why.
    """
    require(are_whole(mask, positions, begin), WHOLE_ROWS)
