"""Slices of FlexAttention's masks show what their functions show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, create_block_mask, create_mask, or_masks

from dtensor_ring.dtensor.flex.block_mask import slices_of_block_mask
from tests.slices import shown

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
LENGTH = 300
DOCUMENTS = torch.searchsorted(torch.tensor([40, 170, 171]), torch.arange(LENGTH), right=True)
BY_ROW = torch.stack([DOCUMENTS, DOCUMENTS.flip(0)])


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def full(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= 0 * k


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k < 50)


def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return DOCUMENTS[q] == DOCUMENTS[k]


def by_row(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (BY_ROW[b, q] == BY_ROW[b, k]) & (q >= k)


def first(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k < 70


@pytest.mark.parametrize(
    ("mask_mod", "batch", "lengths", "num_slices"),
    [
        (causal, None, (LENGTH, LENGTH), 1),
        (full, None, (LENGTH, LENGTH), 1),
        (window, None, (LENGTH, LENGTH), 2),
        (and_masks(causal, documents), None, (LENGTH, LENGTH), 4),
        (or_masks(causal, first), None, (LENGTH, LENGTH), 2),
        (or_masks(window, first), None, (LENGTH, LENGTH), 4),
        (by_row, 2, (LENGTH, LENGTH), 4),
        (causal, None, (200, LENGTH), 1),
        (causal, None, (LENGTH, 130), 2),
    ],
    ids=[
        *("causal", "full", "window", "documents", "prefix", "first tokens", "by row"),
        *("more keys", "fewer keys"),
    ],
)
def test_shows_what_the_function_shows(
    mask_mod: MaskMod, batch: int | None, lengths: tuple[int, int], num_slices: int
) -> None:
    mask = create_block_mask(mask_mod, batch, None, *lengths, device="cpu")
    found = slices_of_block_mask(mask)
    expected = create_mask(mask_mod, batch, None, *lengths, device="cpu")[:, 0]
    for table, row in zip(found.tables, expected, strict=True):
        assert torch.equal(torch.from_numpy(shown(table, lengths)), row.long())
        assert len(table) <= num_slices


def test_refusals() -> None:
    def by_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q - k >= 128 * h

    def sparse(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q // 4 + k // 4) % 2 == 0

    with pytest.raises(ValueError, match="was made for 2 heads"):
        slices_of_block_mask(create_block_mask(by_head, None, 2, LENGTH, LENGTH, device="cpu"))
    with pytest.raises(ValueError, match="shows a query 38 ranges of keys, at most 16"):
        slices_of_block_mask(create_block_mask(sparse, None, None, LENGTH, LENGTH, device="cpu"))
