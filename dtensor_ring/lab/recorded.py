"""Runs the loops of an attention on tensors without content, and counts what they send and hold.

Note [One loop, counted]: nothing here knows what a hop, a packet or an all-to-all is. The loops of
`dtensor_ring/ring.py` and the all-to-alls run as they are, on the meta device, with a kernel that
computes nothing and a transport that sends nothing and adds up. So a message that changes its size
changes what is counted, and nothing else has to be edited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dtensor_ring.all_to_all.plan import AllToAllPlan
from dtensor_ring.all_to_all.rounded_keys import exchanged
from dtensor_ring.compute.execute import Pair
from dtensor_ring.compute.kernels import Kernel, Launch, Problem, Saved, Scores
from dtensor_ring.compute.kernels.kernel import Gradients, Result
from dtensor_ring.compute.memory import TOKEN_MAJOR, empty
from dtensor_ring.compute.trace import Label
from dtensor_ring.lab.problem import TensorSizes
from dtensor_ring.planning.plan import Plan
from dtensor_ring.planning.tile import FULL
from dtensor_ring.ring import ring_backward, ring_forward
from dtensor_ring.transport.transport import (
    P2P,
    TransferPolicy,
    Transport,
    Work,
    eight_bits_of,
    for_rounded,
)


@dataclass(frozen=True)
class Cost:
    """What a rank sends and holds in one direction of an attention; sizes are in bytes.

    Attributes:
        sent: bytes that the rank sends.
        received: bytes that the rank receives.
        messages: number of messages that the rank sends.
        held: the most bytes at once in message buffers and tensors of an all-to-all. Large keys and
            values that are contiguous in a shard are sent from there, without a buffer.
    """

    sent: int = 0
    received: int = 0
    messages: int = 0
    held: int = 0

    def __add__(self, other: Cost) -> Cost:
        return by_field(sum, [self, other])


def by_field(of: Callable[[Iterable[int]], int], costs: Iterable[Cost]) -> Cost:
    """Return the sum or the maximum of each field, as `of` computes it."""
    return Cost(*map(of, zip(*map(astuple, costs), strict=True)))


class Recorder(Transport):
    """Sends nothing, and adds up the messages and the buffers in use.

    Attributes:
        cost: what it has counted; `held` is the most bytes of buffers at once.

    >>> transport = Recorder()
    >>> _ = transport.start([], [P2P(torch.empty(3), 1)])
    >>> transport.cost
    Cost(sent=12, received=0, messages=1, held=0)
    """

    def __init__(self) -> None:
        self.cost, self._in_use = Cost(), 0

    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        sent, received = (sum(x.flat.nbytes for x in side) for side in (sends, receives))
        self.cost += Cost(sent, received, len(sends))
        return ()

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        self._in_use += num_bytes
        self.cost = replace(self.cost, held=max(self.cost.held, self._in_use))
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def free(self, buffer: Tensor) -> None:
        self._in_use -= buffer.numel()


class ShapeKernel(Kernel):
    """A kernel that computes nothing: it returns empty tensors of the right shapes."""

    name = "shapes"

    def missing(self) -> None:
        return None

    def supports(self, problem: Problem) -> None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores) -> Result:
        wide = torch.promote_types(q.dtype, torch.float32)
        shape = *q.shape[:3], v.shape[3]
        return empty(q, shape, TOKEN_MAJOR), q.new_empty(q.shape[:3], dtype=wide)

    def backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores
    ) -> Gradients:
        grads = [empty(x, x.shape, TOKEN_MAJOR) for x in (q, k, v)]
        return grads[0], grads[1], grads[2]


class RankAttention(NamedTuple):
    """An attention as one rank runs it: an all-to-all, a ring, and an all-to-all back.

    Attributes:
        plan: the plan of the rank.
        all_to_all: that of the all-to-alls; `None` without them.
        sizes: of the tensors of all ranks' heads.
    """

    plan: Plan
    all_to_all: AllToAllPlan | None
    sizes: TensorSizes

    def costs(self) -> tuple[Cost, Cost]:
        """Return what its forward and its backward send and hold."""
        heads, dims = (self.sizes.heads[0], *[self.sizes.heads[1]] * 2), self.sizes.head_dims
        inputs = [self._empty(*of) for of in zip(heads, (dims[0], *dims), strict=True)]
        first, second = Recorder(), Recorder()
        query, key, value, *rounded = self._exchanged(inputs, heads, first, rounds=True)
        how = unlaunched(self.plan), ShapeKernel(), Scores(FULL, 1.0)
        policy, bytes_of = self._policy(bool(rounded)), (rounded or [None])[0]
        out, lse = ring_forward(query, (key, value), *how, first, policy, bytes_of)
        (result,) = self._exchanged([out], heads[:1], first, is_back=True)

        (grad,) = self._exchanged([torch.empty_like(result)], heads[:1], second)
        saved, pair = Saved(grad, out, lse), (key, value)
        grads = ring_backward(saved, query, pair, *how, second, policy, bytes_of)
        self._exchanged(list(grads), heads, second, is_back=True)
        # Without an all-to-all, these are the user's own tensors.
        kept = sum(x.nbytes for x in (query, *pair, out)) if self.all_to_all else 0
        others = sum(x.nbytes for x in rounded)
        # Backward also holds the gradients of query, key, value and output.
        return _holding(first.cost, kept + others), _holding(second.cost, 2 * kept + others)

    @property
    def moved(self) -> tuple[int, int, int, int]:
        """What its ring sends and receives: columns forward and backward, times their bytes."""
        sizes, plan = self.sizes, self.plan
        loops = (plan.shards, sizes.kv_itemsize), (plan.sums, sizes.sum_itemsize)
        (out, coming), (sums, home) = (
            [
                size * sum(len(x.cols) for hop in hops for x in side(hop))
                for side in (attrgetter("sends"), attrgetter("receives"))
            ]
            for hops, size in loops
        )
        return out, coming, out + sums, coming + home

    def _empty(self, heads: int, head_dim: int) -> Tensor:
        sizes, exchange = self.sizes, self.all_to_all
        tokens = self.plan.num_local[0] if exchange is None else exchange.num_tokens[0]
        return no_content((sizes.batch, heads, tokens, head_dim), sizes.dtype)

    def _policy(self, is_rounded: bool) -> TransferPolicy:
        """Return the policy of the ring, in which what arrived rounded travels as it came."""
        policy = TransferPolicy(self.sizes.kv_dtype, self.sizes.sum_dtype)
        return for_rounded(policy) if self.all_to_all and not is_rounded else policy

    def _exchanged(
        self,
        tensors: list[Tensor],
        num_heads: tuple[int, ...],
        transport: Transport,
        *,
        is_back: bool = False,
        rounds: bool = False,
    ) -> list[Tensor]:
        """Return the tensors after an all-to-all, if the attention has one."""
        if self.all_to_all is None:
            return tensors
        dtype = eight_bits_of(self._policy(is_rounded=True)) if rounds else None
        return exchanged(
            tensors,
            self.all_to_all,
            self.plan.owners,
            heads=(num_heads, self.sizes.heads[1]),
            is_back=is_back,
            kv_dtype=dtype,
            transport=transport,
            label=Label("exchange", 0, self.plan.rank),
        )


# The loops of at most this many ranks run: on a larger axis, of those that move most tokens.
MAX_RECORDED = 32


def recorded_costs(ranks: Sequence[RankAttention]) -> list[tuple[Cost, Cost]]:
    """Return the forward and backward costs of ranks, see `MAX_RECORDED`.

    Args:
        ranks: the attention of each rank of an axis.
    """
    if len(ranks) <= MAX_RECORDED:
        return [x.costs() for x in ranks]
    by_side = zip(*(x.moved for x in ranks), strict=True)
    orders = [np.argsort(np.negative(moved), kind="stable") for moved in by_side]
    most = {int(x) for order in orders for x in order[: MAX_RECORDED // len(orders)]}
    return [ranks[x].costs() for x in sorted(most)]


def _holding(cost: Cost, num_bytes: int) -> Cost:
    return replace(cost, held=cost.held + num_bytes)


def unlaunched(plan: Plan) -> Plan:
    """Return a plan with the messages of another, and nothing to compute."""
    return replace(plan, steps=tuple(replace(step, tiles=()) for step in plan.steps))


def no_content(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a token-major tensor `(B, N, L, H)` on the meta device."""
    batch, heads, tokens, head_dim = shape
    by_token = torch.empty(batch, tokens, heads, head_dim, dtype=dtype, device="meta")
    return by_token.transpose(1, 2)


def shard_cost(plan: Plan, shard: Pair) -> Cost:
    """Return what the keys and values of a loop send and hold, as they travel by themselves."""
    transport, (key, _) = Recorder(), shard
    query = key.new_empty(*key.shape[:2], plan.num_local[0], key.shape[3])
    ring_forward(query, shard, unlaunched(plan), ShapeKernel(), Scores(FULL, 1.0), transport)
    return transport.cost
