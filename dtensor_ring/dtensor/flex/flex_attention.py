"""Runs `flex_attention` on DTensors of an annotated mesh as ring attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._guards import TracingContext
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_op
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.weak import WeakTensorKeyDictionary

from dtensor_ring.dtensor.attention import attend
from dtensor_ring.dtensor.call_check import scores_of
from dtensor_ring.dtensor.dispatch import arguments_of
from dtensor_ring.dtensor.flex.block_mask import (
    MAX_SLICES,
    MaskBlocks,
    MaskFunction,
    function_of,
    leaves_scores,
    refuse_block_mask,
    shows_all,
    slices_of_blocks,
    text_of,
)
from dtensor_ring.dtensor.placement import BATCH, SEQUENCE, describe, on_annotated_axis
from dtensor_ring.dtensor.sdpa import Handler, add_handlers, as_before
from dtensor_ring.dtensor.sequence_tensor import SequenceTensor
from dtensor_ring.ops.nodes import register_op
from dtensor_ring.ops.options import ON_DTENSORS, Batch, Call
from dtensor_ring.planning.slice_tables import NUM_FIELDS
from dtensor_ring.planning.tile import FULL

# Without a mask, FlexAttention makes one with a single block of at least this size.
MIN_EMPTY_BLOCK = 1 << 30

# Output, log-sum-exp to the base 2, and the largest scores, which are empty unless requested.
Outputs = tuple[Tensor, Tensor, Tensor]

Kernel = Callable[..., Outputs]


# Note [How a call of flex_attention gets here]: outside of a compiled graph, PyTorch compiles the
# call itself. Dynamo traces `score_mod` and the mask function into small graphs, and puts a
# higher-order op into its own graph, which runs eagerly or is compiled further. That op first asks
# its autograd kernel. Ours takes over there, with the user's DTensors, so the ring's own autograd
# applies. In inference mode the op asks for a rule for the tensor subclass instead.
#
# Dynamo traces both functions with indices that it makes by `query.new_empty([])`. For a DTensor
# this is a DTensor, which cannot index the plain tensors that mask functions capture, such as the
# document number of each token. So this call returns a plain tensor while a compiler traces. It is
# in no graph, because Dynamo discards it.
def install_flex() -> None:
    """Let `flex_attention` ask us first about DTensors; other calls continue as before."""
    kernels = flex_attention_op.py_kernels
    if not getattr(kernels.get(DispatchKey.Autograd), "is_ours", False):
        kernels[DispatchKey.Autograd] = _kernel(kernels.get(DispatchKey.Autograd))
        rules: dict[Any, Any] = flex_attention_op.python_key_table
        rules[DTensor] = rules[SequenceTensor] = _kernel(rules.get(DTensor))
        flex_attention_op._dispatch_cache.clear()  # it holds the kernels of earlier calls
    add_handlers((torch.ops.aten.new_empty.default,), _new_empty_handler)


def _kernel(previous: Kernel | None) -> Kernel:
    def attention(query: Any, key: Any, value: Any, *rest: Any) -> Outputs:
        is_ours = any(on_annotated_axis(x, SEQUENCE) for x in (query, key, value))
        run = _ring_attention if is_ours else previous
        if run is None:
            raise NotImplementedError(
                f"flex_attention on DTensors needs query, key and value (batch, heads, sequence, "
                f"head dim) in Shard(2) over an axis that has a layout, got query "
                f"{describe(query)}; see shard_sequence"
            )
        return run(query, key, value, *rest)

    attention.is_ours = True  # pyrefly: ignore[missing-attribute]
    return attention


def _ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_captured: tuple[Any, ...] = (),
    mask_captured: tuple[Any, ...] = (),
) -> Outputs:
    """Run the higher-order op on DTensors of an annotated axis, with the op's argument names.

    Raises:
        ValueError: if scores are modified, the largest scores are requested, or the mask is not a
            union of a few slices.
    """
    batch = Batch()
    if not _has_shapes_only(query):
        _refuse(score_mod, kernel_options)
        batch = Batch(slices=_slices(query, key, MaskBlocks.of(block_mask), mask_captured))
    call = Call(batch, scores_of(query, FULL, scale, 0.0, None, None), ON_DTENSORS)
    out, lse = attend(query, key, value, call, bool(kernel_options.get("OUTPUT_LOGSUMEXP", True)))
    unused = torch.empty(0, device=query.device)
    if lse is None:
        return out, unused, unused
    # FlexAttention expects lse to the base 2 and rescales it, except from its FLASH kernel.
    is_natural = kernel_options.get("BACKEND") == "FLASH"
    return out, lse if is_natural else lse / log(2), unused


def _has_shapes_only(query: Tensor) -> bool:
    """Return whether Dynamo only asks for shapes. It would wrap our errors; the call raises them.

    A tensor that records a graph does not count.
    """
    local = query._local_tensor if isinstance(query, DTensor) else query
    return isinstance(local, FakeTensor) and get_proxy_mode() is None


def _refuse(score_mod: Callable[..., Tensor], kernel_options: dict[str, Any]) -> None:
    if not leaves_scores(score_mod):
        raise ValueError(
            "score_mod cannot be served over a sharded sequence; leave it out, and use "
            "dtensor_ring.ring_attention with scale, softcap or sinks if it is one of those"
        )
    if kernel_options.get("OUTPUT_MAX"):
        raise ValueError(
            "max_scores cannot be served over a sharded sequence; ask for "
            "AuxRequest(lse=True) alone"
        )


def _slices(
    query: Tensor, key: Tensor, blocks: MaskBlocks, captured: tuple[Any, ...]
) -> Tensor | None:
    """Return the slices that queries see, `None` if they see everything."""
    if blocks.block_size[0] >= MIN_EMPTY_BLOCK and shows_all(blocks.function):
        return None
    lengths = query.shape[SEQUENCE], key.shape[SEQUENCE]
    if blocks.lengths != lengths:
        raise ValueError(
            f"block_mask must be of the whole sequence, {lengths[0]} queries and {lengths[1]} "
            f"keys, got one of {blocks.lengths[0]} and {blocks.lengths[1]}"
        )
    if blocks.partial_counts.shape[0] not in (1, query.shape[BATCH]):
        raise ValueError(
            f"block_mask must be one for all batch rows or have {query.shape[BATCH]}, as the query "
            f"has, got {blocks.partial_counts.shape[0]}"
        )
    if any(isinstance(x, DTensor) for x in captured):
        raise ValueError(
            "the function of block_mask must capture plain tensors, which each rank has whole, got "
            "a DTensor; use full_tensor() before"
        )
    return table_of(blocks, captured)


def _new_empty_handler(previous: Handler | None) -> Handler:
    """Return plain indices to Dynamo, see Note [How a call of flex_attention gets here]."""

    def handle(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = arguments_of(op, args, kwargs)
        x, size = bound["self"], bound["size"]
        is_index = not len(size) and TracingContext.try_get() is not None
        if is_index and on_annotated_axis(x, x.ndim - 2) and _has_shapes_only(x):
            return x._local_tensor.new_empty([], **kwargs)
        return as_before(previous, op, args, kwargs)

    return handle


# Note [Known block masks]: all layers of a model pass the same block mask. The slices of a mask are
# kept as long as its index tensor lives, and used if its function and the content of its tensors
# are still the same. Tensor versions do not suffice: collectives write without raising them.
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
        list(blocks.lengths),
        blocks.partial_counts,
        blocks.partial_indices,
        blocks.full_counts,
        blocks.full_indices,
        list(blocks.block_size),
        function,
        tensors,
        numbers,
    )


def _bound(function: MaskFunction, captured: Sequence[Any]) -> MaskFunction:
    """Return the mask function with its captured arguments bound."""
    return lambda *indices: function(*indices, *captured)


def _capacity(num_queries: int) -> int:
    """Return the number of slices of a row's table: graphs need a shape that depends on no data."""
    return min(MAX_SLICES, 64 + num_queries // 4)


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
    blocks = MaskBlocks(
        lengths=sizes[0],
        partial_counts=partial_counts,
        partial_indices=partial_indices,
        full_counts=full_counts,
        full_indices=full_indices,
        block_size=sizes[1],
        function=_bound(function_of(function), arguments),
    )
    known_slices = _known(blocks, (*tables, *captured), (*sizes, function, *numbers))
    num_slices, capacity = known_slices.shape[-2], _capacity(lengths[0])
    if num_slices > capacity:
        raise ValueError(
            f"block_mask takes {num_slices:,} slices, at most {capacity:,} are possible with "
            f"{lengths[0]:,} queries: it is no union of a few bands, or one of many short ones; "
            f"slices_of_block_mask and ring_attention take up to {MAX_SLICES:,}"
        )
    table = np.zeros((len(partial_counts), capacity, NUM_FIELDS), dtype=np.int32)
    table[:, :num_slices] = known_slices
    return torch.from_numpy(table[0] if len(table) == 1 else table)


def _known(
    blocks: MaskBlocks, tensors: tuple[Tensor | None, ...], others: tuple[Any, ...]
) -> np.ndarray:
    """Return the slices of blocks, made once; see Note [Known block masks]."""
    refuse_block_mask(blocks.partial_counts.device)
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


def _fake(lengths: Any, partial_counts: Tensor, partial_indices: Tensor, *rest: Any) -> Tensor:
    num_rows, capacity = partial_counts.shape[0], _capacity(lengths[0])
    shape = (capacity, NUM_FIELDS) if num_rows == 1 else (num_rows, capacity, NUM_FIELDS)
    return torch.empty(shape, dtype=torch.int32, device="cpu")


block_mask_slices_op = register_op(
    "block_mask_slices",
    "(SymInt[] lengths, Tensor partial_counts, Tensor partial_indices, Tensor? full_counts, "
    "Tensor? full_indices, SymInt[] block_size, str function, Tensor?[] captured, "
    "SymInt[] numbers) -> Tensor",
    _block_mask_slices,
    _fake,
)
