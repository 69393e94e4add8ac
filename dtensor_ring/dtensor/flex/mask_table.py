"""The op that converts a block mask to slices in a graph that calls `flex_attention`.

Note [Known block masks]: all layers of a model pass the same block mask. The slices of a mask are
kept as long as its index tensor lives, and used if its function and the content of its tensors are
still the same. Tensor versions do not suffice: collectives write without raising them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils.weak import WeakTensorKeyDictionary

from dtensor_ring.dtensor.flex.block_mask import (
    MAX_SLICES,
    MaskBlocks,
    MaskFunction,
    slices_of_blocks,
)
from dtensor_ring.dtensor.flex.mask_function import function_of, text_of
from dtensor_ring.planning.slice_tables import NUM_FIELDS

_OP = "dtensor_ring::block_mask_slices"

torch.library.define(
    _OP,
    "(SymInt[] lengths, Tensor partial_counts, Tensor partial_indices, Tensor? full_counts, "
    "Tensor? full_indices, SymInt[] block_size, str function, Tensor?[] captured, "
    "SymInt[] numbers) -> Tensor",
)
block_mask_slices_op = torch.ops.dtensor_ring.block_mask_slices.default


class _KnownMask(NamedTuple):
    """Slices of a block mask, and the inputs that they were made from.

    Attributes:
        contents: copies of the tensors of the mask, and of those that its function captures.
        others: lengths, block sizes, the function's text, and the numbers that it captures.
        numbers: the slices, `(N, 6)` or `(B, N, 6)`.
    """

    contents: tuple[Tensor | None, ...]
    others: tuple[Any, ...]
    numbers: np.ndarray

    def is_of(self, tensors: Sequence[Tensor | None], others: tuple[Any, ...]) -> bool:
        """Return whether the tensors have the same content, and the other inputs are equal."""
        return (
            self.others == others
            and len(self.contents) == len(tensors)
            and all(map(_is_same, self.contents, tensors))
        )


def _is_same(known: Tensor | None, x: Tensor | None) -> bool:
    if known is None or x is None:
        return known is x
    return known.dtype == x.dtype and known.device == x.device and torch.equal(known, x)


# By the tensor with the indices of partial blocks, see Note [Known block masks].
_KNOWN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def table_of(blocks: MaskBlocks, captured: tuple[Any, ...]) -> Tensor:
    """Convert a block mask to the slices that `ring_attention` takes, also while tracing.

    Args:
        blocks: the parts of the mask; the function is a graph, or in eager calls any function.
        captured: the arguments of the function after its four indices.

    Returns:
        `(N, 6)` or `(B, N, 6)` on the CPU, int32.

    Raises:
        ValueError: if the mask is not a union of a few slices, or a graph cannot keep its function.
    """
    if not isinstance(blocks.function, GraphModule):
        bound = blocks._replace(function=_bound(blocks.function, captured))
        return torch.from_numpy(slices_of_blocks(bound).numbers)
    tensors = [x if isinstance(x, Tensor) else None for x in captured]
    numbers = [x for x in captured if not isinstance(x, Tensor)]
    function = text_of(blocks.function)
    return block_mask_slices_op(
        list(blocks.lengths), *blocks[1:5], list(blocks.block_size), function, tensors, numbers
    )


def _bound(function: MaskFunction, captured: Sequence[Any]) -> MaskFunction:
    """Return the mask function with its captured arguments bound."""
    return lambda *indices: function(*indices, *captured)


def _capacity(num_queries: int) -> int:
    """Return the number of slices of a row's table: graphs need a shape that depends on no data."""
    return min(MAX_SLICES, 64 + num_queries // 4)


@torch.library.impl(_OP, "CompositeExplicitAutograd")
def _block_mask_slices(
    lengths: list[int],
    partial_counts: Tensor,
    partial_indices: Tensor,
    full_counts: Tensor | None,
    full_indices: Tensor | None,
    block_size: list[int],
    function: str,
    captured: list[Tensor | None],
    numbers: list[int],
) -> Tensor:
    tables = partial_counts, partial_indices, full_counts, full_indices
    rest = iter(numbers)
    arguments = [next(rest) if x is None else x for x in captured]
    sizes = (lengths[0], lengths[1]), (block_size[0], block_size[1])
    blocks = MaskBlocks(sizes[0], *tables, sizes[1], _bound(function_of(function), arguments))
    found = _known(blocks, (*tables, *captured), (*sizes, function, *numbers))
    num_slices, capacity = found.shape[-2], _capacity(lengths[0])
    if num_slices > capacity:
        raise ValueError(
            f"block_mask takes {num_slices:,} slices, at most {capacity:,} are possible with "
            f"{lengths[0]:,} queries: it is no union of a few bands, or one of many short ones; "
            f"slices_of_block_mask and ring_attention take up to {MAX_SLICES:,}"
        )
    table = np.zeros((len(partial_counts), capacity, NUM_FIELDS), dtype=np.int32)
    table[:, :num_slices] = found
    return torch.from_numpy(table[0] if len(table) == 1 else table)


def _known(
    blocks: MaskBlocks, tensors: tuple[Tensor | None, ...], others: tuple[Any, ...]
) -> np.ndarray:
    """Return the slices of blocks, made once; see Note [Known block masks]."""
    known = _KNOWN.get(blocks.partial_indices)
    if known is None or not known.is_of(tensors, others):
        contents = tuple(None if x is None else x.detach().clone() for x in tensors)
        known = _KnownMask(contents, others, _numbers(blocks))
        _KNOWN[blocks.partial_indices] = known
    return known.numbers


def _numbers(blocks: MaskBlocks) -> np.ndarray:
    """Return the slices of blocks, from within an op."""
    # In a compiled graph the dispatch key of `vmap`, which runs the mask function, is excluded.
    included = torch._C._dispatch_tls_local_include_set()
    none = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    with torch._C._ForceDispatchKeyGuard(included, none):
        return slices_of_blocks(blocks).numbers


@torch.library.register_fake(_OP)
def _fake(lengths: Any, partial_counts: Tensor, partial_indices: Tensor, *rest: Any) -> Tensor:
    num_rows, capacity = partial_counts.shape[0], _capacity(lengths[0])
    shape = (capacity, NUM_FIELDS) if num_rows == 1 else (num_rows, capacity, NUM_FIELDS)
    return torch.empty(shape, dtype=torch.int32, device="cpu")
