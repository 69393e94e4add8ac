"""The ranks of a ring one after the other on one device: ours, PyTorch's, and one kernel on all."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import inf
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from baselines import Stages, templated
from torch import Tensor

from dtensor_ring import Contiguous
from dtensor_ring.compute.accumulate import RunningOutput
from dtensor_ring.compute.kernels import KERNELS, Launch, Problem, Saved, Scores
from dtensor_ring.compute.kernels.registry import preferred
from dtensor_ring.compute.memory import WHOLE
from dtensor_ring.compute.trace import Label
from dtensor_ring.ops.options import default_scale
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.mask import Mask, as_documents
from dtensor_ring.planning.plan import Plan, plan
from dtensor_ring.ring import ring_backward, ring_forward
from dtensor_ring.transport.rotation import Packet, goes_apart
from dtensor_ring.transport.transport import DEFAULT_POLICY, P2P, TransferPolicy
from gpu_steps.link import Link, cycles_per_second


@dataclass(frozen=True)
class Attention:
    """The attention to compute, and the kernel for it."""

    kernel: str
    world_size: int
    shard: int
    """Tokens of a rank."""
    layout: Layout
    mask: Mask
    cu_seqlens: tuple[int, ...] | None = None
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16

    @property
    def seq_len(self) -> int:
        return self.world_size * self.shard

    def problem(self) -> Problem:
        return Problem(
            *(self.device, self.dtype, self.head_dim, self.head_dim),
            windowed=self.mask.left is not None,
            grouped=self.heads[0] != self.heads[1],
            packed=self.cu_seqlens is not None,
        )

    def plan(self, rank: int) -> Plan:
        documents = as_documents(self.cu_seqlens)
        return plan(self.layout, self.mask, rank, self.world_size, self.seq_len, documents)

    @cached_property
    def pairs(self) -> int:
        """Visible pairs over all heads and ranks."""
        plans = [self.plan(rank) for rank in range(self.world_size)]
        steps = [step for of_rank in plans for step in of_rank.steps]
        return self.heads[0] * sum(tile.area for step in steps for tile in step.tiles)

    def whole(self) -> "Attention":
        """The same on one rank: one launch of the kernel."""
        return Attention(
            *(self.kernel, 1, self.seq_len, Contiguous(), self.mask, self.cu_seqlens),
            *(self.heads, self.head_dim, self.device, self.dtype),
        )

    def inputs(self) -> list[Tensor]:
        """Gradient of the output, query, key and value of every rank alike, token-major."""
        generator = torch.Generator(self.device).manual_seed(0)
        heads = self.heads[0], self.heads[0], self.heads[1], self.heads[1]
        shapes = [(1, self.shard, num, self.head_dim) for num in heads]
        return [
            torch.randn(shape, generator=generator, dtype=self.dtype, device=self.device).transpose(
                1, 2
            )
            for shape in shapes
        ]


def whole_inputs(attention: Attention, shards: list[Tensor]) -> list[Tensor]:
    """Those of the whole sequence, of which every rank holds the same shards."""
    wholes = [x.new_empty(1, attention.seq_len, x.shape[1], x.shape[3]) for x in shards]
    for rank in range(attention.world_size):
        positions = positions_of(attention, rank)
        for whole, shard in zip(wholes, shards, strict=True):
            whole[:, positions] = shard.transpose(1, 2)
    return [whole.transpose(1, 2) for whole in wholes]


def positions_of(attention: Attention, rank: int) -> Tensor:
    """Where the tokens of a rank are in the sequence."""
    dealt = attention.layout.positions(rank, attention.world_size, attention.seq_len)
    return torch.tensor(dealt, device=attention.device)


def link_of(
    attention: Attention, rank: int, shards: list[Tensor], rate: float | None = None
) -> Link:
    """Transfers that bring a rank the shards of the others, as our ring packs them."""
    if rate == inf:
        return Link([], shards[2], inf)  # nothing is copied
    mine, (key, value) = attention.plan(rank), shards[2:]
    sums = torch.zeros(key.numel() + value.numel(), device=attention.device)
    arriving: dict[Cols, Packet] = {}  # the ranks hold the same
    messages = []
    for transfer in (x for hop in mine.shards for x in hop.receives):
        cols = transfer.cols
        if cols not in arriving:
            buffer = torch.empty(key.nbytes + value.nbytes, dtype=torch.uint8, device=key.device)
            arriving[cols] = Packet.within(buffer, (key, value), cols, key.dtype)
            arriving[cols].fill((key, value), cols, Label("forward", 0, 0))
        is_first = transfer.source == transfer.peer
        messages += arriving[cols].messages(is_first and goes_apart(arriving[cols].num_bytes))
    return Link(messages, sums, rate)


def torch_link_of(attention: Attention, shards: list[Tensor]) -> Link:
    """The same as PyTorch's ring packs them."""
    message = torch.cat([x.contiguous().flatten() for x in shards[2:]])
    return Link([message], torch.zeros_like(message, dtype=torch.float32))


def rank_stages(
    attention: Attention,
    rank: int,
    shards: list[Tensor],
    rate: float | None = None,
    policy: TransferPolicy = DEFAULT_POLICY,
) -> Stages:
    """Our ring, on one rank."""
    link = link_of(attention, rank, shards, rate)
    grad_out, query, key, value = shards
    mine, kernel, scores = attention.plan(rank), KERNELS[attention.kernel], scores_of(attention)
    kept: list[Tensor] = []

    def forward() -> list[Tensor]:
        kept[:] = ring_forward(query, (key, value), mine, kernel, scores, link, policy)
        return kept[:1]

    def backward() -> tuple[Tensor, ...]:
        saved = Saved(grad_out, *kept)
        return ring_backward(saved, query, (key, value), mine, kernel, scores, link, policy)

    return forward, backward


def scores_of(attention: Attention) -> Scores:
    return Scores(attention.mask, default_scale(attention.head_dim))


class _Rotater:
    """PyTorch's ring sends by it, here over a link."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def exchange_buffers(self, buffer: Tensor) -> None:
        self._arriving = torch.empty_like(buffer.contiguous())
        self._works = self._link.start([P2P(self._arriving, 0)], [])

    def next_buffer(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._arriving


class _Group(SimpleNamespace):
    """Rank and size, which is all that PyTorch's ring asks of a group then."""


def torch_stages(attention: Attention, rank: int, shards: list[Tensor]) -> Stages:
    """PyTorch's ring around the same kernel, causal and zigzag, on one rank."""
    link = torch_link_of(attention, shards)
    group = _Group(rank=rank, size=attention.world_size)
    return torch_stages_over(attention, group, shards, lambda: _over(link))


def torch_stages_over(
    attention: Attention,
    group: Any,
    shards: list[Tensor],
    over: Callable[[], AbstractContextManager[object]],
) -> Stages:
    """PyTorch's ring, on a rank of that group; its messages go as `over()` makes them go."""
    grad_out, query, key, value = shards
    kernel = KERNELS[attention.kernel]
    scores = scores_of(attention)
    masks = {True: Mask.causal(), False: Mask.full()}
    launches = {is_causal: Launch(WHOLE, WHOLE, mask) for is_causal, mask in masks.items()}
    kept: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
        return kernel.forward(q, k, v, launches[is_causal], scores)

    def attend_backward(*, is_causal: bool, **x: Any) -> tuple[Tensor, ...]:
        saved = Saved(x["grad_out"], x["out"], x["logsumexp"])
        tensors = x["query"], x["key"], x["value"]
        return kernel.backward(saved, *tensors, launches[is_causal], scores)

    def forward() -> list[Tensor]:
        with over():
            kept[:] = templated._templated_ring_attention(
                *(group, 2, attend, query, key, value), is_causal=True
            )
        return kept[:1]

    def backward() -> tuple[Tensor, ...]:
        with over():
            return templated._templated_ring_attention_backward(
                *(group, 2, attend_backward, grad_out, "grad_out", query, key, value, *kept),
                is_causal=True,
            )

    return forward, backward


@contextmanager
def _over(link: Link) -> Iterator[None]:
    """PyTorch's ring between ranks that are not there."""
    ranks = SimpleNamespace(
        ProcessGroup=_Group,
        get_rank=lambda group: group.rank,
        get_world_size=lambda group: group.size,
    )
    with (
        patch.object(templated, "dist", ranks),
        patch.object(templated, "_create_rotater", lambda *_, **__: _Rotater(link)),
    ):
        yield


BUSY = 5e-3
"""Seconds that the GPU works on something else first, while the host queues the launches."""


def seconds_of(stages: Sequence[Callable[[], object]]) -> list[float]:
    """From the start to the end of each stage."""
    begin, *ends = (torch.cuda.Event(enable_timing=True) for _ in range(1 + len(stages)))
    # Else the host's time to the first launch counts, for many ranks more than for one launch.
    torch.cuda._sleep(int(BUSY * cycles_per_second()))
    begin.record()
    for stage, end in zip(stages, ends, strict=True):
        stage()
        end.record()
    torch.cuda.synchronize()
    return [1e-3 * begin.elapsed_time(end) for end in ends]


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    """The median, after one run to warm up."""
    return median([seconds_of([run])[0] for _ in range(1 + repeats)][1:])


def best_kernels(device: str) -> list[str]:
    """Kernels that run here, best first, but for the reference."""
    plain = Attention("", 1, 1, Contiguous(), Mask.causal(), device=device).problem()
    return [
        kernel.name
        for kernel in preferred(plain)
        if kernel.name != "reference" and (kernel.missing() or kernel.supports(plain)) is None
    ]


def merge_share(stages: Stages) -> float:
    """The part of the forward that merging takes."""
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*args: Any) -> Any:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            result = method(*args)
            end.record()
            marks.append((start, end))
            return result

        return marked

    # Parts are merged where there is no room for another, and at the end.
    merging = {name: timed(getattr(RunningOutput, name)) for name in ("make_room", "result")}
    with patch.multiple(RunningOutput, **merging):
        total = seconds_of(stages[:1])[0]
    return sum(1e-3 * start.elapsed_time(end) for start, end in marks) / total


def in_turns(contenders: dict[str, Callable[[], list[float]]], repeats: int) -> dict[str, Any]:
    """Seconds by name and stage, medians of that many turns after one to warm up."""
    times: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for _ in range(1 + repeats):
        for name, run in contenders.items():
            times[name].append(run())
    return {name: [median(x) for x in zip(*of[1:], strict=True)] for name, of in times.items()}
