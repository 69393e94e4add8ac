"""The forward and backward loops: keys and values travel between ranks while kernels run."""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_ring.compute.accumulate import GradientSum, Partials, RunningOutput, sinks_gradient
from dtensor_ring.compute.dropout import Dropout, ShardDropout
from dtensor_ring.compute.exact import tree_sum
from dtensor_ring.compute.execute import Pair, backward_step, forward_step
from dtensor_ring.compute.kernels import Kernel, Saved, Scores
from dtensor_ring.compute.lags import Lags, is_biased, resident_positions
from dtensor_ring.compute.memory import positions_of
from dtensor_ring.compute.merge import accumulate_sums
from dtensor_ring.compute.ordered import OrderedGradients, OrderedOutput, sinks_by_block
from dtensor_ring.compute.trace import Label
from dtensor_ring.planning.plan import Plan, Step
from dtensor_ring.transport.quantised_rotation import shard_rotation
from dtensor_ring.transport.rotation import Packet, SumRotation
from dtensor_ring.transport.transport import DEFAULT_POLICY, P2P, TransferPolicy, Transport


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
    dropped = _dropped(query, plan, scores) if scores.dropout_p else None
    at = positions_of(plan.runs, query.device) if is_biased(query, shard[0]) else None
    head_dim, sinks = shard[1].shape[3], scores.sinks
    running: RunningOutput | OrderedOutput
    if plan.order is None:
        running = RunningOutput(query, head_dim, sinks, room=policy.num_parts)
    else:
        running = OrderedOutput(query, head_dim, sinks, plan.order)
    with shard_rotation(transport, plan, shard, policy.kv_dtype, rounded) as shards:
        for step in plan.steps:
            label = step.kept.get("forward") or _label("forward", step)
            hop = plan.shards[step.number]
            in_flight = bool(hop.sends or hop.receives)
            dropout = None if dropped is None else dropped.of_keys(step.runs, step.cols)
            lags = None if at is None else _lags(at, step)
            kv = shards.begin_step(step, label)
            if isinstance(running, OrderedOutput):
                running.step(step, kv, kernel, scores, label, in_flight)
            else:
                forward_step(
                    step,
                    query,
                    kv,
                    running,
                    kernel,
                    scores,
                    label,
                    in_flight=in_flight,
                    dropout=dropout,
                    lags=lags,
                )
            shards.end_step(step, label)
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
    sum_dtype = policy.sum_dtype(shard[0].dtype)
    grads = (_Arriving if plan.order is None else _Ordered)(query, shard, plan, policy)
    dropped = _dropped(query, plan, scores) if scores.dropout_p else None
    at = positions_of(plan.runs, query.device) if is_biased(query, shard[0]) else None
    with (
        shard_rotation(transport, plan, shard, policy.kv_dtype, rounded) as shards,
        SumRotation(transport, plan, shard, sum_dtype) as sums,
    ):
        for step in plan.steps:
            label = step.kept.get("backward") or _label("backward", step)
            dropout = None if dropped is None else dropped.of_keys(step.runs, step.cols)
            lags = None if at is None else _lags(at, step)
            kv = shards.begin_step(step, label)
            grads.compute(step, saved, kv, kernel, scores, label, dropout, lags)
            if step.number > 1:  # nothing was posted after step 0
                _collect(sums, grads, step.number - 1, label)
            if step.number:
                grads.contribute(sums, step, label)
                # After the kernels: on the ring, a sum travels one hop after its shard.
                sums.post(step, label)
            shards.end_step(step, label)
        last = len(plan.steps) - 1
        _collect(sums, grads, last, Label("backward", last, plan.rank))
    return grads.result()


def _label(ring: str, step: Step) -> Label:
    """Name a step in profiles, once for all calls."""
    found: Label = step.kept.setdefault(ring, Label(ring, step.number, step.source))
    return found


def _lags(at: Tensor, step: Step) -> Lags:
    """Return the positions of the queries and of the keys of a step."""
    return Lags(at, resident_positions(step.runs, step.cols, at.device))


def _dropped(query: Tensor, plan: Plan, scores: Scores) -> ShardDropout | None:
    """Return the weights that this rank drops, `None` without a seed."""
    seed = scores.dropout_seed
    if seed is None:
        return None
    return ShardDropout(scores.dropout_p, seed, scores.first or (0, 0), query, plan.runs)


def ring_sinks(saved: Saved, sinks: Tensor | None, plan: Plan, transport: Transport) -> Tensor:
    """Return the gradient of the sinks `(N,)` from the local rows; empty without sinks.

    In a fixed order, the first rank of the ring returns that of all rows, and the others zeros.

    Args:
        saved: outputs of the local rows; `out` and `lse` include the sinks.
        sinks: the logits `(N,)`.
        plan: the plan of this rank.
        transport: moves the messages.
    """
    if sinks is None or plan.order is None:
        return sinks_gradient(saved, sinks)
    own, owners = sinks_by_block(saved, sinks, plan.order), plan.order.owners
    first, found = min(owners), {plan.rank: own}
    receives, sends = [], []
    if plan.rank == first:
        found |= {x: own.new_empty(len(owners[x]), len(sinks)) for x in owners if x != first}
        receives = [P2P(found[x].view(-1), x) for x in found if x != first and owners[x]]
    elif len(own):
        sends = [P2P(own.view(-1), first)]
    for work in transport.start(receives, sends):
        work.wait()
    if plan.rank != first:
        return torch.zeros_like(sinks)
    by_block = {
        n: row for x, blocks in owners.items() for n, row in zip(blocks, found[x], strict=True)
    }
    return tree_sum(torch.stack([by_block[n] for n in sorted(by_block)]), 0).to(sinks.dtype)


class _Arriving:
    """Gradients that are summed as launches return them and as sums arrive."""

    def __init__(self, query: Tensor, shard: Pair, plan: Plan, policy: TransferPolicy) -> None:
        self._query = query
        self._grad_query = GradientSum(query, policy.num_parts)
        self._grad_shard = GradientSum(shard[0]), GradientSum(shard[1])

    def compute(
        self,
        step: Step,
        saved: Saved,
        kv: Pair,
        kernel: Kernel,
        scores: Scores,
        label: Label,
        dropout: Dropout | None,
        lags: Lags | None,
    ) -> None:
        """Add the gradients of a step."""
        # Step 0 is this rank's own shard, whose gradients need not travel.
        grad_kv: tuple[Partials, Partials] = self._grad_shard
        # With more room, many overlapping launches would hold many times the memory of a shard.
        if step.number:
            grad_kv = self._shares = Partials(kv[0], room=1), Partials(kv[1], room=1)
        query, grad_query = self._query, self._grad_query
        backward_step(
            step, saved, query, kv, grad_query, grad_kv, kernel, scores, label, dropout, lags
        )

    def arrive(self, packet: Packet, number: int, is_last: bool) -> None:
        """Add the gradients that other ranks summed for this rank's own keys and values."""
        for grad, total in zip(self._grad_shard, packet.pair, strict=True):
            grad.add_arrived(total, packet.cols, is_last)

    def contribute(self, sums: SumRotation, step: Step, label: Label) -> None:
        """Add this rank's gradients of a source's keys and values to the sum that travels."""
        if not step.cols.spans:
            return
        with label("merge"):
            packet, is_new = sums.sum_of(step.source, step.cols)
            # One launch adds both, on devices that have a kernel for it.
            (key, value), (of_key, of_value) = packet.pair, self._shares
            accumulate_sums(of_key.into(key, is_new), of_value.into(value, is_new))

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value."""
        return self._grad_query.result(), self._grad_shard[0].result(), self._grad_shard[1].result()


class _Ordered:
    """Gradients that are summed in a fixed order, see Note [Fixed order]."""

    def __init__(self, query: Tensor, shard: Pair, plan: Plan, policy: TransferPolicy) -> None:
        assert plan.order is not None, "the caller has asked"
        self._order = plan.order
        self._grads = OrderedGradients(query, shard, plan.order)

    def compute(
        self,
        step: Step,
        saved: Saved,
        kv: Pair,
        kernel: Kernel,
        scores: Scores,
        label: Label,
        dropout: Dropout | None,
        lags: Lags | None,
    ) -> None:
        """Add the gradients of a step."""
        assert dropout is None and lags is None, "refused with a fixed order"
        self._grads.step(step, saved, kv, kernel, scores, label)

    def arrive(self, packet: Packet, number: int, is_last: bool) -> None:
        """Add the gradients that another rank computed for this rank's own keys and values."""
        self._grads.arrive(number, packet.pair)

    def contribute(self, sums: SumRotation, step: Step, label: Label) -> None:
        """Write the gradients of a source's keys and values into the message to it."""
        cols = self._order.departing[step.number].cols
        if not cols:
            return
        with label("merge"):
            packet, _ = sums.sum_of(step.source, cols)
            self._grads.depart(step, packet.pair)

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value."""
        return self._grads.result()


def _collect(sums: SumRotation, grads: _Arriving | _Ordered, number: int, label: Label) -> None:
    """Add the gradients of this rank's own keys and values that came after a step."""
    for packet in sums.wait(label):
        with label("merge"):
            grads.arrive(packet, number, sums.is_last)
        sums.leave(packet)
