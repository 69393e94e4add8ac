"""Masks of FlexAttention as slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

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

MaskFunction = Callable[..., Tensor]
"""Of a batch row, a head, a query and a key, without dims: whether the query sees the key."""


class Blocks(NamedTuple):
    """What a `BlockMask` consists of, as far as it says what queries see."""

    lengths: tuple[int, int]
    """Of queries and keys, in tokens."""
    partial_counts: Tensor
    """`(B, H, blocks of queries)`: how many blocks of keys a block of queries sees in part."""
    partial_indices: Tensor
    """`(B, H, blocks of queries, blocks of keys)`: which those are, the counted ones first."""
    full_counts: Tensor | None
    """The same of blocks that are seen whole."""
    full_indices: Tensor | None
    block_size: tuple[int, int]
    """Tokens of a block of queries and of one of keys."""
    function: MaskFunction
    """Asked for the pairs of partial blocks."""

    @classmethod
    def of(cls, parts: tuple[Any, ...]) -> Blocks:
        """Of `BlockMask.as_tuple()`, which has blocks of keys by block of queries, then others."""
        num_queries, num_keys, counts, indices, full_counts, full_indices, *_ = parts
        *_, height, width, function = parts
        tables = counts, indices, full_counts, full_indices
        return cls((num_queries, num_keys), *tables, (height, width), function)

    def on_host(self) -> Blocks:
        """The same with counts and indices on the CPU, copied once."""
        return self._replace(
            partial_counts=self.partial_counts.cpu(),
            partial_indices=self.partial_indices.cpu(),
            full_counts=None if self.full_counts is None else self.full_counts.cpu(),
            full_indices=None if self.full_indices is None else self.full_indices.cpu(),
        )


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
    return slices_of_blocks(Blocks.of(block_mask.as_tuple()))


def slices_of_blocks(blocks: Blocks) -> Slices:
    """The slices of what a `BlockMask` consists of.

    Raises:
        ValueError: as `slices_of_block_mask`.
    """
    num_rows, num_heads = blocks.partial_counts.shape[:2]
    if num_heads != 1:
        raise ValueError(
            f"block_mask must be one for all heads, and was made for {num_heads} heads; make it "
            "with H=None"
        )
    device, blocks = blocks.partial_counts.device, blocks.on_host()
    rows = [_row(blocks, row, device) for row in range(num_rows)]
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


def _row(blocks: Blocks, row: int, device: torch.device) -> Ranges:
    """The ranges of all queries of a batch row; the function is asked on its device."""
    numbers = range(-(-blocks.lengths[0] // blocks.block_size[0]))
    parts = [_ranges(*_columns(blocks, row, number, device)) for number in numbers]
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


def _columns(blocks: Blocks, row: int, number: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First keys of columns, and which of them each query of a block of queries sees.

    There is one for each key of a partial block, one for a full block, and one for each gap.
    """
    height, width = blocks.block_size
    num_queries, num_keys = blocks.lengths
    queries = torch.arange(number * height, min((number + 1) * height, num_queries))
    full = _indices(blocks.full_counts, blocks.full_indices, row, number)
    partial = _indices(blocks.partial_counts, blocks.partial_indices, row, number)
    is_full = dict.fromkeys(full, True) | dict.fromkeys(partial, False)
    starts, seen, end = [], [], 0
    for block in sorted(is_full):
        first, after = block * width, min((block + 1) * width, num_keys)
        if first > end:
            starts.append(torch.tensor([end]))
            seen.append(torch.zeros(len(queries), 1, dtype=torch.bool))
        keys = torch.tensor([first]) if is_full[block] else torch.arange(first, after)
        starts.append(keys)
        all_seen = torch.ones(len(queries), 1, dtype=torch.bool)
        asked = all_seen if is_full[block] else _asked(blocks, row, queries, keys, device)
        seen.append(asked)
        end = after
    starts.append(torch.tensor([end]))
    seen.append(torch.zeros(len(queries), 1, dtype=torch.bool))
    return torch.cat(starts), torch.cat(seen, dim=1)


def _indices(counts: Tensor | None, indices: Tensor | None, row: int, number: int) -> list[int]:
    """The blocks of keys that a table has for a block of queries."""
    if counts is None or indices is None:
        return []
    return indices[row, 0, number, : int(counts[row, 0, number])].tolist()


def _asked(blocks: Blocks, row: int, queries: Tensor, keys: Tensor, device: torch.device) -> Tensor:
    """`(Q, K)`: whether each query sees each key."""
    # As FlexAttention does it: `documents[query]` of a tensor without dims is an index then.
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    of_query = torch.vmap(blocks.function, in_dims=(None, None, None, 0))
    of_block = torch.vmap(of_query, in_dims=(None, None, 0, None))
    indices = (x.to(device) for x in (torch.tensor(row), torch.tensor(0), queries, keys))
    with TransformGetItemToIndex():
        return of_block(*indices).cpu()


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
