"""Runs the loops of an attention on tensors without content, and notes what they do.

Note [One loop, counted]: nothing here knows what a hop, a packet or an all-to-all is. The loops of
`dtensor_ring/ring.py` and the all-to-alls run as they are, on the meta device, with a kernel that
computes nothing and a transport that sends nothing, and both note what they were asked for. So a
message that changes its size changes what is counted, and nothing else has to be edited.

Note [Phases]: loops tell a transport where they are, at the same places on all ranks. These places
cut what a rank does into phases. In a phase a rank runs kernels, may wait for the messages of an
earlier phase, and starts messages last, if it does. So the number of a phase names its messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dtensor_ring.all_to_all.plan import AllToAllPlan
from dtensor_ring.all_to_all.rounded_keys import exchanged
from dtensor_ring.compute.execute import Pair
from dtensor_ring.compute.kernels import Kernel, Launch, Problem, Saved, Scores
from dtensor_ring.compute.kernels.kernel import Gradients, Result
from dtensor_ring.compute.memory import TOKEN_MAJOR, empty, new_empty
from dtensor_ring.compute.trace import DryRun, Label, noting
from dtensor_ring.lab.machine import FORMS
from dtensor_ring.lab.problem import TensorSizes
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.plan import Plan
from dtensor_ring.planning.tile import FULL, Tile
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
    every = list(costs)
    return Cost(
        sent=of(x.sent for x in every),
        received=of(x.received for x in every),
        messages=of(x.messages for x in every),
        held=of(x.held for x in every),
    )


# What a rank does in a phase: the launch of a tile, a pass over memory, a wait for messages.
TILE, PACKET, PACK, UNPACK, MERGE, ADD, WAIT = 0, 1, 2, 3, 4, 5, 6
_PASSES = {"packet": PACKET, "pack": PACK, "unpack": UNPACK, "merge": MERGE, "add": ADD}


class Recording(NamedTuple):
    """What a rank does in one direction of an attention, see Note [Phases].

    Attributes:
        labels: where its loop is, phase by phase.
        does: what it does, in order, `(N, 5)`: phase, `TILE` to `WAIT`, and three numbers. A tile
            has its visible pairs of a query and a key over all heads, its form, counted in `FORMS`,
            and its query heads; a pass has its bytes; a wait has the phase that started the
            messages.
        sends: the messages that it sends, `(M, 3)`: phase, peer and bytes.
    """

    labels: list[Label]
    does: np.ndarray
    sends: np.ndarray


class Recorder(Transport):
    """Sends nothing, and notes messages, passes over memory, and the buffers in use.

    >>> transport = Recorder()
    >>> _ = transport.start([], [P2P(torch.empty(3), 1)])
    >>> transport.cost
    Cost(sent=12, received=0, messages=1, held=0)
    """

    def __init__(self) -> None:
        self._labels = list[Label]()
        self._does, self._sends = list[tuple[int, ...]](), list[tuple[int, ...]]()
        self._received = self._held = self._in_use = 0

    @property
    def cost(self) -> Cost:
        """What was counted; `held` is the most bytes of buffers at once."""
        sent = sum(size for _, _, size in self._sends)
        return Cost(sent, self._received, len(self._sends), self._held)

    def recording(self) -> Recording:
        """Return what was noted."""
        does = np.array(self._does, dtype=np.int64).reshape(-1, 5)
        sends = np.array(self._sends, dtype=np.int64).reshape(-1, 3)
        # Keys and values may become eight bits before the first step.
        return Recording(self._labels[:1] + self._labels, does, sends)

    def at(self, label: Label) -> None:
        self._labels.append(label)

    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        phase = len(self._labels)
        self._sends += [(phase, x.peer, x.flat.nbytes) for x in sends]
        self._received += sum(x.flat.nbytes for x in receives)
        return (_Arrival(self, phase),) if sends or receives else ()

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        self._in_use += num_bytes
        self._held = max(self._held, self._in_use)
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def free(self, buffer: Tensor) -> None:
        self._in_use -= buffer.numel()

    def launched(self, pairs: int, form: str, heads: int) -> None:
        """Note the launch of a tile."""
        self._does.append((len(self._labels), TILE, pairs, FORMS.index(form), heads))

    def passed(self, what: str, num_bytes: int) -> None:
        """Note a pass over memory; but for packets, those of one kind in a row are one launch."""
        if not num_bytes:
            return
        phase, kind = len(self._labels), _PASSES[what]
        if kind != PACKET and self._does and self._does[-1][:2] == (phase, kind):
            num_bytes += self._does.pop()[2]
        self._does.append((phase, kind, num_bytes, 0, 0))

    def waited(self, started: int) -> None:
        """Note a wait for the messages of a phase."""
        self._does.append((len(self._labels), WAIT, started, 0, 0))


class _Arrival(NamedTuple):
    """The messages of a phase."""

    recorder: Recorder
    phase: int

    def wait(self) -> None:
        self.recorder.waited(self.phase)


class ShapeKernel(Kernel):
    """A kernel that computes nothing: it returns empty tensors of the right shapes."""

    name = "shapes"

    def missing(self) -> None:
        return None

    def supports(self, problem: Problem) -> None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores) -> Result:
        wide = torch.promote_types(q.dtype, torch.float32)
        if launch.segments is not None:  # of tokens side by side, `(T, N, H)`
            rows, heads, _ = q.shape
            out, lse = (rows, heads, v.shape[2]), (heads, rows)
            return new_empty(q, out), new_empty(q, lse, wide)
        shape, lse = (*q.shape[:3], v.shape[3]), q.shape[:3]
        return empty(q, shape, TOKEN_MAJOR), new_empty(q, lse, wide)

    def backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores
    ) -> Gradients:
        if launch.segments is not None:
            return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        grads = [empty(x, x.shape, TOKEN_MAJOR) for x in (q, k, v)]
        return grads[0], grads[1], grads[2]


class NotedKernel(ShapeKernel):
    """A kernel that computes nothing, and notes its launches.

    Launches of one shape get the same tensors: they have no content, and making them would take a
    tenth of the time of a loop.

    Args:
        recorder: notes them.
        has_segments: whether it takes segments.
    """

    def __init__(self, recorder: Recorder, has_segments: bool) -> None:
        self._recorder, self.has_segments = recorder, has_segments  # type: ignore[misc]
        self._made = dict[tuple[torch.Size, torch.Size], Any]()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores) -> Result:
        self._note(q, k, launch)
        shapes = q.shape, k.shape
        if shapes not in self._made:
            self._made[shapes] = super().forward(q, k, v, launch, scores)
        return self._made[shapes]

    def backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores
    ) -> Gradients:
        self._note(q, k, launch)
        shapes = q.shape, k.shape
        if shapes not in self._made:
            self._made[shapes] = super().backward(saved, q, k, v, launch, scores)
        return self._made[shapes]

    def _note(self, q: Tensor, k: Tensor, launch: Launch) -> None:
        heads, segments = q.shape[1], launch.segments
        if segments is None:
            pairs = q.shape[0] * _area(launch.mask, q.shape[2], k.shape[2])
        else:
            bounds = zip(pairwise(segments.rows), pairwise(segments.cols), strict=True)
            pairs = sum(Tile(rows, cols, launch.mask).area for rows, cols in bounds)
        self._recorder.launched(pairs * heads, form_of(launch.mask), heads)


@lru_cache(maxsize=1024)
def _area(mask: Mask, num_rows: int, num_cols: int) -> int:
    """Return the visible pairs of a query and a key in a tile."""
    return Tile((0, num_rows), (0, num_cols), mask).area


def form_of(mask: Mask) -> str:
    """Return the form of a tile with this mask, one of `FORMS`.

    >>> [form_of(x) for x in (Mask.full(), Mask.causal(), Mask.sliding(4))]
    ['full', 'causal', 'window']
    """
    num_bounds = (mask.left is not None) + (mask.right is not None)
    return ("full", "causal", "window")[num_bounds]


# What labels of all-to-alls call the ring.
EXCHANGE = "exchange"


class RankAttention(NamedTuple):
    """An attention as one rank runs it: an all-to-all, a ring, and an all-to-all back.

    Attributes:
        plan: the plan of the rank.
        all_to_all: that of the all-to-alls; `None` without them.
        sizes: of the tensors of all ranks' heads.
        num_parts: partial results that a rank keeps, see `TransferPolicy`.
    """

    plan: Plan
    all_to_all: AllToAllPlan | None
    sizes: TensorSizes
    num_parts: int | None = None

    def costs(self) -> tuple[Cost, Cost]:
        """Return what its forward and its backward send and hold."""
        # A rank's own message in eight bits is a buffer on a CPU, and memory like it on a GPU.
        idle = self._replace(plan=unlaunched(self.plan))
        run = idle.directions(lambda _: ShapeKernel(), on_gpu=False)
        forward, backward = (replace(x.cost, held=x.cost.held + held) for x, held in run)
        return forward, backward

    def recordings(self, has_segments: bool, on_gpu: bool) -> Iterator[Recording]:
        """Yield what it does forward, and then backward, which runs when it is asked for.

        Args:
            has_segments: whether its kernel takes segments.
            on_gpu: whether it runs on a GPU.
        """
        run = self.directions(lambda x: NotedKernel(x, has_segments), on_gpu)
        return (recorder.recording() for recorder, _ in run)

    def directions(
        self, kernel_of: Callable[[Recorder], Kernel], on_gpu: bool
    ) -> Iterator[tuple[Recorder, int]]:
        """Run each direction when it is asked for.

        Args:
            kernel_of: makes the kernel of a direction.
            on_gpu: whether it runs on a GPU.

        Yields:
            What noted the direction, and bytes held beside message buffers.
        """
        (num_heads, num_key_heads), (dim, value_dim) = self.sizes.heads, self.sizes.head_dims
        heads, dims = (num_heads, num_key_heads, num_key_heads), (dim, dim, value_dim)
        inputs = list(map(self._empty, heads, dims))
        first, second, scores = Recorder(), Recorder(), Scores(FULL, 1.0)
        with noting(DryRun(first.passed, on_gpu)):
            query, key, value, *rounded = self._exchanged(inputs, heads, first, rounds=True)
            policy, bytes_of = self._policy(bool(rounded)), (rounded or [None])[0]
            out, lse = ring_forward(
                query, (key, value), self.plan, kernel_of(first), scores, first, policy, bytes_of
            )
            (result,) = self._exchanged([out], heads[:1], first, is_back=True)
        # Without an all-to-all, these are the user's own tensors.
        kept = sum(x.nbytes for x in (query, key, value, out)) if self.all_to_all else 0
        others = sum(x.nbytes for x in rounded)
        yield first, kept + others

        with noting(DryRun(second.passed, on_gpu)):
            grad = no_content(result.shape, result.dtype)
            (grad,) = self._exchanged([grad], heads[:1], second)
            saved, kernel = Saved(grad, out, lse), kernel_of(second)
            grads = ring_backward(
                saved, query, (key, value), self.plan, kernel, scores, second, policy, bytes_of
            )
            self._exchanged(list(grads), heads, second, is_back=True)
        # Backward also holds the gradients of query, key, value and output.
        yield second, 2 * kept + others

    @property
    def moved(self) -> tuple[int, int, int, int]:
        """What its ring sends and receives: columns forward and backward, times their bytes."""
        sizes, plan = self.sizes, self.plan
        loops = (plan.shards, sizes.kv_dtype.itemsize), (plan.sums, sizes.sum_dtype.itemsize)
        (out, coming), (sums, home) = (
            [
                size * sum(len(x.cols) for hop in hops for x in side(hop))
                for side in (attrgetter("sends"), attrgetter("receives"))
            ]
            for hops, size in loops
        )
        return out, coming, out + sums, coming + home

    @property
    def num_tokens(self) -> int:
        """Tokens of the rank before an all-to-all."""
        exchange = self.all_to_all
        return self.plan.num_local[0] if exchange is None else exchange.num_tokens[0]

    def _empty(self, heads: int, head_dim: int) -> Tensor:
        sizes = self.sizes
        return no_content((sizes.batch, heads, self.num_tokens, head_dim), sizes.dtype)

    def _policy(self, is_rounded: bool) -> TransferPolicy:
        """Return the policy of the ring, in which what arrived rounded travels as it came."""
        policy = TransferPolicy(self.sizes.kv_dtype, self.sizes.sum_dtype, self.num_parts)
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
            label=Label(EXCHANGE, 0, self.plan.rank),
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
    moved = np.array([x.moved for x in ranks])
    order = np.argsort(-moved, axis=0, kind="stable")
    most = np.unique(order[: MAX_RECORDED // moved.shape[1]])
    return [ranks[x].costs() for x in most.tolist()]


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
    batch, heads, _, head_dim = key.shape
    query = key.new_empty(batch, heads, plan.num_local[0], head_dim)
    ring_forward(query, shard, unlaunched(plan), ShapeKernel(), Scores(FULL, 1.0), transport)
    return transport.cost
