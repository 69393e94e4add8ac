"""The two loops: keys and values travel around the ring while the kernels work."""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_ring.comm import Packet, Rotation, SumRotation
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
    shards = Rotation(wire, plan, shard, shard[0].dtype)
    with Label("forward", 0, plan.rank)("pack"):
        held, packet = _pack(shards, shard, plan)
    for hop, step in enumerate(plan.steps, start=1):
        label = Label("forward", hop - 1, step.source)
        with label("send"):
            shards.post(hop, packet)
        forward_step(step, query, held, partial, scoring, label, hop == plan.num_steps)
        with label("wait"):
            packet = shards.wait()
        held = packet.pair if packet else held
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
    shards = Rotation(wire, plan, shard, shard[0].dtype)
    grad_dtype = grad_dtype or torch.promote_types(shard[0].dtype, torch.float32)
    sums = SumRotation(wire, plan, shard, grad_dtype)
    with Label("backward", 0, plan.rank)("pack"):
        held, packet = _pack(shards, shard, plan)
    for hop, step in enumerate(plan.steps, start=1):
        label = Label("backward", hop - 1, step.source)
        shares = GradientShare(held[0]), GradientShare(held[1])
        with label("send"):
            shards.post(hop, packet)
        grad_held = shares if hop > 1 else grad_shard
        backward_step(step, saved, held, grad_query, grad_held, scoring, label)
        if hop > 1:
            with label("wait for sums"):
                arrived = sums.wait()
            with label("merge"):
                total = _add(sums, arrived, shares, step.source) if packet else None
            with label("send sums"):
                sums.post(hop, total)
        with label("wait"):
            packet = shards.wait()
        held = packet.pair if packet else held
    label = Label("backward", plan.num_steps - 1, plan.rank)  # the last one only waits
    with label("wait for sums"):
        sums.wait()
    if sums.home:
        with label("merge"):
            for grad, home in zip(grad_shard, sums.home.pair, strict=True):
                grad.add_home(home, plan.reaches[plan.rank].cols)
    shards.close()
    sums.close()
    return grad_query.result(), grad_shard[0].result(), grad_shard[1].result()


def _pack(shards: Rotation, shard: Pair, plan: Plan) -> tuple[Pair, Packet | None]:
    """This rank's key and value side by side, as far as other ranks need them.

    Also the pair to compute on: the packed one if it is whole, in which kernels find the tokens of
    a head next to each other.
    """
    reach = plan.reaches[plan.rank]
    if not reach.num_hops:
        return shard, None
    packet = shards.packet(plan.rank)
    for view, x in zip(packet.pair, shard, strict=True):
        view.copy_(x[:, :, slice(*reach.cols)])
    whole = reach.cols == (0, shard[0].shape[2])
    return packet.pair if whole else shard, packet


def _add(
    sums: SumRotation,
    arrived: Packet | None,
    shares: tuple[GradientShare, GradientShare],
    source: int,
) -> Packet:
    """The sum that arrived, or a new one, with this rank's share added."""
    packet = arrived or sums.packet(source)
    for total, share in zip(packet.pair, shares, strict=True):
        share.add_to(total, first=arrived is None)
    return packet
