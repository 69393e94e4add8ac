"""The forward and backward loops: keys and values travel between ranks while kernels run."""

from __future__ import annotations

from torch import Tensor

from dtensor_ring.compute.accumulate import GradientShare, GradientSum, RunningOutput
from dtensor_ring.compute.dropout import ShardDropout
from dtensor_ring.compute.execute import Pair, backward_step, forward_step
from dtensor_ring.compute.kernels import Kernel, Saved, Scores
from dtensor_ring.compute.merge import accumulate_sums
from dtensor_ring.compute.trace import Label
from dtensor_ring.planning.plan import Plan, Step
from dtensor_ring.transport.quantised_rotation import shard_rotation
from dtensor_ring.transport.rotation import SumRotation
from dtensor_ring.transport.transport import DEFAULT_POLICY, TransferPolicy, Transport

Sums = tuple[GradientSum, GradientSum]
Shares = tuple[GradientShare, GradientShare]


def ring_forward(
    query: Tensor,
    shard: Pair,
    plan: Plan,
    kernel: Kernel,
    scores: Scores,
    transport: Transport,
    policy: TransferPolicy = DEFAULT_POLICY,
    rounded: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)` of the local queries over all keys and values of the ring."""
    running = RunningOutput(query, shard[1].shape[3], scores.sinks, room=policy.num_parts)
    dropped = _dropped(query, plan, scores)
    with shard_rotation(transport, plan, shard, policy.kv_dtype, rounded) as shards:
        for step in plan.steps:
            label = Label("forward", step.number, step.source)
            in_flight = plan.shards[step.number].moves
            dropout = None if dropped is None else dropped.of_keys(step.runs, step.cols)
            how = running, kernel, scores, label
            with shards.moving(step, label) as kv:
                forward_step(step, query, kv, *how, in_flight=in_flight, dropout=dropout)
    with label("merge"):
        return running.result()


def ring_backward(
    saved: Saved,
    query: Tensor,
    shard: Pair,
    plan: Plan,
    kernel: Kernel,
    scores: Scores,
    transport: Transport,
    policy: TransferPolicy = DEFAULT_POLICY,
    rounded: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the local query, key and value."""
    grad_query = GradientSum(query, policy.num_parts)
    grad_shard = GradientSum(shard[0]), GradientSum(shard[1])
    sum_dtype = policy.sum_dtype(shard[0].dtype)
    dropped = _dropped(query, plan, scores)
    with (
        shard_rotation(transport, plan, shard, policy.kv_dtype, rounded) as shards,
        SumRotation(transport, plan, shard, sum_dtype) as sums,
    ):
        for step in plan.steps:
            label = Label("backward", step.number, step.source)
            dropout = None if dropped is None else dropped.of_keys(step.runs, step.cols)
            with shards.moving(step, label) as kv:
                shares = GradientShare(kv[0]), GradientShare(kv[1])
                # Step 0 is this rank's own shard, whose gradients need not travel.
                grad_kv = shares if step.number else grad_shard
                how = grad_query, grad_kv, kernel, scores, label, dropout
                backward_step(step, saved, query, kv, *how)
                if step.number:
                    _collect(sums, grad_shard, label)
                    _contribute(sums, step, shares, label)
                    # After the kernels: on the ring, a sum travels one hop after its shard.
                    sums.post(step, label)
        _collect(sums, grad_shard, Label("backward", len(plan.steps) - 1, plan.rank))
    return grad_query.result(), grad_shard[0].result(), grad_shard[1].result()


def _dropped(query: Tensor, plan: Plan, scores: Scores) -> ShardDropout | None:
    """Return the weights that this rank drops, `None` without dropout."""
    seed = scores.dropout_seed
    if not scores.dropout_p or seed is None:
        return None
    return ShardDropout(scores.dropout_p, seed, scores.first, query, plan.runs)


def _collect(sums: SumRotation, grad_shard: Sums, label: Label) -> None:
    """Add the gradients that other ranks summed for this rank's own keys and values."""
    for packet, is_last in sums.wait(label):
        with label("merge"):
            for grad, total in zip(grad_shard, packet.pair, strict=True):
                grad.add_arrived(total, packet.cols, is_last)


def _contribute(sums: SumRotation, step: Step, shares: Shares, label: Label) -> None:
    """Add this rank's gradients of a source's keys and values to the sum that travels."""
    if not step.cols:
        return
    with label("merge"):
        packet, is_new = sums.sum_of(step)
        # One launch adds both, on devices that have a kernel for it.
        accumulate_sums(
            *(x.to_add(total, is_new) for total, x in zip(packet.pair, shares, strict=True))
        )
