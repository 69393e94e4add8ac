"""Rows that are one document, as layers need that count places in a row.

An index of blocks counts keys by their places in the row, and queries by `position_ids`. With
padding on the left or packed documents these differ, and the stock model chooses other blocks than
for each document alone. Some stock models make pools of the tokens of a row from its first slot on,
padding included; some from its first token on, whatever document a token is of.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel_plans.huggingface.core.documents import blocks, require
from parallel_plans.huggingface.core.patterns import AXES_WITH_TEXT

# From where on a layer counts places: the first slot of a row, its first token, or that of each
# document in it.
ROW, TOKENS, DOCUMENTS = "row", "tokens", "documents"

WHOLE_ROWS = (
    "layers of this model choose blocks or pools of keys, which are counted from the start of the "
    "row, so over a sharded sequence each row must be one document: without padding on the left, "
    "packed documents, or position_ids that do not count from 0. In other rows they would begin at "
    "other tokens than in each document alone; put one document into each row, with padding after "
    "it"
)
ONE_DOCUMENT = (
    "layers of this model choose pools of keys, which are counted from the first token of the row, "
    "and its own code knows no packed documents, so each row must be one document, whose "
    "position_ids count from 0; padding may stand on either side"
)


def are_whole(
    mask: Tensor | None, positions: Tensor | None, begin: int = 0, padding: Tensor | None = None
) -> Tensor:
    """Return whether rows begin with a token, and positions count places, `()`.

    Args:
        mask: 1 for tokens and 0 for padding, `(B, L)`.
        positions: position ids, `(B, L)`; those of padding do not count. Of four axes the first
            counts tokens, and of three none does.
        begin: the place in the row of the first of these tokens.
        padding: how many tokens of padding each row may begin with, `(B,)`.

    Example:
        >>> are_whole(torch.tensor([[1, 1, 0]]), torch.tensor([[0, 1, 1]]))
        tensor(True)
    """
    checks = []
    if mask is not None and padding is None and not begin and mask.numel():
        checks = [mask[:, 0].bool().all()]
    if positions is not None and positions.ndim == 3:
        positions = positions[0] if len(positions) == AXES_WITH_TEXT else None
    is_padding = None if mask is None else blocks(mask)
    for number, block in enumerate(() if positions is None else blocks(positions)):
        end = begin + block.shape[1]
        places = torch.arange(begin, end, device=block.device)
        # With padding on the left, positions count from a row's first token.
        if padding is not None:
            places = places - padding.to(block.device).unsqueeze(-1)
        is_right = (block == places) | (places < 0)
        begin = end
        # The positions of padding may be anything: no query sees it.
        if is_padding is not None:
            is_right = is_right | ~is_padding[number].bool()
        checks.append(is_right.all())
    return torch.stack(checks).all() if checks else torch.ones((), dtype=torch.bool)


def check_whole_rows(mask: Tensor | None, positions: Tensor | None, begin: int = 0) -> None:
    """Refuse rows that are not one document from their first token on, see `are_whole`.

    Raises:
        ValueError: saying why.
    """
    require(are_whole(mask, positions, begin), WHOLE_ROWS)


def check_one_document(
    mask: Tensor | None, positions: Tensor | None, begin: int = 0, padding: Tensor | None = None
) -> None:
    """Refuse rows that are not one document beside their padding, see `are_whole`.

    Raises:
        ValueError: saying why.
    """
    if padding is None and mask is not None:
        padding = mask.bool().int().argmax(1)
    require(are_whole(mask, positions, begin, padding), ONE_DOCUMENT)
