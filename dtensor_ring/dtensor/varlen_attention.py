"""Runs `torch.nn.attention.varlen.varlen_attn` on DTensors of an annotated mesh as ring attention.

Its tensors are `(T, N, H)`, with the documents of a batch one after another. The ring takes them as
one batch row, the view `(1, N, T, H)`. The rules are registered by the names of its ops, because
the ops exist only after the import of PyTorch's module, which takes a second.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtensor_ring.dtensor import dispatch
from dtensor_ring.dtensor.call_check import scores_of
from dtensor_ring.dtensor.placement import check_kinds, on_annotated_axis, wrap_on
from dtensor_ring.dtensor.sequence_tensor import SequenceTensor
from dtensor_ring.ops.boundaries import on_host
from dtensor_ring.ops.checks import called_from, check_head_dims
from dtensor_ring.ops.nodes import register_op
from dtensor_ring.ops.options import ON_DTENSORS, Batch, Call
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.slice_tables import NUM_FIELDS
from dtensor_ring.planning.slices import Slices

# The dims of a tensor `(T, N, H)`.
TOKENS, HEADS, HEAD_DIM = 0, 1, 2

TOKENS_TO_BATCH = {Shard(TOKENS): Shard(2), Shard(HEADS): Shard(1), Shard(HEAD_DIM): Shard(3)}
BATCH_TO_LSE = {Shard(2): Shard(1), Shard(1): Shard(0)}
BATCH_TO_TOKENS = {batch: tokens for tokens, batch in TOKENS_TO_BATCH.items()}
LSE_TO_BATCH = {lse: batch for batch, lse in BATCH_TO_LSE.items()}


def _aligned_slices(cu_seqlens: Tensor, key_cu_seqlens: Tensor, left: int, right: int) -> Tensor:
    """Return the bands of flash-attn, aligned at the last query and key of each document."""
    bounds, key_bounds = (on_host(x).numpy() for x in (cu_seqlens, key_cu_seqlens))
    found = Slices.bottom_right(bounds, key_bounds, _band(left, right)).numbers
    table = torch.zeros(len(bounds) - 1, NUM_FIELDS, dtype=torch.int32)
    table[: len(found)] = torch.from_numpy(found)  # empty documents have no slice
    return table


def _fake_aligned(cu_seqlens: Tensor, key_cu_seqlens: Tensor, left: int, right: int) -> Tensor:
    return torch.empty(len(cu_seqlens) - 1, NUM_FIELDS, dtype=torch.int32, device="cpu")


aligned_slices_op = register_op(
    "aligned_slices",
    "(Tensor cu_seqlens, Tensor key_cu_seqlens, int left, int right) -> Tensor",
    _aligned_slices,
    _fake_aligned,
)


def _rule(run: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """Make the rule of an op for DTensors, which PyTorch's own rules would refuse."""

    def rule(
        cls: Any, op: OpOverload, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        bound = dispatch.arguments_of(op, args, kwargs or {})
        if any(on_annotated_axis(bound[name], TOKENS) for name in ("query", "key", "value")):
            check_kinds(bound["query"], bound["key"], bound["value"])
            return called_from(sys._getframe(1), run, bound)
        return DTensor.__torch_dispatch__(op, types, args, kwargs)

    return rule


def _forward(bound: dict[str, Any]) -> tuple[Any, Any, Tensor]:
    query, key, value = (_batch_of(bound[name]) for name in ("query", "key", "value"))
    check_head_dims(query, key, value)
    out, lse = dispatch.ring_forward_dtensor(query, key, value, _call(bound))
    lse = _moved(lse, lse._local_tensor[0], lse.shape[1:], BATCH_TO_LSE)
    # The op returns a dropout state; there is no dropout, so it is unused.
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return _tokens_of(out), lse, state


def _backward(bound: dict[str, Any]) -> tuple[Any, ...]:
    names = "grad_out", "query", "key", "value", "out"
    grad_out, query, key, value, out = (_batch_of(bound[name]) for name in names)
    lse = bound["lse"]
    lse = _moved(lse, lse._local_tensor[None], (1, *lse.shape), LSE_TO_BATCH)
    *grads, _ = dispatch.ring_backward_dtensor(
        grad_out, None, query, key, value, out, lse, _call(bound)
    )
    return tuple(map(_tokens_of, grads))


def _into_memory(bound: dict[str, Any]) -> Any:
    raise ValueError(
        "varlen_attn_out cannot be served over a sharded sequence, as a ring allocates its "
        "output; use varlen_attn"
    )


def _batch_of(x: DTensor) -> DTensor:
    """View `(T, N, H)` as `(1, N, T, H)`."""
    num_tokens, num_heads, head_dim = x.shape
    local = x._local_tensor.transpose(0, 1)[None]
    return _moved(x, local, (1, num_heads, num_tokens, head_dim), TOKENS_TO_BATCH)


def _tokens_of(x: DTensor) -> DTensor:
    """View `(1, N, T, H)` as `(T, N, H)`."""
    _, num_heads, num_tokens, head_dim = x.shape
    local = x._local_tensor[0].transpose(0, 1)
    return _moved(x, local, (num_tokens, num_heads, head_dim), BATCH_TO_TOKENS)


def _moved(x: DTensor, local: Tensor, shape: Sequence[int], placements: dict[Any, Any]) -> DTensor:
    """Wrap a permuted view of the local tensor in a DTensor."""
    where = tuple(placements.get(placement, placement) for placement in x.placements)
    return wrap_on(x.device_mesh, local, tuple(shape), where)


def _call(bound: dict[str, Any]) -> Call:
    """Return the ring call for the arguments of the op.

    Raises:
        ValueError: if keys are paged or used only in part, or boundaries are not whole.
    """
    for name in ("seqused_k", "block_table"):
        if bound.get(name) is not None:
            raise ValueError(
                f"{name} cannot be served over a sharded sequence; leave it out, or decode with "
                "dtensor_ring.PagedCache"
            )
    bounds, key_bounds = _whole("cu_seq_q", bound), _whole("cu_seq_k", bound)
    window = bound.get("window_size") or (-1, 0 if bound["is_causal"] else -1)
    left, right = map(int, window)  # they may be symbols in a compiler
    scores = scores_of(bound["query"], _band(left, right), bound["scale"], 0.0, None, None)
    if bounds is key_bounds:
        batch = Batch(bounds)
    # Without a bound there is no diagonal to align.
    elif max(left, right) < 0:
        batch = Batch(bounds, key_bounds)
    else:
        table = aligned_slices_op(bounds, key_bounds, left, right)
        batch, scores = Batch(slices=table), scores._replace(mask=Mask.full())
    return Call(batch, scores, ON_DTENSORS)


def _band(left: int, right: int) -> Mask:
    """Return the mask of a window of flash-attn, where -1 means no bound."""
    return Mask(None if left < 0 else left, None if right < 0 else right)


def _whole(name: str, bound: dict[str, Any]) -> Tensor:
    """Return boundaries as a plain tensor; each rank must have all of them."""
    bounds = bound[name]
    if isinstance(bounds, DTensor) and all(where == Replicate() for where in bounds.placements):
        bounds = bounds._local_tensor
    if not isinstance(bounds, Tensor) or isinstance(bounds, DTensor) or bounds.ndim != 1:
        is_placed = isinstance(bounds, DTensor)
        given = bounds.placements if is_placed else getattr(bounds, "shape", bounds)
        raise ValueError(
            f"{name} must be a tensor (D+1,) that each rank has whole, the boundaries of documents "
            f"in the whole sequence, got {given}"
        )
    return bounds


for _name, _run in (
    ("_varlen_attn", _forward),
    ("_varlen_attn_backward", _backward),
    ("_varlen_attn_out", _into_memory),
):
    for _class in (DTensor, SequenceTensor):
        torch.library.register_torch_dispatch(f"torch_attn::{_name}", _class, _rule(_run))
