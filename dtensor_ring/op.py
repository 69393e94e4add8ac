"""The registered ops: schema, checks, fake kernels, autograd, autocast and flops."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils.flop_counter import register_flop_formula

from dtensor_ring.execute import Saved, Scoring
from dtensor_ring.kernels import Problem, select_kernel
from dtensor_ring.layout import LAYOUTS, shard_length
from dtensor_ring.mask import Mask
from dtensor_ring.plan import Documents, Plan, plan
from dtensor_ring.ring import ring_backward, ring_forward

FORWARD = "dtensor_ring::ring_attention"
BACKWARD = "dtensor_ring::ring_attention_backward"

_OPTIONS = (
    "Tensor? cu_seqlens, Tensor? sinks, SymInt seq_len, str layout, int? left, int? right, "
    "float scale, float softcap, str? kernel, str group_name"
)
torch.library.define(
    FORWARD, f"(Tensor query, Tensor key, Tensor value, {_OPTIONS}) -> (Tensor out, Tensor lse)"
)
torch.library.define(
    BACKWARD,
    "(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, "
    f"Tensor lse, {_OPTIONS}) "
    "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_sinks)",
)


@torch.library.impl(FORWARD, "CompositeExplicitAutograd")
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | None,
    sinks: Tensor | None,
    seq_len: int,
    layout: str,
    left: int | None,
    right: int | None,
    scale: float,
    softcap: float,
    kernel: str | None,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    check_shapes(query, key, value, sinks)
    mask, group = Mask(left, right), _group(group_name)
    schedule = _plan(query, cu_seqlens, seq_len, layout, mask, group)
    chosen = select_kernel(kernel, _problem(query, key, value, mask, softcap))
    return ring_forward(
        query, (key, value), schedule, Scoring(chosen, scale, softcap), group, sinks
    )


@torch.library.impl(BACKWARD, "CompositeExplicitAutograd")
def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    sinks: Tensor | None,
    seq_len: int,
    layout: str,
    left: int | None,
    right: int | None,
    scale: float,
    softcap: float,
    kernel: str | None,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mask, group = Mask(left, right), _group(group_name)
    schedule = _plan(query, cu_seqlens, seq_len, layout, mask, group)
    problem = _problem(query, key, value, mask, softcap, grad_lse is not None)
    scoring = Scoring(select_kernel(kernel, problem), scale, softcap)
    saved = Saved(grad_out, query, out, lse, grad_lse)
    grads = ring_backward(saved, (key, value), schedule, scoring, group)
    return *grads, _sinks_gradient(saved, sinks)


def _sinks_gradient(saved: Saved, sinks: Tensor | None) -> Tensor:
    """This rank's share of the gradient of the sinks `(N,)`; an empty tensor without sinks."""
    if sinks is None:
        return saved.query.new_empty(0)
    slope = -(saved.grad_out.to(saved.lse.dtype) * saved.out).sum(-1)
    if saved.grad_lse is not None:
        slope += saved.grad_lse
    weight = (sinks.to(slope.dtype).view(1, -1, 1) - saved.lse).exp()
    return (weight * slope).sum((0, 2)).to(sinks.dtype)


def check_shapes(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> None:
    """Refuse what no ring can serve.

    Raises:
        ValueError: with what was given and what is supported.
    """
    tensors = {"query": query, "key": key, "value": value}
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
    if any(x.ndim != 4 for x in tensors.values()):
        raise ValueError(f"query, key and value must be (B, N, L, H), got {shapes}")
    for what in ("dtype", "device"):
        found = {name: getattr(x, what) for name, x in tensors.items()}
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{name} {kind}" for name, kind in found.items())
            raise ValueError(f"query, key and value must have one {what}, got {listed}; use .to()")
    if not query.dtype.is_floating_point or query.dtype.itemsize < 2:
        raise ValueError(f"attention needs a floating dtype of 16 bits or more, got {query.dtype}")
    if query.shape[0] != key.shape[0] or key.shape[:3] != value.shape[:3]:
        raise ValueError(f"query, key and value disagree in batch, heads or length: {shapes}")
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"query and key must be shards of one sequence, got {shapes}")
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"query and key must have one head dim, got {shapes}")
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"the query heads must be a multiple of the key heads, got {shapes}; "
            "grouped-query heads are shared in order and need not be repeated"
        )
    if sinks is not None and tuple(sinks.shape) != (query.shape[1],):
        raise ValueError(
            f"sinks must hold one logit per query head, shape ({query.shape[1]},), "
            f"got {tuple(sinks.shape)}"
        )


def _group(group_name: Any) -> dist.ProcessGroup:
    return _resolve_process_group(group_name)


def _plan(
    query: Tensor,
    cu_seqlens: Tensor | None,
    seq_len: int,
    layout: str,
    mask: Mask,
    group: dist.ProcessGroup,
) -> Plan:
    documents = None if cu_seqlens is None else documents_of(cu_seqlens, query.shape[0])
    rank, world_size = group.rank(), group.size()
    result = plan(LAYOUTS[layout], mask, rank, world_size, seq_len, documents)
    expected = shard_length(rank, world_size, seq_len)
    if query.shape[2] != expected:
        raise ValueError(
            f"rank {rank} of {world_size} holds {query.shape[2]} tokens, but its shard of a "
            f"sequence of {seq_len} has {expected}"
        )
    return result


def documents_of(cu_seqlens: Tensor, batch: int) -> Documents:
    """The boundaries as the planner wants them.

    Raises:
        ValueError: if they are not int32 on the CPU, of shape (D+1,) or (batch, D+1).
    """
    if cu_seqlens.device.type != "cpu":
        raise ValueError(
            f"cu_seqlens must be on the CPU, where the ring is planned, got {cu_seqlens.device}; "
            "move it once per batch with cu_seqlens.cpu()"
        )
    if cu_seqlens.dtype != torch.int32:
        raise ValueError(f"cu_seqlens must be int32, got {cu_seqlens.dtype}; use .int()")
    if cu_seqlens.ndim not in (1, 2) or (cu_seqlens.ndim == 2 and len(cu_seqlens) != batch):
        raise ValueError(
            f"cu_seqlens must have shape (D+1,) or ({batch}, D+1), got {tuple(cu_seqlens.shape)}"
        )
    rows = cu_seqlens.tolist()
    return tuple(map(tuple, rows)) if cu_seqlens.ndim == 2 else (tuple(rows),)


def _problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    softcap: float,
    differentiable_lse: bool = False,
) -> Problem:
    return Problem(
        query.device.type,
        query.dtype,
        query.shape[1],
        key.shape[1],
        query.shape[3],
        value.shape[3],
        mask,
        softcap,
        differentiable_lse,
    )


def _empty_token_major(like: Tensor, head_dim: Any) -> Tensor:
    batch, heads, length, _ = like.shape
    return like.new_empty(batch, length, heads, head_dim).transpose(1, 2)


@torch.library.register_fake(FORWARD)
def _fake_forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Any, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    check_shapes(query, key, value, sinks)
    wide = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_empty(query.shape[:3], dtype=wide)
    return _empty_token_major(query, value.shape[3]), lse


@torch.library.register_fake(BACKWARD)
def _fake_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Any,
    sinks: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads = [_empty_token_major(x, x.shape[3]) for x in (query, key, value)]
    grad_sinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return grads[0], grads[1], grads[2], grad_sinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, cu_seqlens, sinks, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seqlens, sinks)
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    query, key, value, out, lse, cu_seqlens, sinks = ctx.saved_tensors
    none = (None,) * len(ctx.options)
    if grad_out is None and grad_lse is None:
        return (None,) * 5 + none
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    *grads, grad_sinks = torch.ops.dtensor_ring.ring_attention_backward(
        grad_out, grad_lse, query, key, value, out, lse, cu_seqlens, sinks, *ctx.options
    )
    return *grads, None, None if sinks is None else grad_sinks, *none


torch.library.register_autograd(FORWARD, _autograd, setup_context=_setup_context)


def _autocast(device_type: str) -> None:
    """Cast query, key and value to the autocast dtype, as scaled_dot_product_attention does."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}"))

    def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
        eligible = x.is_floating_point() and x.dtype != torch.float64
        return x.to(dtype) if eligible and x.device.type == device_type else x

    def run(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return torch.ops.dtensor_ring.ring_attention(
                cast(query, dtype), cast(key, dtype), cast(value, dtype), *options
            )

    torch.library.impl(FORWARD, f"Autocast{device_type.upper()}")(run)


_autocast("cpu")
_autocast("cuda")

ring_op = torch.ops.dtensor_ring.ring_attention.default
ring_backward_op = torch.ops.dtensor_ring.ring_attention_backward.default


@register_flop_formula(torch.ops.dtensor_ring.ring_attention, get_raw=True)
def _forward_flops(query: Tensor, key: Tensor, value: Tensor, *options: Any, **_: Any) -> int:
    """Two products of 2 flops per visible pair and head dim, of this rank."""
    return 2 * _visible_pairs(query, *options) * (query.shape[3] + value.shape[3])


@register_flop_formula(torch.ops.dtensor_ring.ring_attention_backward, get_raw=True)
def _backward_flops(
    grad_out: Tensor,
    grad_lse: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *options: Any,
    **_: Any,
) -> int:
    """Five products: the scores again, and the gradients of scores, query, key and value."""
    return 2 * _visible_pairs(query, *options) * (3 * query.shape[3] + 2 * value.shape[3])


def _visible_pairs(
    query: Tensor,
    cu_seqlens: Tensor | None,
    sinks: Any,
    seq_len: int,
    layout: str,
    left: int | None,
    right: int | None,
    scale: float,
    softcap: float,
    kernel: Any,
    group_name: str,
) -> int:
    """Pairs of query and key that this rank scores, over batch and heads."""
    group = _group(group_name)
    schedule = _plan(query, cu_seqlens, seq_len, layout, Mask(left, right), group)
    batch, heads = query.shape[:2]
    tiles = [tile for step in schedule.steps for tile in step.tiles]
    return heads * sum(tile.area * (batch if tile.batch is None else 1) for tile in tiles)


def default_scale(head_dim: int) -> float:
    """The usual softmax scale, one over the square root of the head dim."""
    return 1.0 / math.sqrt(head_dim)
