"""A ring that is one launch, as that of one rank often is: nothing is merged or sent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtensor_ring.compute.execute import Pair, launches_of
from dtensor_ring.compute.kernels import Kernel, Launch, Saved, Scores
from dtensor_ring.compute.kernels.kernel import Gradients
from dtensor_ring.compute.memory import TOKEN_MAJOR, in_order, order_of, part_of, wide_of
from dtensor_ring.compute.trace import Label
from dtensor_ring.planning.plan import Plan, Step


class Sole:
    """The launch that is all of a ring, or of a decode call, in calls of one shape.

    Attributes:
        launch: the launch.
        wide: the dtype in which results are merged with those of other ranks.
        forward: names it in a profile, in a forward or a decode call.
        backward: names it there in a backward call.
    """

    def __init__(self, launch: Launch, source: int, forward: str, wide: torch.dtype) -> None:
        self.launch, self.wide = launch, wide
        self.forward, self.backward = Label(forward, 0, source), Label("backward", 0, source)
        # Strides of results that are in order, next to those of the queries for outputs.
        self._ordered: set[tuple[Any, ...]] = set()

    def run(
        self, query: Tensor, shard: Pair, kernel: Kernel, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Return `(out, lse)` in the memory order in which the kernel gives them."""
        with self.forward("tile"):
            return kernel.forward(query, shard[0], shard[1], self.launch, scores)

    def output(self, out: Tensor, query: Tensor) -> Tensor:
        """Return an output in the memory order of the queries."""
        # Layers of a model repeat the same strides: orders that fit are looked up, not compared
        # again.
        seen = out.stride(), query.stride()
        if seen in self._ordered:
            return out
        found = in_order(out, order_of(query), query.dtype)
        if found is out:
            self._ordered.add(seen)
        return found

    def gradients(self, grads: Gradients) -> Gradients:
        """Return token-major gradients of query, key and value."""
        query, key, value = grads
        seen = query.stride(), key.stride(), value.stride()
        if seen in self._ordered:
            return grads
        query, key, value = (in_order(x, TOKEN_MAJOR, x.dtype) for x in grads)
        if query is grads[0] and key is grads[1] and value is grads[2]:
            self._ordered.add(seen)
        return query, key, value


def sole_launch(plan: Plan, query: Tensor, key: Tensor, kernel: Kernel) -> Sole | None:
    """Return the launch that is all of a ring, `None` if there are more, or messages.

    Its results are those of the call, so no sum is wider than its dtype.

    Args:
        plan: the plan of this rank.
        query: local queries `(B, N, L, H)`.
        key: this rank's keys `(B, Nkv, L, H)`.
        kernel: the block kernel.
    """
    if plan.num_steps > 1 or plan.order is not None:
        return None
    return sole_of(plan.steps[0], query, key, kernel)


def sole_of(
    step: Step, query: Tensor, key: Tensor, kernel: Kernel, ring: str = "forward"
) -> Sole | None:
    """Return the launch that is all of a step without messages, `None` if there are more.

    Args:
        step: the step.
        query: local queries `(B, N, L, H)`.
        key: resident keys `(B, Nkv, C, H)`.
        kernel: the block kernel.
        ring: what the call is, for a profile; tiles of a `"decode"` call are not joined.
    """
    found = launches_of(step, query, key, kernel, joins_tiles=ring != "decode")
    if len(found) != 1 or found[0].segments is not None:
        return None
    (launch,) = found
    is_whole = part_of(query, launch.rows) is query and part_of(key, launch.cols) is key
    return Sole(launch, step.source, ring, wide_of(query.dtype)) if is_whole else None


def sole_forward(
    query: Tensor, shard: Pair, sole: Sole, kernel: Kernel, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)` of a ring that is one launch, see `sole_launch`."""
    out, lse = sole.run(query, shard, kernel, scores)
    return sole.output(out, query), lse.contiguous()


def sole_backward(
    saved: Saved, query: Tensor, shard: Pair, sole: Sole, kernel: Kernel, scores: Scores
) -> Gradients:
    """Return the gradients of query, key and value of a ring that is one launch."""
    with sole.backward("tile"):
        grads = kernel.backward(saved, query, shard[0], shard[1], sole.launch, scores)
    return sole.gradients(grads)
