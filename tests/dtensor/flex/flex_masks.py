"""Masks of FlexAttention, and which query sees which key under each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, create_mask

from dtensor_ring import Mask, Slices
from tests.slices import shown

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
LENGTH, BLOCK = 42, 8
BOUNDS = [0, 11, 30, LENGTH]
DOCUMENTS = torch.bucketize(torch.arange(LENGTH), torch.tensor(BOUNDS[1:]), right=True)
BY_ROW = torch.stack([DOCUMENTS, DOCUMENTS.flip(0)])


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def packed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return DOCUMENTS[q] == DOCUMENTS[k]


def by_row(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (BY_ROW[b, q] == BY_ROW[b, k]) & (q >= k)


FUNCTIONS: dict[str, MaskMod | None] = {
    "causal": causal,
    "full": None,
    "sliding": lambda b, h, q, k: (q >= k) & (q - k <= 5),
    "local": lambda b, h, q, k: (q - k <= 6) & (k - q <= 3),
    "chunked": lambda b, h, q, k: (q >= k) & (q // 10 == k // 10),
    "prefix": lambda b, h, q, k: (q >= k) | (k < 13),
    "packed": and_masks(causal, packed),
    "rows": by_row,
    "rows that see nothing": lambda b, h, q, k: q > k + 20,  # most queries see nothing
}
"""Masks as users write them; without one everything is seen."""

BUILT = {
    "documents": Slices.documents(BOUNDS, [Mask.causal(), Mask.full(), Mask.sliding(4)]),
    "prefixes": Slices.prefix(BOUNDS, [3, 0, 5]),
    "blocks": Slices.blocks(BOUNDS, begins=[2, 15], ends=[6, 21]),
    "global tokens": Slices.global_tokens(BOUNDS, 2, 4),
    "bottom right": Slices.bottom_right([0, 9, LENGTH], [0, 20, LENGTH]),
    "per query": Slices.per_query([max(0, q // 8 * 8 - 8) for q in range(LENGTH)], [LENGTH] * 42),
    "block causal": Slices.block_causal([10, 4, 20, 8], num_earlier=1),
    "block diffusion": Slices.block_diffusion([6, 8, 7]),
    "shared prefix": Slices.shared_prefix(12, [10, 20]),
    "tree": Slices.tree([-1, 0, 0, 1], [12, 10, 8, 12]),
}
"""What builders make, as a function that looks the pair up."""
TABLE = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)


def looked_up(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return TABLE[q, k]  # one function for all masks, which is compiled once


def mask_of(name: str) -> tuple[BlockMask | None, Tensor]:
    """Its block mask, and `(B, S, S)`: which query sees which key."""
    if name in BUILT:
        TABLE.copy_(torch.from_numpy(shown(BUILT[name].tables[0], (LENGTH, LENGTH))))
    function = looked_up if name in BUILT else FUNCTIONS[name]
    if function is None:
        return None, torch.ones(2, LENGTH, LENGTH, dtype=torch.bool)
    sizes = 2 if function is by_row else None, None, LENGTH, LENGTH
    seen = create_mask(function, *sizes, device="cpu")[:, 0].expand(2, -1, -1)
    return create_block_mask(function, *sizes, device="cpu", BLOCK_SIZE=BLOCK), seen
