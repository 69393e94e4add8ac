"""The two loops: keys and values travel between the ranks while the kernels work."""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_ring.comm import ShardRotation, SumRotation
from dtensor_ring.execute import Pair, Saved, Scoring, backward_step, forward_step
from dtensor_ring.gradient import GradientShare, GradientSum
from dtensor_ring.partial import Partial
from dtensor_ring.plan import Plan
from dtensor_ring.trace import Label
from dtensor_ring.wire import Wire


def ring_forward(
    query: Tensor,
    shard: Pair,
    plan: Plan,
    scoring: Scoring,
    wire: Wire,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of the local queries over all keys and values of the ring."""
    partial = Partial(query, shard[1].shape[3], sinks)
    shards = ShardRotation(wire, plan, shard)
    for hop, step in enumerate(plan.steps, start=1):
        label = Label("forward", hop - 1, step.source)
        shards.post(hop, label)
        forward_step(step, query, shards.held, partial, scoring, label, hop == plan.num_steps)
        shards.wait(label)
    shards.close()
    return partial.result()


def ring_backward(
    saved: Saved,
    shard: Pair,
    plan: Plan,
    scoring: Scoring,
    wire: Wire,
    grad_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the local query, key and value; by default sums travel as float32 or wider."""
    grad_query = GradientSum(saved.query)
    grad_shard = GradientSum(shard[0]), GradientSum(shard[1])
    shards = ShardRotation(wire, plan, shard)
    grad_dtype = grad_dtype or torch.promote_types(shard[0].dtype, torch.float32)
    sums = SumRotation(wire, plan, shard, grad_dtype)
    for hop, step in enumerate(plan.steps, start=1):
        label = Label("backward", hop - 1, step.source)
        shards.post(hop, label)
        shares = GradientShare(shards.held[0]), GradientShare(shards.held[1])
        grad_held = shares if hop > 1 else grad_shard
        backward_step(step, saved, shards.held, grad_query, grad_held, scoring, label)
        if hop > 1:
            sums.wait(grad_shard, label)
            sums.post(hop - 1, shares, label)
        shards.wait(label)
    sums.wait(grad_shard, Label("backward", plan.num_steps - 1, plan.rank))
    shards.close()
    sums.close()
    return grad_query.result(), grad_shard[0].result(), grad_shard[1].result()
