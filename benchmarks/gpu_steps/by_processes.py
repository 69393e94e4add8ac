"""Rings whose ranks are processes on one GPU: the public calls, compared with dense attention."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dtensor_ring import Mask, RingError, SequenceAxis, ZigZag, decode_attention, ring_attention
from gpu_steps.machine import Finding, Machine
from gpu_steps.processes import ByHost
from tests.dense import dense_attention, visible

HEADS, KV_HEADS, HEAD_DIM = 16, 8, 64
LARGEST = 2e-2
"""Error of 16 bits, next to the largest entry."""
MAX_SECONDS = 150
RANKS, TOKENS = 4, 1024


def by_processes(machine: Machine) -> Iterator[Finding]:
    num, tokens = (2, 64) if machine.is_dry else (RANKS, TOKENS)
    how = Setting(machine.device, machine.compiler, tokens)
    seconds = min(MAX_SECONDS, machine.left - 5)
    torch.cuda.empty_cache()  # the processes want memory, too
    for rows in zip(*machine.run_ranks(num, of_rank, *how, seconds=seconds), strict=True):
        what = f"{num} processes, {rows[0][0]}"
        if failed := next((found for _, found in rows if isinstance(found, str)), None):
            yield Finding(what, failed, is_wrong=True)
        else:
            error = max(found for _, found in rows)
            yield Finding(what, off_by(error), is_wrong=not error <= LARGEST)


def off_by(error: float) -> str:
    return f"off by {error:.0e}" if error else "every rank was told"


class Setting(NamedTuple):
    """What all ranks attend to, and where; it travels to their processes."""

    device: str
    compiler: str
    tokens: int

    def wholes(self) -> list[Tensor]:
        """Gradient of the output, query, key and value, the same on each rank."""
        generator = torch.Generator().manual_seed(0)
        heads = HEADS, HEADS, KV_HEADS, KV_HEADS
        shapes = [(1, self.tokens, num, HEAD_DIM) for num in heads]
        made = [torch.randn(shape, generator=generator) for shape in shapes]
        return [x.to(self.device, torch.bfloat16).transpose(1, 2) for x in made]

    def local(self, x: Tensor) -> Tensor:
        """The tokens of this rank."""
        place = dist.get_rank(), dist.get_world_size()
        return x[:, :, ZigZag().positions(*place, self.tokens)]

    def dense(self, cuts: Tensor | None) -> list[Tensor]:
        """Output and gradients of query, key and value in float64."""
        grad_out, *inputs = self.wholes()
        seen = visible(Mask.causal(), (self.tokens, self.tokens), 1, cuts)[:, 0].to(self.device)
        found = dense_attention(*inputs, Mask.causal(), seen=seen)
        return [found.out.detach(), *found.backward(grad_out)]


Way = Callable[[], float]
"""Makes a call on this rank, and returns its error."""


def of_rank(device: str, compiler: str, tokens: int) -> list[tuple[str, float | str]]:
    """What was called, and its error or what it raised."""
    how = Setting(device, compiler, tokens)
    mesh = DeviceMesh.from_group(dist.group.WORLD, device, mesh_dim_names=("cp",))
    SequenceAxis(mesh, ZigZag(), transport=ByHost(mesh.get_group()))
    rows: list[tuple[str, float | str]] = []
    for name, way in (ways(how, mesh) | differences(how, mesh)).items():
        try:
            rows.append((name, way()))
        except Exception as error:  # the other ways are still worth a row
            rows.append((name, f"{type(error).__name__}: {error}"[:300]))
    return rows


def ways(how: Setting, mesh: DeviceMesh) -> dict[str, Way]:
    """By name."""
    plain = partial(ring_attention, mesh=mesh)
    compiled = torch.compile(plain, backend=how.compiler, fullgraph=True)
    third = how.tokens // 3
    cuts = torch.tensor([0, 1, third, how.tokens - third, how.tokens], dtype=torch.int32)
    return {
        "plain tensors": partial(_trained, how, plain),
        "documents": partial(_trained, how, plain, cuts),
        "all-gather": partial(_trained, how, partial(plain, strategy="all_gather")),
        "Ulysses": partial(_trained, how, partial(plain, strategy="ulysses")),
        "scaled_dot_product_attention": partial(_trained, how, partial(_sdpa, mesh)),
        "a decoded token": partial(_decoded, how, mesh),
        "compiled": partial(_trained, how, compiled),
        "compiled, documents": partial(_trained, how, compiled, cuts),
    }


def differences(how: Setting, mesh: DeviceMesh) -> dict[str, Way]:
    """Calls that differ by rank, by name; they leave the axis closed."""
    plain = partial(ring_attention, mesh=mesh)
    return {"another mask on one rank": partial(_differing, how, plain)}


def _trained(how: Setting, attend: Callable[..., Any], cuts: Tensor | None = None) -> float:
    """The largest error of output and gradients."""
    grad_out, *inputs = map(how.local, how.wholes())
    shards = [x.detach().requires_grad_() for x in inputs]
    out = attend(*shards, **({} if cuts is None else {"cu_seqlens": cuts}))
    found = [out.detach(), *torch.autograd.grad(out, shards, grad_out)]
    pairs = zip(found, how.dense(cuts), strict=True)
    return max(error_of(x, how.local(whole)) for x, whole in pairs)


def error_of(x: Tensor, expected: Tensor) -> float:
    """The largest, next to the largest entry; NaN if there is one."""
    return float((x - expected).abs().max() / expected.abs().max())


def _sdpa(mesh: DeviceMesh, *shards: Tensor) -> Tensor:
    sharded = [DTensor.from_local(x, mesh, [Shard(2)]) for x in shards]
    out = F.scaled_dot_product_attention(*sharded, is_causal=True, enable_gqa=True)
    return out.to_local()  # type: ignore[attr-defined]


def _decoded(how: Setting, mesh: DeviceMesh) -> float:
    """The last token sees all that the ranks hold."""
    _, query, key, value = how.wholes()
    with torch.no_grad():
        out = decode_attention(query[:, :, -1:], how.local(key), how.local(value), mesh=mesh)
    return error_of(out, how.dense(None)[0][:, :, -1:])


def _differing(how: Setting, attend: Callable[..., Any]) -> float:
    """Each rank is told, on its own GPU's memory: no error if so."""
    _, *shards = map(how.local, how.wholes())
    mask = Mask.causal() if dist.get_rank() else Mask.sliding(3)
    try:
        attend(*shards, mask=mask)
    except RingError:
        return 0.0
    raise AssertionError("this rank was not told")
