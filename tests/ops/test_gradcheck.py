"""Gradients against finite differences, and none of second order."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from dtensor_ring import Mask, ZigZag
from tests.pool import Pool, on_ranks
from tests.rings import Case, Ring, local

CAUSAL = Mask.causal()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "option", [{}, {"sinks": (0.5, -1.0)}, {"softcap": 1.5}], ids=["plain", "sinks", "softcap"]
)
def test_gradcheck(pool: Pool, world_size: int, option: dict[str, Any]) -> None:
    """float64, through the reference kernel, of out and lse."""
    ring = Ring(ZigZag(), world_size, 5, CAUSAL)
    case = Case(ring, heads=(2, 1), head_dims=(2, 3), batch=1, kernel="reference", **option)
    assert pool.run(world_size, _gradcheck, case) == [True] * world_size


def _gradcheck(case: Case) -> bool:
    inputs = [x.requires_grad_() for x in case.inputs()]
    return torch.autograd.gradcheck(lambda *x: Everywhere.apply(case, *x), inputs)


@on_ranks(2)
def test_second_derivatives_are_refused() -> None:
    case = Case(Ring(ZigZag(), 2, 8, CAUSAL))
    inputs = [x.requires_grad_() for x in case.shards(dist.get_rank())]
    out, _ = case.attend(*inputs)
    grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        grads[0].sum().backward()


@on_ranks(1)
def test_forward_mode_is_refused() -> None:
    """Its tangent would be lost."""
    case = Case(Ring(ZigZag(), 1, 8, CAUSAL))
    inputs = [x.detach() for x in case.inputs()]
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")  # PyTorch's own, inside
    with forward_ad.dual_level():
        case.attend(*inputs)  # no tangent, no objection
        dual = forward_ad.make_dual(inputs[1], torch.ones_like(inputs[1]))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            case.attend(inputs[0], dual, inputs[2])


class Everywhere(torch.autograd.Function):
    """The ring as a function of global tensors, called in lockstep on all ranks."""

    @staticmethod
    def forward(ctx: Any, case: Case, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.positions = case.ring.positions(dist.get_rank())
        ctx.shards = [local(x, ctx.positions).requires_grad_() for x in inputs]
        ctx.seq_len = case.ring.seq_len
        with torch.enable_grad():
            ctx.outputs = case.attend(*ctx.shards)
        return tuple(Everywhere.whole(ctx, x.detach()) for x in ctx.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shard_grads = [x[:, :, ctx.positions] for x in grads]
        shares = torch.autograd.grad(ctx.outputs, ctx.shards, shard_grads, retain_graph=True)
        return None, *(Everywhere.whole(ctx, x) for x in shares)

    @staticmethod
    def whole(ctx: Any, x: Tensor) -> Tensor:
        """Of all ranks: shards at their positions, or the sum for sinks."""
        result = x.clone() if x.ndim == 1 else x.new_zeros(*x.shape[:2], ctx.seq_len, *x.shape[3:])
        if x.ndim > 1:
            result[:, :, ctx.positions] = x
        dist.all_reduce(result)
        return result
