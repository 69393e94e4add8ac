"""Slices of FlexAttention's masks show what their functions show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, create_block_mask, create_mask, or_masks

from dtensor_ring.dtensor.flex import block_mask
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


def two_ranges(begins: Tensor, ends: Tensor) -> MaskMod:
    """Of each query, `(B, Q)`; they may overlap."""
    return lambda b, h, q, k: (
        (k >= begins[b, q]) & (k < ends[b, q]) | (k >= 50 - begins[b, q]) & (k < 20)
    )


@pytest.mark.parametrize("chunk", [1, 200, block_mask.CHUNK])
def test_drawn_ranges(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of any size, some rows of ranges that overlap; read some blocks at a time."""
    monkeypatch.setattr(block_mask, "CHUNK", chunk)
    random = torch.Generator().manual_seed(chunk)

    def draw(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (), generator=random))]

    for _ in range(15):
        lengths = draw(1, 16, 37, 64), draw(1, 19, 32, 70)
        sides = torch.randint(lengths[1] + 1, (2, 2, lengths[0]), generator=random)
        begins, ends = sides.sort(-1).values if draw(0, 1) else sides

        function = two_ranges(begins, ends)
        size = draw(1, 4, 16, 128), draw(1, 8, 32)
        mask = create_block_mask(function, 2, None, *lengths, device="cpu", BLOCK_SIZE=size)
        expected = create_mask(function, 2, None, *lengths, device="cpu")[:, 0]
        for table, row in zip(slices_of_block_mask(mask).tables, expected, strict=True):
            assert torch.equal(torch.from_numpy(shown(table, lengths)), row.long())


def test_refusals() -> None:
    def by_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q - k >= 128 * h

    def sparse(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q // 4 + k // 4) % 2 == 0

    with pytest.raises(ValueError, match="was made for 2 heads"):
        slices_of_block_mask(create_block_mask(by_head, None, 2, LENGTH, LENGTH, device="cpu"))
    with pytest.raises(ValueError, match="shows a query 38 ranges of keys, at most 16"):
        slices_of_block_mask(create_block_mask(sparse, None, None, LENGTH, LENGTH, device="cpu"))
