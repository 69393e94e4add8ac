"""Masks of FlexAttention as slices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dtensor_ring.planning.masks.slices import Slices

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MAX_RANGES = 16
"""The most ranges of keys that one query may see. Each range adds its own list of slices."""

MAX_SLICES = 10_000
"""More would take longer to plan than to attend."""

Ranges = tuple[Tensor, Tensor]
"""First keys, and those after the last, of the ranges of each query: `(Q, R)`, the rest empty."""


def slices_of_block_mask(block_mask: BlockMask) -> Slices:
    """The slices of a `BlockMask`, the mask of FlexAttention, exactly.

    Full blocks are taken as such, the function is asked for each pair of the partial ones. Do it
    once per batch, and pass the slices on.

    Args:
        block_mask: one for all heads; by batch row or for all.

    Raises:
        TypeError: if it is no `BlockMask`.
        ValueError: if it was made for several heads, or what is seen is no union of few slices, as
            in block-sparse attention.

    Example:
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> window = lambda b, h, q, k: (q >= k) & (q - k < 100)
        >>> mask = create_block_mask(window, None, None, 300, 300, device="cpu")
        >>> len(slices_of_block_mask(mask).tables[0])
        2
    """
    from torch.nn.attention.flex_attention import BlockMask  # takes a second

    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            f"block_mask must be a BlockMask of FlexAttention, got {type(block_mask).__name__}"
        )
    num_rows, num_heads = block_mask.kv_num_blocks.shape[:2]
    if num_heads != 1:
        raise ValueError(
            f"block_mask must be one for all heads, and was made for {num_heads} heads; make it "
            "with H=None"
        )
    rows = [_row(block_mask, row) for row in range(num_rows)]
    widest = max(first.shape[1] for first, _ in rows)
    begins, ends = (
        torch.stack([torch.nn.functional.pad(x, (0, widest - x.shape[1])) for x in side]).numpy()
        for side in zip(*rows, strict=True)
    )
    found = Slices.per_query(begins, ends)
    num_slices = max(map(len, found.tables))
    if num_slices > MAX_SLICES:
        raise ValueError(
            f"block_mask takes {num_slices:,} slices, at most {MAX_SLICES:,} can be planned: it is "
            "no union of a few bands; use FlexAttention itself for it"
        )
    return found


def _row(block_mask: BlockMask, row: int) -> Ranges:
    """The ranges of all queries of a batch row."""
    num_queries, _ = block_mask.seq_lengths
    height = block_mask.BLOCK_SIZE[0]
    blocks = range(-(-num_queries // height))
    parts = [_ranges(*_columns(block_mask, row, number)) for number in blocks]
    widest = max((first.shape[1] for first, _ in parts), default=0)
    if widest > MAX_RANGES:
        raise ValueError(
            f"block_mask shows a query {widest} ranges of keys, at most {MAX_RANGES} are possible: "
            "it is no union of a few bands; use FlexAttention itself for it"
        )
    begins, ends = (
        torch.cat([torch.nn.functional.pad(x, (0, widest - x.shape[1])) for x in side])
        for side in zip(*parts, strict=True)
    )
    return begins, ends


def _columns(block_mask: BlockMask, row: int, number: int) -> tuple[Tensor, Tensor]:
    """First keys of columns, and which of them each query of a block of queries sees.

    There is one for each key of a partial block, one for a full block, and one for each gap.
    """
    height, width = block_mask.BLOCK_SIZE
    num_queries, num_keys = block_mask.seq_lengths
    queries = torch.arange(number * height, min((number + 1) * height, num_queries))
    is_full = dict.fromkeys(_indices(block_mask, "full_kv", row, number), True)
    is_full |= dict.fromkeys(_indices(block_mask, "kv", row, number), False)
    starts, seen, end = [], [], 0
    for block in sorted(is_full):
        first, after = block * width, min((block + 1) * width, num_keys)
        if first > end:
            starts.append(torch.tensor([end]))
            seen.append(torch.zeros(len(queries), 1, dtype=torch.bool))
        keys = torch.tensor([first]) if is_full[block] else torch.arange(first, after)
        starts.append(keys)
        all_seen = torch.ones(len(queries), 1, dtype=torch.bool)
        seen.append(all_seen if is_full[block] else _asked(block_mask, row, queries, keys))
        end = after
    starts.append(torch.tensor([end]))
    seen.append(torch.zeros(len(queries), 1, dtype=torch.bool))
    return torch.cat(starts), torch.cat(seen, dim=1)


def _indices(block_mask: BlockMask, kind: str, row: int, number: int) -> list[int]:
    """The blocks of keys of a block of queries that are partial ("kv") or full ("full_kv")."""
    counts = getattr(block_mask, f"{kind}_num_blocks")
    if counts is None:
        return []
    count = int(counts[row, 0, number])
    return getattr(block_mask, f"{kind}_indices")[row, 0, number, :count].tolist()


def _asked(block_mask: BlockMask, row: int, queries: Tensor, keys: Tensor) -> Tensor:
    """`(Q, K)`: whether each query sees each key."""
    device = block_mask.kv_indices.device
    of_query = torch.vmap(block_mask.mask_mod, in_dims=(None, None, None, 0))
    of_block = torch.vmap(of_query, in_dims=(None, None, 0, None))
    batch, head, queries, keys = (
        x.to(device) for x in (torch.tensor(row), torch.tensor(0), queries, keys)
    )
    return of_block(batch, head, queries, keys).cpu()


def _ranges(starts: Tensor, seen: Tensor) -> Ranges:
    """The ranges of each query, from columns."""
    before = torch.nn.functional.pad(seen, (1, 0))[:, :-1]
    edges = []
    for changes in (seen & ~before, before & ~seen):
        # The last column shows nothing, so a range that begins also ends.
        query, column = changes.nonzero(as_tuple=True)
        counts = changes.sum(1)
        number = torch.arange(len(query)) - (counts.cumsum(0) - counts)[query]
        result = torch.zeros(len(seen), int(counts.max()), dtype=torch.long)
        result[query, number] = starts[column]
        edges.append(result)
    return edges[0], edges[1]
