"""The public call over one rank: eager, under autocast, compiled, and in CUDA graphs."""

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring import Mask, SequenceAxis, ring_attention
from gpu_steps.graphs import captured, no_waiting
from gpu_steps.machine import Finding, Machine, compared

HEADS, KV_HEADS, TOKENS, HEAD_DIM = 8, 2, 256, 64
LARGEST = 2e-2
"""Error of 16 bits, next to the largest entry."""
NUM_OTHERS = 600
"""Batches of documents between a capture and its replay: more than caches of launches held."""


class Call:
    """An attention and its gradients, whose inputs and results stay where they are."""

    def __init__(self, machine: Machine, mesh: DeviceMesh, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        heads = HEADS, KV_HEADS, KV_HEADS, HEADS
        *inputs, self._grad_out = (
            torch.randn((1, TOKENS, num, HEAD_DIM), generator=generator)
            .to(machine.device, dtype)
            .transpose(1, 2)
            for num in heads
        )
        self._inputs = [x.requires_grad_() for x in inputs]
        self.attend: Callable[..., Any] = partial(ring_attention, mask=Mask.causal(), mesh=mesh)
        self.results: list[Tensor] = []

    def __call__(self, cu_seqlens: Tensor | None) -> None:
        out = self.attend(*self._inputs, cu_seqlens=cu_seqlens)
        grads = torch.autograd.grad(out, self._inputs, self._grad_out.to(out.dtype))
        self.results = [out.detach(), *grads]

    def error(self, cu_seqlens: Tensor | None) -> float:
        """The largest next to the largest entry, against float32."""
        inputs = [x.detach().float().requires_grad_() for x in self._inputs]
        seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        if cu_seqlens is not None:
            lengths = cu_seqlens.diff()
            document = torch.arange(len(lengths)).repeat_interleave(lengths)
            seen &= document.unsqueeze(1) == document
        seen = seen.to(inputs[0].device)
        query, key, value = inputs
        keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen)
        expected = out, *torch.autograd.grad(out, inputs, self._grad_out.float())
        pairs = zip(self.results, expected, strict=True)
        return max(float((x - y).detach().abs().max() / y.detach().abs().max()) for x, y in pairs)


def documents(seed: int) -> Tensor:
    """Boundaries, which are on the CPU."""
    cuts = sorted(Random(seed).sample(range(1, TOKENS), 7))
    return torch.tensor([0, *cuts, TOKENS], dtype=torch.int32)


def public(machine: Machine) -> Iterator[Finding]:
    with machine.connected() as mesh:
        SequenceAxis(mesh, "zigzag")
        ways = {
            "eager": _eager,
            "autocast": _autocast,
            "compiled": _compiled,
            "without waiting": _without_waiting,
            "CUDA graph, replayed after other documents": _replayed,
        }
        for name, way in ways.items():
            for what, cuts in (("causal", None), ("documents", documents(0))):
                error_of = partial(way, machine, mesh, cuts)
                yield compared(f"public call, {name}, {what}", error_of, LARGEST)


def _eager(machine: Machine, mesh: DeviceMesh, cuts: Tensor | None) -> float:
    call = Call(machine, mesh, machine.dtype)
    call(cuts)
    return call.error(cuts)


def _autocast(machine: Machine, mesh: DeviceMesh, cuts: Tensor | None) -> float:
    call = Call(machine, mesh, torch.float32)
    with torch.autocast(machine.device, machine.dtype):
        call(cuts)
    assert call.results[0].dtype == machine.dtype, "autocast had no effect"
    return call.error(cuts)


def _compiled(machine: Machine, mesh: DeviceMesh, cuts: Tensor | None) -> float:
    call = Call(machine, mesh, machine.dtype)
    call.attend = torch.compile(call.attend, backend=machine.compiler, fullgraph=True)
    call(cuts)
    return call.error(cuts)


def _without_waiting(machine: Machine, mesh: DeviceMesh, cuts: Tensor | None) -> float:
    call = Call(machine, mesh, machine.dtype)
    call(cuts)  # compiles, and copies boundaries
    torch.cuda.synchronize()
    with no_waiting():
        call(cuts)
    return call.error(cuts)


def _replayed(machine: Machine, mesh: DeviceMesh, cuts: Tensor | None) -> float:
    call, other = (Call(machine, mesh, machine.dtype) for _ in range(2))
    graph, _ = captured(partial(call, cuts))
    for seed in range(1, 1 + (NUM_OTHERS if not machine.is_dry else 2)):
        other(documents(seed))
    for x in call.results:
        x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return call.error(cuts)
