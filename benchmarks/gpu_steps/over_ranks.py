"""A GPU for each rank: what is right over NCCL, how fast it is, and what of it is hidden."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from baselines import Stages, templated
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring import Mask, SequenceAxis, ZigZag, ring_attention
from gpu_steps.alone import (
    Attention,
    best_kernels,
    in_turns,
    rank_stages,
    seconds_of,
    torch_stages_over,
    whole_inputs,
)
from gpu_steps.by_processes import LARGEST, Setting, Way, differences, off_by, ways
from gpu_steps.machine import Finding, Machine, left_out
from gpu_steps.messages import EXPOSED
from gpu_steps.tables import AIMS
from gpu_steps.traces import KernelSpan, exposed, joined
from tests.played_group import without_records

TOKENS = 8192
SHARDS = {2048: 5, 4096: 5, 8192: 5, 16384: 3, 32768: 2, 65536: 1}
"""Tokens of a rank, and how often they are timed."""
HOST_COST = 15e-6
"""Seconds that agreement may cost the host in each call: an aim."""
NUM_CALLS = 50


def right(machine: Machine) -> Iterator[Finding]:
    """The public calls on this rank, next to dense attention."""
    return _by_way(machine, ways)


def differing(machine: Machine) -> Iterator[Finding]:
    """Whether all ranks are told of a call that differs; it hangs if they are not."""
    return _by_way(machine, differences)


def _by_way(
    machine: Machine, ways_of: Callable[[Setting, DeviceMesh], dict[str, Way]]
) -> Iterator[Finding]:
    how = Setting(machine.device, machine.compiler, 64 * machine.world_size)
    mesh = new_mesh(machine, machine.backend)
    SequenceAxis(mesh, ZigZag())
    for name, way in ways_of(how, mesh).items():
        try:
            error, reason = way(), ""
        except Exception as problem:  # the other ways are still worth a row
            error, reason = float("inf"), f"{type(problem).__name__}: {problem}"[:300]
        reasons: list[str] = [""] * machine.world_size
        dist.all_gather_object(reasons, reason)
        worst = machine.largest([error])[0]
        said = next(filter(None, reasons), off_by(worst))
        yield Finding(f"{machine.world_size} ranks, {name}", said, "", not worst <= LARGEST)


def new_mesh(machine: Machine, backend: str) -> DeviceMesh:
    """Of all ranks, with connections of its own."""
    group = dist.new_group(backend=backend)
    assert group is not None
    return DeviceMesh.from_group(group, machine.device, mesh_dim_names=("cp",))


def attention_of(machine: Machine, kernel: str, shard: int) -> Attention:
    size = {"heads": (4, 2), "head_dim": 64} if machine.is_dry else {}
    where = kernel, machine.world_size, shard, ZigZag(), Mask.causal()
    return Attention(*where, device=machine.device, **size)  # type: ignore[arg-type]


def public_stages(
    attention: Attention, mesh: DeviceMesh, shards: list[Tensor], strategy: str
) -> Stages:
    """The public call and its backward, as a training step has them."""
    grad_out, *inputs = shards
    inputs = [x.detach().requires_grad_() for x in inputs]
    kept: list[Tensor] = []

    def forward() -> list[Tensor]:
        how = {"kernel": attention.kernel, "strategy": strategy, "mesh": mesh}
        with torch.enable_grad():
            kept[:] = [ring_attention(*inputs, mask=attention.mask, **how)]  # type: ignore[call-overload]
        return kept

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(kept[0], inputs, grad_out)

    return forward, backward


def contenders(machine: Machine, mesh: DeviceMesh, attention: Attention) -> dict[str, Stages]:
    """Ours by strategy, PyTorch's rings, and one launch on the whole sequence, by name."""
    shards = attention.inputs()
    single = rank_stages(attention.whole(), 0, whole_inputs(attention, shards))
    found = {"one launch": single}
    strategies = {"ours": "around", "ours, all-gather": "all_gather", "ours, Ulysses": "ulysses"}
    for name, strategy in strategies.items():
        if strategy != "ulysses" or attention.heads[1] % machine.world_size == 0:
            found[name] = public_stages(attention, mesh, shards, strategy)
    for name, rotation in (("torch's ring", "alltoall"), ("torch's all-gather", "allgather")):
        over = partial(_rotating, rotation)
        found[name] = torch_stages_over(attention, mesh.get_group(), shards, over)
    return found


def _rotating(rotation: str) -> AbstractContextManager[object]:
    templated.set_rotate_method(rotation)  # for the whole process
    return nullcontext()


@torch.no_grad()
def speed(machine: Machine) -> Iterator[Finding]:
    """Next to one launch on the whole sequence, which has one GPU."""
    kernel = best_kernels(machine.device)[0]
    with machine.connected() as mesh:
        SequenceAxis(mesh, ZigZag())
        for shard, repeats in SHARDS.items() if not machine.is_dry else ((64, 1),):
            what = f"{kernel}, {machine.world_size} x {shard:,}"
            if f"{what}, ours" in machine.found:
                continue
            if machine.agreed_left() < LONG * (shard / max(SHARDS)) ** 2:
                yield left_out(what)
                continue
            yield from _speeds(what, machine, mesh, attention_of(machine, kernel, shard), repeats)


LONG = 150
"""Seconds of the longest shards."""


def _speeds(
    what: str, machine: Machine, mesh: DeviceMesh, attention: Attention, repeats: int
) -> Iterator[Finding]:
    try:
        found = contenders(machine, mesh, attention)
        runs = {name: partial(_of_all, machine, stages) for name, stages in found.items()}
        times = in_turns(runs, repeats)
    except torch.OutOfMemoryError:  # all ranks have the same sizes
        yield Finding(f"{what}, ours", "left out: these GPUs have too little memory")
        return
    finally:
        if machine.device == "cuda":
            torch.cuda.empty_cache()
    one = [seconds / machine.world_size for seconds in times.pop("one launch")]
    speeds = {
        name: [x / y for x, y in zip(one, taken, strict=True)] for name, taken in times.items()
    }
    torchs = [both for name, both in speeds.items() if "torch" in name]
    theirs = [max(stage) for stage in zip(*torchs, strict=True)]
    for name, (forward, both) in speeds.items():
        missed = name == "ours" and _missed(attention, (forward, both), theirs)
        found_text = f"{forward:.1%} of one launch forward, {both:.1%} with backward"
        shown = f"{found_text} ({1e3 * times[name][0]:.2f} and {1e3 * times[name][1]:.2f} ms)"
        yield Finding(f"{what}, {name}", shown, missed or "")


def _missed(attention: Attention, ours: tuple[float, float], theirs: list[float]) -> str:
    """The aims are for 8k tokens and more; PyTorch's rings are not faster anywhere."""
    aims = [f"torch's, {best:.1%}" for mine, best in zip(ours, theirs, strict=True) if mine < best]
    if attention.shard >= TOKENS:
        aims += [f"{aim:.0%}" for mine, aim in zip(ours, AIMS, strict=True) if mine < aim]
    return ", ".join(aims)


def _of_all(machine: Machine, stages: Stages) -> list[float]:
    """Seconds to the end of each stage on the slowest rank."""
    dist.barrier()
    return machine.largest(seconds_of(stages))


@torch.no_grad()
def hops(machine: Machine) -> Iterator[Finding]:
    """What of each message the kernels beside it do not cover."""
    kernel = best_kernels(machine.device)[0]
    attention = attention_of(machine, kernel, TOKENS if not machine.is_dry else 64)
    with machine.connected() as mesh:
        SequenceAxis(mesh, ZigZag())
        forward, backward = public_stages(attention, mesh, attention.inputs(), "around")
        for _ in range(3):
            forward(), backward()
        for what, stage in (("forward", forward), ("backward", backward)):
            if stage is backward:
                forward()  # whose results backward takes
            torch.cuda.synchronize()
            dist.barrier()
            yield from _by_hop(f"{kernel}, {what}", messages_in(machine.spans_of(stage)))


Message = tuple[float, float]
"""Seconds of a message, and those of them that nothing hides."""


def messages_in(spans: list[KernelSpan]) -> list[Message]:
    """By their start."""
    covers = joined(span for span in spans if span.kind != "messages")
    sent = [span for span in spans if span.kind == "messages"]
    return [(span.end - span.start, exposed(span, covers)) for span in sent]


def _by_hop(what: str, mine: list[Message]) -> Iterator[Finding]:
    """Means of the ranks."""
    by_rank: list[list[Message]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(by_rank, mine)
    for number, found in enumerate(zip(*by_rank, strict=False)):
        length, part = (mean(x) for x in zip(*found, strict=True))
        is_exposed = part > EXPOSED * length
        aim = f"at most {EXPOSED:.0%} exposed" if is_exposed else ""
        shown = f"{1e3 * length:.3f} ms, of which {part / length:.0%} is exposed"
        yield Finding(f"{what}, message {number}", shown, aim)
    if not all(by_rank):
        yield Finding(f"{what}, messages", "the trace of a rank has none", is_wrong=True)


@torch.no_grad()
def agreement(machine: Machine) -> Iterator[Finding]:
    """The host's time for a call of few tokens, by what connects the ranks."""
    with machine.connected() as mesh:
        groups = {"without agreement": machine.backend, "as it is": machine.backend}
        groups |= {"with gloo beside it": machine.beside}
        calls = {name: _call(machine, backend, name) for name, backend in groups.items()}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(NUM_CALLS if not machine.is_dry else 3):
            for name, call in calls.items():
                dist.barrier(mesh.get_group())
                times[name].append(_host_seconds(call))
    medians = machine.largest([median(found) for found in times.values()])
    bare = medians[0]
    for name, seconds in zip(times, medians, strict=True):
        aim = f"at most {1e6 * HOST_COST:.0f} us more" if seconds > bare + HOST_COST else ""
        found = f"{1e6 * seconds:.0f} us of the host, {1e6 * (seconds - bare):+.0f} us"
        yield Finding(f"a call on {machine.world_size} ranks, {name}", found, aim)


def _call(machine: Machine, backend: str, name: str) -> Callable[[], Any]:
    """A call on a mesh of its own."""
    mesh = new_mesh(machine, backend)
    if name == "without agreement":
        without_records(mesh.get_group())
    SequenceAxis(mesh, ZigZag())
    shards = Setting(machine.device, machine.compiler, 16 * machine.world_size).wholes()[1:]
    inputs = [x[:, :, :16] for x in shards]
    call = partial(ring_attention, *inputs, mesh=mesh)
    for _ in range(5):
        call()
    return call


def _host_seconds(call: Callable[[], Any]) -> float:
    """Until the call returns; what the GPU does then is not counted."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
