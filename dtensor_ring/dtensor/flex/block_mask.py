"""Converts the block masks of FlexAttention to slices, and their functions to text.

Dynamo inlines the calls of a mask function and lifts the tensors that it captures. So its graph is
a few operators on its arguments. An op cannot take a function as an argument, but it can take text,
which any process can run.
"""

from __future__ import annotations
import __future__

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from math import inf, nan
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from dtensor_ring.compute.capture import refuse_capture
from dtensor_ring.planning.slices import Slices

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# The largest number of key ranges that one query may see. Each range adds its own list of slices.
MAX_RANGES = 16

# The largest number of slices. More would take longer to plan than to compute.
MAX_SLICES = 10_000

# The largest number of pairs for one call of a mask function, one byte each.
CHUNK = 1 << 24

# Begins and ends of ranges as numbers `query * (keys + 1) + key`.
Edges = tuple[Tensor, Tensor]

# How much of a block of keys a block of queries sees.
NONE, FULL, PARTIAL = 0, 1, 2

# Takes a batch row, a head, a query and a key, all 0-dim; returns whether the query sees the key.
MaskFunction = Callable[..., Tensor]


class MaskBlocks(NamedTuple):
    """The parts of a `BlockMask` that decide what queries see.

    Attributes:
        lengths: the numbers of queries and of keys, in tokens.
        partial_counts: `(B, H, blocks of queries)`, the number of partial key blocks of each.
        partial_indices: `(B, H, blocks of queries, blocks of keys)`, the partial key blocks, the
            counted ones first.
        full_counts: the same counts for key blocks that are seen whole.
        full_indices: the same indices for key blocks that are seen whole.
        block_size: the sizes of a block of queries and of keys, in tokens.
        function: the mask function, evaluated for the pairs of partial blocks.
    """

    lengths: tuple[int, int]
    partial_counts: Tensor
    partial_indices: Tensor
    full_counts: Tensor | None
    full_indices: Tensor | None
    block_size: tuple[int, int]
    function: MaskFunction

    @classmethod
    def of(cls, parts: tuple[Any, ...]) -> MaskBlocks:
        """Make the blocks from `BlockMask.as_tuple()`; its transposed tables are not needed."""
        num_queries, num_keys, counts, indices, full_counts, full_indices, *_ = parts
        *_, height, width, function = parts
        return cls(
            (num_queries, num_keys),
            counts,
            indices,
            full_counts,
            full_indices,
            (height, width),
            function,
        )

    def on_host(self) -> MaskBlocks:
        """Return the blocks with counts and indices copied to the CPU.

        Raises:
            RuntimeError: if they are on a GPU whose stream captures a CUDA graph.
        """
        refuse_block_mask(self.partial_counts.device)
        return self._replace(
            partial_counts=self.partial_counts.cpu(),
            partial_indices=self.partial_indices.cpu(),
            full_counts=None if self.full_counts is None else self.full_counts.cpu(),
            full_indices=None if self.full_indices is None else self.full_indices.cpu(),
        )


def refuse_block_mask(device: torch.device) -> None:
    """Refuse a block mask on a GPU whose stream captures a CUDA graph.

    Raises:
        RuntimeError: saying what to pass instead.
    """
    refuse_capture(
        device,
        "block_mask is on the GPU, where the host cannot read it",
        "make its slices before, by slices_of_block_mask, and pass them to ring_attention",
    )


def slices_of_block_mask(block_mask: BlockMask) -> Slices:
    """Convert a `BlockMask`, the mask of FlexAttention, to slices, exactly.

    The mask function is evaluated for each pair of the partial blocks. Do this once per batch, and
    pass the slices on.

    Args:
        block_mask: made for all heads, and for each batch row or for all.

    Raises:
        TypeError: if it is not a `BlockMask`.
        ValueError: if it was made for several heads, or is not a union of a few slices, as in
            block-sparse attention.

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
    return slices_of_blocks(MaskBlocks.of(block_mask.as_tuple()))


def slices_of_blocks(blocks: MaskBlocks) -> Slices:
    """Convert the parts of a `BlockMask` to slices.

    Raises:
        ValueError: see `slices_of_block_mask`.
    """
    num_rows, num_heads = blocks.partial_counts.shape[:2]
    if num_heads != 1:
        raise ValueError(
            f"block_mask must be one for all heads, and was made for {num_heads} heads; make it "
            "with H=None"
        )
    device, blocks = blocks.partial_counts.device, blocks.on_host()
    rows = [_row(blocks, row, device) for row in range(num_rows)]
    widest = max(x.shape[2] for x in rows)
    padded = [torch.nn.functional.pad(x, (0, widest - x.shape[2])) for x in rows]
    begins, ends = torch.stack(padded, 1).numpy()
    slices = Slices.per_query(begins, ends)
    num_slices = max(map(len, slices.tables))
    if num_slices > MAX_SLICES:
        raise ValueError(
            f"block_mask takes {num_slices:,} slices, at most {MAX_SLICES:,} can be planned: it is "
            "no union of a few bands; use FlexAttention itself for it"
        )
    return slices


def _row(blocks: MaskBlocks, row: int, device: torch.device) -> Tensor:
    """Return begins and ends of the key ranges of each query of a batch row, `(2, Q, R)`.

    Queries with fewer ranges than others have empty ones. The mask function runs on `device`.
    """
    grid = _grid(blocks, row)
    # What a query sees is a row of zeros and ones, and its ranges lie between the edges of it. Full
    # and empty blocks have edges at their bounds only; just partial ones are asked key by key.
    #     blocks   full   partial  empty
    #     sees     1 1 1  1 0 1    0 0 0
    #     edges    b        e b    e
    edges = [_edges_of_blocks(blocks, grid), *_edges_of_partial_blocks(blocks, grid, row, device)]
    begins = torch.cat([begins for begins, _ in edges]).sort().values
    ends = torch.cat([ends for _, ends in edges]).sort().values
    num_queries, num_keys = blocks.lengths
    query, begin = begins // (num_keys + 1), begins % (num_keys + 1)
    counts = query.bincount(minlength=num_queries)
    widest = int(counts.max()) if num_queries else 0
    if widest > MAX_RANGES:
        raise ValueError(
            f"block_mask shows a query {widest} ranges of keys, at most {MAX_RANGES} are possible: "
            "it is no union of a few bands; use FlexAttention itself for it"
        )
    # Both lists are sorted and ranges do not overlap, so the i-th begin belongs to the i-th end.
    number = torch.arange(len(query)) - (counts.cumsum(0) - counts)[query]
    result = torch.zeros(2, num_queries, widest, dtype=torch.long)
    result[0, query, number], result[1, query, number] = begin, ends % (num_keys + 1)
    return result


def _grid(blocks: MaskBlocks, row: int) -> Tensor:
    """Return what is seen of each block, `(query blocks, key blocks + 2)`, NONE at both ends."""
    sizes = zip(blocks.lengths, blocks.block_size, strict=True)
    height, width = (-(-length // size) for length, size in sizes)
    # One extra column takes the writes of indices that are not counted.
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


def _edges_of_blocks(blocks: MaskBlocks, grid: Tensor) -> Edges:
    """Return the edges between full and empty blocks, which all queries of a block share."""
    left, right = grid[:, :-1], grid[:, 1:]
    return (
        _of_all_queries(blocks, (left == NONE) & (right == FULL)),
        _of_all_queries(blocks, (left == FULL) & (right == NONE)),
    )


def _of_all_queries(blocks: MaskBlocks, is_edge: Tensor) -> Tensor:
    """Return the edges at the begin of key blocks, for all queries of the query blocks."""
    (height, width), (num_queries, num_keys) = blocks.block_size, blocks.lengths
    block, column = is_edge.nonzero(as_tuple=True)
    query = block[:, None] * height + torch.arange(min(height, num_queries))
    key = (column * width).clamp(max=num_keys)[:, None]
    return (query * (num_keys + 1) + key)[query < num_queries]


def _edges_of_partial_blocks(
    blocks: MaskBlocks, grid: Tensor, row: int, device: torch.device
) -> Iterator[Edges]:
    """Yield the edges within partial blocks and on both sides of them, in chunks of blocks."""
    height, width = (min(x) for x in zip(blocks.block_size, blocks.lengths, strict=True))
    places = (grid == PARTIAL).nonzero()
    last_seen = torch.zeros(1, height, dtype=torch.bool, device=device)
    for part in places.split(max(1, CHUNK // max(1, height * width))):
        block, column = part.unbind(1)
        queries = block[:, None] * blocks.block_size[0] + torch.arange(height)
        keys = (column - 1)[:, None] * blocks.block_size[1] + torch.arange(width)
        seen = _asked(blocks, row, queries, keys, device)
        # Blocks are in order: if the key block before this one is partial, it is the previous one.
        before = torch.cat([last_seen, seen[:-1, :, -1]])
        before = _beside(grid[block, column - 1], before)
        last_seen = seen[-1:, :, -1]
        # The edge to a following partial block is found there; copy `seen` to add none here.
        after = _beside(grid[block, column + 1], seen[:, :, -1])
        whole = torch.cat([before[..., None], seen, after[..., None]], -1)
        keys = torch.cat([keys, keys[:, -1:] + 1], 1)
        yield _changes(blocks, whole, queries, keys)


def _beside(kinds: Tensor, seen: Tensor) -> Tensor:
    """Return whether queries see the key beside a block, `(blocks, queries)`; `seen` if partial."""
    kinds = kinds.to(seen.device)[:, None]
    return torch.where(kinds == PARTIAL, seen, kinds == FULL)


def _changes(blocks: MaskBlocks, whole: Tensor, queries: Tensor, keys: Tensor) -> Edges:
    """Return the edges where a seen key follows an unseen one, and where an unseen follows."""
    num_queries, num_keys = blocks.lengths
    now, then = whole[..., 1:], whole[..., :-1]
    edges = []
    for changed in (now & ~then, then & ~now):
        block, row, column = changed.nonzero().cpu().unbind(1)
        query, key = queries[block, row], keys[block, column].clamp(max=num_keys)
        edges.append((query * (num_keys + 1) + key)[query < num_queries])
    return edges[0], edges[1]


def _asked(
    blocks: MaskBlocks, row: int, queries: Tensor, keys: Tensor, device: torch.device
) -> Tensor:
    """Return whether queries see keys, `(blocks, queries, keys)`; keys past the end are not seen.

    Args:
        blocks: the parts of the mask, with the function.
        row: the batch row.
        queries: `(blocks, queries)`.
        keys: `(blocks, keys)`.
        device: where the function runs.
    """
    # FlexAttention does the same: `documents[query]` with a 0-dim tensor then becomes an index op.
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    function = torch.vmap(blocks.function, in_dims=(None, None, None, 0))
    function = torch.vmap(function, in_dims=(None, None, 0, None))
    function = torch.vmap(function, in_dims=(None, None, 0, 0))
    queries, keys = queries.to(device), keys.to(device)
    batch, head = torch.tensor(row, device=device), torch.tensor(0, device=device)
    num_queries, num_keys = blocks.lengths
    # Clamp, because functions may index tensors of the sequence's length.
    query, key = queries.clamp(max=num_queries - 1), keys.clamp(max=num_keys - 1)
    with TransformGetItemToIndex():
        seen = function(batch, head, query, key)
    return seen & (keys < num_keys)[:, None]


# The names that the text may use besides builtins: torch.fx writes these for operators and
# functions.
NAMES = {"torch": torch, "device": torch.device, "inf": inf, "nan": nan}

# The globals that torch.fx adds to every text.
UNUSED = {"NoneType", "fx_pytree", "pytree"}

KINDS = {"placeholder", "call_function", "call_method", "output"}


def text_of(function: GraphModule) -> str:
    """Return the source of the graph of a mask function.

    Raises:
        ValueError: if the graph needs more than torch, its arguments and numbers.
    """
    code = function.graph.python_code("self")
    kinds = {node.op for node in function.graph.nodes} - KINDS
    foreign = {name for name in code.globals if name not in NAMES and name not in UNUSED}
    if kinds or foreign:
        raise ValueError(
            f"the function of block_mask uses {', '.join(sorted(kinds | foreign))}, which a "
            "compiled graph cannot keep; make its slices outside, by slices_of_block_mask and "
            "sequence_slices, and call ring_attention"
        )
    return code.src


@lru_cache(maxsize=256)
def function_of(text: str) -> MaskFunction:
    """Return the function that a text defines."""
    names: dict[str, Any] = dict(NAMES)
    # Do not evaluate annotations: their types depend on the version of torch that wrote the text.
    flags = __future__.annotations.compiler_flag
    exec(compile(text, "<function of a block mask>", "exec", flags, dont_inherit=True), names)
    return partial(names["forward"], None)


def result_of(function: GraphModule) -> Node:
    """Return the result node of a graph with one result."""
    (output,) = (node for node in function.graph.nodes if node.op == "output")
    result: Any = output.args[0]
    return result[0] if isinstance(result, (tuple, list)) else result


def shows_all(function: Any) -> bool:
    """Return whether a function is FlexAttention's mask that shows every key, or its graph."""
    if isinstance(function, GraphModule):
        return getattr(result_of(function), "target", None) == "new_ones"
    from torch.nn.attention.flex_attention import noop_mask  # takes a second

    return function is noop_mask


def leaves_scores(function: Any) -> bool:
    """Return whether a `score_mod` is FlexAttention's identity, or its graph."""
    if isinstance(function, GraphModule):
        return result_of(function) is next(iter(function.graph.nodes))
    from torch.nn.attention.flex_attention import _identity  # takes a second

    return function is _identity
