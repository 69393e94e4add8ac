"""A ring that is one launch, as that of one rank often is: nothing is merged or sent."""

from __future__ import annotations

from torch import Tensor

from dtensor_ring.compute.execute import Pair, launches_of
from dtensor_ring.compute.kernels import Kernel, Launch, Saved, Scores
from dtensor_ring.compute.memory import TOKEN_MAJOR, in_order, order_of, part_of
from dtensor_ring.compute.trace import Label
from dtensor_ring.planning.plan import Plan


def sole_launch(plan: Plan, query: Tensor, key: Tensor, kernel: Kernel) -> Launch | None:
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
    found = launches_of(plan.steps[0], query, key, kernel)
    if len(found) != 1 or found[0].segments is not None:
        return None
    (launch,) = found
    is_whole = part_of(query, launch.rows) is query and part_of(key, launch.cols) is key
    return launch if is_whole else None


def sole_forward(
    query: Tensor, shard: Pair, launch: Launch, kernel: Kernel, scores: Scores, source: int
) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)` of a ring that is one launch, see `sole_launch`."""
    with Label("forward", 0, source)("tile"):
        out, lse = kernel.forward(query, *shard, launch, scores)
    return in_order(out, order_of(query), query.dtype), lse.contiguous()


def sole_backward(
    saved: Saved,
    query: Tensor,
    shard: Pair,
    launch: Launch,
    kernel: Kernel,
    scores: Scores,
    source: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value of a ring that is one launch."""
    with Label("backward", 0, source)("tile"):
        grads = kernel.backward(saved, query, *shard, launch, scores)
    query, key, value = (in_order(x, TOKEN_MAJOR, x.dtype) for x in grads)
    return query, key, value
