"""Masks of FlexAttention as slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dtensor_ring.planning.slices import Slices

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MAX_RANGES = 16
"""The most ranges of keys that one query may see. Each range adds its own list of slices."""

MAX_SLICES = 10_000
"""More would take longer to plan than to attend."""

CHUNK = 1 << 24
"""The most pairs that the function of a mask is asked for at once, one byte each."""

Ranges = tuple[Tensor, Tensor]
"""First keys, and those after the last, of the ranges of each query: `(Q, R)`, the rest empty."""

Edges = tuple[Tensor, Tensor]
"""Numbers `query * (keys + 1) + key` of where ranges begin, and of where they end."""

NONE, FULL, PARTIAL = 0, 1, 2
"""How much of a block of keys a block of queries sees."""

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
    grid = _grid(blocks, row)
    edges = [_edges_of_blocks(blocks, grid), *_edges_of_partial_blocks(blocks, grid, row, device)]
    begins, ends = (torch.cat(side).sort().values for side in zip(*edges, strict=True))
    num_queries, num_keys = blocks.lengths
    query, begin = begins // (num_keys + 1), begins % (num_keys + 1)
    counts = query.bincount(minlength=num_queries)
    widest = int(counts.max()) if num_queries else 0
    if widest > MAX_RANGES:
        raise ValueError(
            f"block_mask shows a query {widest} ranges of keys, at most {MAX_RANGES} are possible: "
            "it is no union of a few bands; use FlexAttention itself for it"
        )
    # Ranges of a query follow one another: its first begin has its first end.
    number = torch.arange(len(query)) - (counts.cumsum(0) - counts)[query]
    result = torch.zeros(2, num_queries, widest, dtype=torch.long)
    result[0, query, number], result[1, query, number] = begin, ends % (num_keys + 1)
    return result[0], result[1]


def _grid(blocks: Blocks, row: int) -> Tensor:
    """What is seen of each block, `(blocks of queries, blocks of keys)`, nothing on both sides."""
    sizes = zip(blocks.lengths, blocks.block_size, strict=True)
    height, width = (-(-length // size) for length, size in sizes)
    # One column more, for the indices that are not counted.
    grid = torch.full((height, width + 3), NONE, dtype=torch.int8)
    for counts, indices, kind in (
        (blocks.partial_counts, blocks.partial_indices, PARTIAL),
        (blocks.full_counts, blocks.full_indices, FULL),
    ):
        if counts is not None and indices is not None:
            columns = indices[row, 0, :height].long() + 1
            is_counted = torch.arange(columns.shape[1]) < counts[row, 0, :height, None]
            grid.scatter_(1, torch.where(is_counted, columns, width + 2), kind)
    return grid[:, : width + 2]


def _edges_of_blocks(blocks: Blocks, grid: Tensor) -> Edges:
    """Between blocks that are seen whole and those that are not, for all queries of a block."""
    left, right = grid[:, :-1], grid[:, 1:]
    return (
        _of_all_queries(blocks, (left == NONE) & (right == FULL)),
        _of_all_queries(blocks, (left == FULL) & (right == NONE)),
    )


def _of_all_queries(blocks: Blocks, is_edge: Tensor) -> Tensor:
    """The edges at the begin of these blocks of keys."""
    (height, width), (num_queries, num_keys) = blocks.block_size, blocks.lengths
    block, column = is_edge.nonzero(as_tuple=True)
    query = block[:, None] * height + torch.arange(min(height, num_queries))
    key = (column * width).clamp(max=num_keys)[:, None]
    return (query * (num_keys + 1) + key)[query < num_queries]


def _edges_of_partial_blocks(
    blocks: Blocks, grid: Tensor, row: int, device: torch.device
) -> Iterator[Edges]:
    """Those within partial blocks, and at both sides of them, some blocks at a time."""
    height, width = (min(x) for x in zip(blocks.block_size, blocks.lengths, strict=True))
    places = (grid == PARTIAL).nonzero()
    last_seen = torch.zeros(1, height, dtype=torch.bool, device=device)
    for part in places.split(max(1, CHUNK // max(1, height * width))):
        block, column = part.unbind(1)
        queries = block[:, None] * blocks.block_size[0] + torch.arange(height)
        keys = (column - 1)[:, None] * blocks.block_size[1] + torch.arange(width)
        seen = _asked(blocks, row, queries, keys, device)
        # What is seen of the last key before a block: in order, that block is the one before.
        before = torch.cat([last_seen, seen[:-1, :, -1]])
        before = _beside(grid[block, column - 1], before)
        last_seen = seen[-1:, :, -1]
        # A partial block after this one has the edge between them.
        after = _beside(grid[block, column + 1], seen[:, :, -1])
        whole = torch.cat([before[..., None], seen, after[..., None]], -1)
        keys = torch.cat([keys, keys[:, -1:] + 1], 1)
        yield _changes(blocks, whole, queries, keys)


def _beside(kinds: Tensor, seen: Tensor) -> Tensor:
    """`(blocks, queries)`: whether the key beside a block is seen; `seen` is of partial ones."""
    kinds = kinds.to(seen.device)[:, None]
    return torch.where(kinds == PARTIAL, seen, kinds == FULL)


def _changes(blocks: Blocks, whole: Tensor, queries: Tensor, keys: Tensor) -> Edges:
    """Where a key is seen and the one before it is not, and the opposite."""
    num_queries, num_keys = blocks.lengths
    now, then = whole[..., 1:], whole[..., :-1]
    edges = []
    for changed in (now & ~then, then & ~now):
        block, row, column = changed.nonzero().cpu().unbind(1)
        query, key = queries[block, row], keys[block, column].clamp(max=num_keys)
        edges.append((query * (num_keys + 1) + key)[query < num_queries])
    return edges[0], edges[1]


def _asked(blocks: Blocks, row: int, queries: Tensor, keys: Tensor, device: torch.device) -> Tensor:
    """`(blocks, queries, keys)`: whether each query of a block sees each key; beyond the end, none.

    Args:
        blocks: with the function.
        row: of the batch.
        queries: `(blocks, queries)`.
        keys: `(blocks, keys)`.
        device: where the function is asked.
    """
    # As FlexAttention does it: `documents[query]` of a tensor without dims is an index then.
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    function = torch.vmap(blocks.function, in_dims=(None, None, None, 0))
    function = torch.vmap(function, in_dims=(None, None, 0, None))
    function = torch.vmap(function, in_dims=(None, None, 0, 0))
    queries, keys = queries.to(device), keys.to(device)
    batch, head = torch.tensor(row, device=device), torch.tensor(0, device=device)
    num_queries, num_keys = blocks.lengths
    # Functions may look up tensors of the sequence's length.
    within = queries.clamp(max=num_queries - 1), keys.clamp(max=num_keys - 1)
    with TransformGetItemToIndex():
        seen = function(batch, head, *within)
    return seen & (keys < num_keys)[:, None]
