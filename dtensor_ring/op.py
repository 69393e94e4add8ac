"""The registered ops: schema, fake kernels, autograd and autocast."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.distributed_c10d import _resolve_process_group

from dtensor_ring.check import check_inputs, documents_of, run_table
from dtensor_ring.execute import Saved, Scoring
from dtensor_ring.kernels import Problem, select_kernel
from dtensor_ring.layout import as_layout, shard_length
from dtensor_ring.mask import Mask
from dtensor_ring.order import TOKEN_MAJOR, empty, order_of
from dtensor_ring.plan import Documents, Plan, plan
from dtensor_ring.ring import ring_backward, ring_forward
from dtensor_ring.wire import GroupWire

FORWARD = "dtensor_ring::ring_attention"
BACKWARD = "dtensor_ring::ring_attention_backward"

_OPTIONS = (
    "Tensor? cu_seqlens, Tensor? key_cu_seqlens, Tensor? runs, Tensor? sinks, SymInt seq_len, "
    "SymInt key_seq_len, str layout, int? left, int? right, int? chunk, int? prefix, "
    "float scale, float softcap, str? kernel, ScalarType? grad_dtype, str group_name"
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
ring_op = torch.ops.dtensor_ring.ring_attention.default
ring_backward_op = torch.ops.dtensor_ring.ring_attention_backward.default


NUM_TENSORS = _OPTIONS.count("Tensor?")


class Options(NamedTuple):
    """What both ops take behind their tensors, in the order of the schema."""

    cu_seqlens: Tensor | None = None
    key_cu_seqlens: Tensor | None = None
    runs: Tensor | None = None
    sinks: Tensor | None = None
    seq_len: int = 0
    key_seq_len: int = 0
    layout: str = ""
    left: int | None = None
    right: int | None = None
    chunk: int | None = None
    prefix: int | None = None
    scale: float = 1.0
    softcap: float = 0.0
    kernel: str | None = None
    grad_dtype: torch.dtype | None = None
    group_name: Any = ""

    @property
    def mask(self) -> Mask:
        return Mask(self.left, self.right, self.chunk, self.prefix)

    def under(self, mask: Mask) -> Options:
        """The same with that mask."""
        return self._replace(left=mask.left, right=mask.right, chunk=mask.chunk, prefix=mask.prefix)

    @property
    def group(self) -> dist.ProcessGroup:
        return _resolve_process_group(self.group_name)

    @property
    def wire(self) -> GroupWire:
        return GroupWire(self.group)

    def documents(self, batch: int) -> tuple[Documents | None, Documents | None]:
        """Boundaries of the queries and of the keys, as the planner wants them."""
        is_numbered = self.key_cu_seqlens is not None
        queries, keys = (
            None if given is None else documents_of(given, name, batch, is_numbered)
            for name, given in zip(self._fields[:2], self[:2], strict=True)
        )
        return queries, keys

    def plan(self, query: Tensor, key: Tensor) -> Plan:
        """This rank's plan, once the lengths of its shards are seen to be right."""
        rank, world_size = self.group.rank(), self.group.size()
        documents, key_documents = self.documents(query.shape[0])
        layout = as_layout(self.layout) if self.runs is None else run_table(self.runs)
        result = plan(
            *(layout, self.mask, rank, world_size, self.seq_len, documents),
            *(self.key_seq_len, key_documents),
        )
        for x, seq_len in ((query, self.seq_len), (key, self.key_seq_len)):
            expected = shard_length(rank, world_size, seq_len)
            if x.shape[2] != expected:
                raise ValueError(
                    f"rank {rank} of {world_size} holds {x.shape[2]} tokens, but its shard of a "
                    f"sequence of {seq_len} has {expected}"
                )
        return result

    def scoring(self, query: Tensor, value: Tensor, differentiable_lse: bool = False) -> Scoring:
        """The kernel to use, the named one or the first that can."""
        problem = Problem(
            query.device.type,
            query.dtype,
            query.shape[3],
            value.shape[3],
            self.scale,
            self.softcap,
            differentiable_lse,
            windowed=self.left is not None,  # one bound on the right is cut into squares
            grouped=query.shape[1] != value.shape[1],
            packed=self.cu_seqlens is not None or self.chunk is not None,
        )
        return Scoring(select_kernel(self.kernel, problem), self.scale, self.softcap)


@torch.library.impl(FORWARD, "CompositeExplicitAutograd")
def _forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    options = Options(*rest)
    check_inputs(query, key, value, options.sinks, options.grad_dtype)
    mine, scoring = options.plan(query, key), options.scoring(query, value)
    query, key, value = _unit_stride(query, key, value)
    return ring_forward(query, (key, value), mine, scoring, options.wire, options.sinks)


@torch.library.impl(BACKWARD, "CompositeExplicitAutograd")
def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = Options(*rest)
    mine = options.plan(query, key)
    grad_out, query, key, value = _unit_stride(grad_out, query, key, value)
    saved = Saved(grad_out, query, out, lse, grad_lse)
    scoring = options.scoring(query, value, differentiable_lse=grad_lse is not None)
    grads = ring_backward(saved, (key, value), mine, scoring, options.wire, options.grad_dtype)
    return *grads, _sinks_gradient(saved, options.sinks)


def _unit_stride(*tensors: Tensor) -> list[Tensor]:
    """The tensors with a last stride of 1: kernels rely on it, and not all of them check."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _sinks_gradient(saved: Saved, sinks: Tensor | None) -> Tensor:
    """This rank's share of the gradient of the sinks `(N,)`; an empty tensor without sinks."""
    if sinks is None:
        return saved.query.new_empty(0)
    slope = -(saved.grad_out.to(saved.lse.dtype) * saved.out).sum(-1)
    if saved.grad_lse is not None:
        slope += saved.grad_lse
    weight = (sinks.to(slope.dtype).view(1, -1, 1) - saved.lse).exp()
    weight = weight.masked_fill_(saved.lse == -torch.inf, 0.0)
    return (weight * slope).sum((0, 2)).to(sinks.dtype)


@torch.library.register_fake(FORWARD)
def _fake_forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    options = Options(*rest)
    check_inputs(query, key, value, options.sinks, options.grad_dtype)
    wide = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_empty(query.shape[:3], dtype=wide)
    (query,) = _unit_stride(query)
    out = empty(query, (*query.shape[:3], value.shape[3]), order_of(query))
    return out, lse


@torch.library.register_fake(BACKWARD)
def _fake_backward(
    grad_out: Tensor, grad_lse: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sinks = Options(*rest[2:]).sinks
    grads = [empty(x, x.shape, TOKEN_MAJOR) for x in (query, key, value)]
    grad_sinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return grads[0], grads[1], grads[2], grad_sinks


class _RingFunction(torch.autograd.Function):
    """What autograd records of a call.

    Written out because `torch.library.register_autograd` looks at every argument of the schema in
    the light of every other, which at this many takes longer than all else a call costs the host.
    """

    @staticmethod
    def forward(ctx: Any, keyset: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = _below_autograd(keyset, *inputs)
        query, key, value, *rest = inputs
        ctx.save_for_backward(query, key, value, *output, *rest[:NUM_TENSORS])
        ctx.options = rest[NUM_TENSORS:]
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        grad_out, grad_lse = grads
        query, key, value, out, lse, *rest = ctx.saved_tensors
        options = Options(*rest, *ctx.options)
        if grad_out is None and grad_lse is None:
            return (None,) * (4 + len(options))
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        *of_inputs, grad_sinks = ring_backward_op(
            grad_out, grad_lse, query, key, value, out, lse, *options
        )
        differentiable = {} if options.sinks is None else {"sinks": grad_sinks}
        return None, *of_inputs, *map(differentiable.get, Options._fields)


def _below_autograd(keyset: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        return ring_op.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)


def _autograd(keyset: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
    is_recorded = torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)
    if forward_ad._current_level >= 0 and not is_recorded:
        _refuse_tangents(inputs)
    return (_RingFunction.apply if is_recorded else _below_autograd)(keyset, *inputs)


def _refuse_tangents(inputs: tuple[Any, ...]) -> None:
    """They would be lost in silence; where gradients are recorded, autograd says so."""
    for x in inputs:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError("ring attention has no forward-mode derivative")


def _refuse_second(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError("ring attention is differentiable once, not twice")


_LIBRARY = torch.library.Library("dtensor_ring", "FRAGMENT")
_LIBRARY.impl("ring_attention", _autograd, "Autograd", with_keyset=True)
torch.library.register_autograd(BACKWARD, _refuse_second)


def _autocast(device_type: str) -> None:
    """Cast query, key and value to the autocast dtype, as scaled_dot_product_attention does.

    Below, and in all of backward, nothing is cast.
    """
    name = f"Autocast{device_type.upper()}"
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))

    def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
        eligible = x.is_floating_point() and x.dtype != torch.float64
        return x.to(dtype) if eligible and x.device.type == device_type else x

    def run(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return ring_op(cast(query, dtype), cast(key, dtype), cast(value, dtype), *options)

    def run_backward(*inputs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return ring_backward_op(*inputs)

    torch.library.impl(FORWARD, name)(run)
    torch.library.impl(BACKWARD, name)(run_backward)


_autocast("cpu")
_autocast("cuda")


def default_scale(head_dim: int) -> float:
    """The usual softmax scale, one over the square root of the head dim."""
    return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
