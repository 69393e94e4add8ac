"""Selective checkpointing under hooks of saved tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from dtensor_ring import SequenceAxis
from dtensor_ring.ops.ring_op import ring_backward_op, ring_op
from parallel_plans.huggingface import ring_checkpoint_contexts
from tests.huggingface.test_families_trained import RingCalls
from tests.pool import on_ranks

SHAPE = (1, 2, 6, 4)


@on_ranks(2)
def test_hooks_get_inputs_and_results_of_attention() -> None:
    axis = SequenceAxis(init_device_mesh("cpu", (dist.get_world_size(),)), "zigzag")
    packed: list[tuple[int, ...]] = []

    def layer(x: Tensor) -> Tensor:
        return axis.attention(x, x.cos(), x.sin()).tanh()

    def pack(x: Tensor) -> Tensor:
        packed.append(tuple(x.shape))
        return x.clone()

    grads, how = [], {"use_reentrant": False, "context_fn": ring_checkpoint_contexts}
    x = torch.linspace(-1, 1, 48).view(SHAPE).requires_grad_()
    for is_kept in (False, True):
        with RingCalls() as calls, saved_tensors_hooks(pack, lambda y: y):
            if is_kept:
                packed.clear()
                out = checkpoint(layer, x, **how)
                seen = list(packed)
            else:
                out = layer(x)
            grads.append(torch.autograd.grad(out.sum(), x, retain_graph=is_kept)[0])
    with pytest.raises(RuntimeError, match=r"second backward of a layer .* retain_graph=True"):
        torch.autograd.grad(out.sum(), x)
    counts = calls.counts[ring_op], calls.counts[ring_backward_op]
    found = {"error": (grads[0] - grads[1]).abs().max().item(), "seen": seen, "calls": counts}
    assert found == {"error": 0, "seen": [SHAPE, SHAPE, SHAPE[:3]], "calls": (1, 1)}
