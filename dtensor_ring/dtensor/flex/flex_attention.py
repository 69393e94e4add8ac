"""Runs `flex_attention` on DTensors of an annotated mesh as ring attention.

Note [How a call of flex_attention gets here]: outside of a compiled graph, PyTorch compiles the
call itself. Dynamo traces `score_mod` and the mask function into small graphs, and puts a
higher-order op into its own graph, which runs eagerly or is compiled further. That op first asks
its autograd kernel. Ours takes over there, with the user's DTensors, so the ring's own autograd
applies. In inference mode the op asks for a rule for the tensor subclass instead.

Dynamo traces both functions with indices that it makes by `query.new_empty([])`. For a DTensor this
is a DTensor, which cannot index the plain tensors that mask functions capture, such as the document
number of each token. So this call returns a plain tensor while a compiler traces. It is in no
graph, because Dynamo discards it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._guards import TracingContext
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_op
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from dtensor_ring.dtensor.arguments import scores_of
from dtensor_ring.dtensor.attention import attend
from dtensor_ring.dtensor.dispatch import arguments_of
from dtensor_ring.dtensor.flex.block_mask import MaskBlocks
from dtensor_ring.dtensor.flex.mask_function import leaves_scores, shows_all
from dtensor_ring.dtensor.flex.mask_table import table_of
from dtensor_ring.dtensor.placement import BATCH, SEQUENCE, describe, on_annotated_axis
from dtensor_ring.dtensor.sdpa import Handler, add_handlers, as_before
from dtensor_ring.ops.options import ON_DTENSORS, Batch, Call
from dtensor_ring.planning.tile import FULL

# Without a mask, FlexAttention makes one with a single block of at least this size.
MIN_EMPTY_BLOCK = 1 << 30

# Output, log-sum-exp to the base 2, and the largest scores, which are empty unless requested.
Outputs = tuple[Tensor, Tensor, Tensor]

Kernel = Callable[..., Outputs]


def install_flex() -> None:
    """Let `flex_attention` ask us first about DTensors; other calls continue as before."""
    kernels = flex_attention_op.py_kernels
    if not getattr(kernels.get(DispatchKey.Autograd), "is_ours", False):
        kernels[DispatchKey.Autograd] = _kernel(kernels.get(DispatchKey.Autograd))
        rules: dict[Any, Any] = flex_attention_op.python_key_table
        rules[DTensor] = _kernel(rules.get(DTensor))
        flex_attention_op._dispatch_cache.clear()  # it holds the kernels of earlier calls
    add_handlers((torch.ops.aten.new_empty.default,), _new_empty_handler)


def _kernel(previous: Kernel | None) -> Kernel:
    def attention(query: Any, key: Any, value: Any, *rest: Any) -> Outputs:
        if any(on_annotated_axis(x, SEQUENCE) for x in (query, key, value)):
            return _ring_attention(query, key, value, *rest)
        if previous is not None:
            return previous(query, key, value, *rest)
        raise NotImplementedError(
            f"flex_attention on DTensors needs query, key and value (batch, heads, sequence, head "
            f"dim) in Shard(2) over an axis that has a layout, got query {describe(query)}; see "
            "shard_sequence"
        )

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
