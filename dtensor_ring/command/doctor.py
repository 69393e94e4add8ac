"""The command `doctor` reports what is installed, and tests rings over the launcher's ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dtensor_ring.compute.kernels import Scores, available_kernels, kernel_for, missing_kernel
from dtensor_ring.dtensor.attention import ring_attention
from dtensor_ring.dtensor.axis import SequenceAxis
from dtensor_ring.dtensor.sequence import shard_sequence, unshard_sequence
from dtensor_ring.lab.calibrate.stopwatch import Stopwatch
from dtensor_ring.lab.ranks import Ranks, connected
from dtensor_ring.lab.report import Finding, show, versions, written
from dtensor_ring.ops.options import default_scale
from dtensor_ring.paged.kernels import PAGED
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.plan import Plan, plan
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.ring import ring_forward
from dtensor_ring.selected.listed_attention import LISTED
from dtensor_ring.transport.transport import (
    P2P,
    NullTransport,
    ProcessGroupTransport,
    Transport,
    Work,
)

# How long a failed rank leaves the one that reports.
REPORT_SECONDS = 10


def doctor(kernel: str | None = None, as_json: bool = False) -> int:
    """Print what is installed, which kernels run, and whether a ring of all ranks is right.

    Returns:
        The exit status: 1 if something is wrong, or no ring was tested for lack of a launcher.
    """
    is_launched = dist.is_torchelastic_launched()
    # Local rank 0 reports. The launcher knows it even if the group fails to start.
    is_first = dist.get_node_local_rank(0) == 0
    findings = [*versions(), *_kernels(kernel)]
    if is_launched:
        findings += self_test(kernel)
    else:
        findings.append(Finding("ring", "not tested", f"to test it: {LAUNCH}"))
    if is_first:
        print(written(findings)) if as_json else show(findings)
    if not is_launched:
        print(
            f"no ring was tested, as there are no other ranks; start it by: {LAUNCH}",
            file=sys.stderr,
        )
    is_bad = any(finding.is_bad for finding in findings)
    if is_bad and not is_first:
        # The launcher ends all ranks with the first that fails, so the one that reports goes first.
        time.sleep(REPORT_SECONDS)
    return int(is_bad or not is_launched)


class RepeatTransport(Transport):
    """A transport that records the messages of a ring, and can send them again without it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._hops: list[tuple[list[P2P], list[P2P]]] = []

    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        self._hops.append((receives, sends))
        return self._transport.start(receives, sends)

    def send(self) -> None:
        """Send all recorded messages, one hop after the other."""
        for receives, sends in self._hops:
            for work in self._transport.start(receives, sends):
                work.wait()


# Shape of a rank's query, key and value where time is measured, (B, N, L, H).
SHAPE = 1, 8, 2048, 64

REPEATS = 5


def overlap(ranks: Ranks, kernel: str | None, layout: str) -> Finding:
    """Time a causal ring forward, the same without messages, and its messages alone."""
    mesh, device, dtype = ranks
    size, rank = mesh.size(), mesh.get_local_rank()
    shard = [torch.randn(SHAPE, device=device).to(dtype) for _ in range(3)]
    mine = plan(as_layout(layout), Mask.causal(), rank, size, SHAPE[2] * size)
    transport = ProcessGroupTransport(mesh.get_group())
    again = RepeatTransport(transport)
    again.prepare(device)
    ring = _run_ring(shard, mine, kernel)
    ring(again)  # records the messages, and warms up
    calls = [lambda: ring(transport), lambda: ring(NullTransport()), again.send]
    watch = Stopwatch(device)
    turns = [[1e3 * watch.laps(call)[0] for call in calls] for _ in range(REPEATS)]
    whole, kernels, messages = map(median, zip(*turns, strict=True))
    found = f"{whole:.1f} ms; {kernels:.1f} without messages, which take {messages:.1f} alone"
    exposed = max(0.0, whole - kernels)
    if exposed < messages / 2:
        return Finding("overlap", f"{found}: hidden")
    return Finding("overlap", f"{found}: exposed", _advice(device))


def _run_ring(shard: list[Tensor], mine: Plan, kernel: str | None) -> Callable[[Transport], object]:
    """Return a function that runs the ring with a given transport."""
    query, key, value = shard
    head_dim = SHAPE[3]
    scores = Scores(Mask.causal(), default_scale(head_dim))
    chosen = kernel_for(kernel, query.device.type, query.dtype, head_dim, head_dim, scores.scale)
    return lambda transport: ring_forward(query, (key, value), mine, chosen, scores, transport)


def _advice(device: torch.device) -> str:
    if device.type == "cuda":
        return "longer shards hide more; see docs/profiling.md"
    return "messages over gloo take the cores that compute: give each rank one more"


# Sizes of a rank's tensors where results are compared.
HEADS, TOKENS, HEAD_DIM = 8, 256, 64


def self_test(kernel: str | None = None, layout: str = "zigzag") -> list[Finding]:
    """Test rings over all ranks, forward and backward, and time one of them.

    The test makes the default process group, and ends it.

    Args:
        kernel: name of a kernel; `None` for the first that can.
        layout: how tokens are sharded.
    """
    masks = {"causal": Mask.causal(), "window": Mask.sliding(TOKENS // 3)}
    try:
        with connected() as ranks:
            SequenceAxis(ranks.mesh, layout, kernel=kernel)
            rings = [_compare_ring(ranks, name, mask) for name, mask in masks.items()]
            is_right = not any(ring.is_bad for ring in rings)
            timed = [overlap(ranks, kernel, layout)] if is_right and ranks.mesh.size() > 1 else []
            return [_of_group(ranks), *rings, *timed]
    except (RuntimeError, ValueError) as error:  # a ring that fails is a finding above
        advice = "see whether all ranks were started, and reach the first one"
        return [Finding("process group", str(error), advice, is_bad=True)]


def _of_group(ranks: Ranks) -> Finding:
    size, threads = ranks.mesh.size(), torch.get_num_threads()
    found = f"{size} on {ranks.device.type}, {threads} threads each"
    alone = "one rank sends nothing: --nproc-per-node 2 tests messages"
    return Finding("ranks", found, alone if size == 1 else "")


def _compare_ring(ranks: Ranks, name: str, mask: Mask) -> Finding:
    """Compare a ring with attention on one rank, and report the error."""
    what = f"ring, {name}"
    largest = 1e-4 if ranks.dtype == torch.float32 else 5e-2  # entries are about 1
    try:
        error = _largest_error(ranks, mask)
    except (RuntimeError, ValueError) as problem:  # an error of the ring is a RuntimeError
        advice = "docs/failures.md lists what ranks say of one another"
        return Finding(what, f"{type(problem).__name__}: {problem}", advice, is_bad=True)
    found = f"off by {error:.0e}, forward and backward; up to {largest:.0e} is rounding"
    return Finding(what, found, is_bad=not error <= largest)


def _largest_error(ranks: Ranks, mask: Mask) -> float:
    """Return the largest error of the output and the gradients over the whole sequence."""
    mesh, device, dtype = ranks
    *inputs, grad_out = _tensors(mesh, device, dtype)
    whole = [x.clone().requires_grad_() for x in inputs]
    expected = F.scaled_dot_product_attention(*whole, attn_mask=_seen(mask, inputs[0]))
    wanted = expected, *torch.autograd.grad(expected, whole, grad_out)
    shards = [shard_sequence(x, mesh, dim=2).detach().requires_grad_() for x in inputs]
    out = ring_attention(*shards, mask=mask)
    found = out, *torch.autograd.grad(out, shards, shard_sequence(grad_out, mesh, dim=2))
    pairs = zip(found, wanted, strict=True)
    return max(_distance(sharded.detach(), x.detach()) for sharded, x in pairs)


def _tensors(mesh: dist.DeviceMesh, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return a whole query, key, value and output gradient, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    shape = 1, HEADS, TOKENS * mesh.size(), HEAD_DIM
    return [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4)]


def _seen(mask: Mask, query: Tensor) -> Tensor:
    """Return which keys each query sees, as a boolean matrix."""
    whole = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device)
    return whole.tril() if mask.left is None else whole.tril().triu(-mask.left)


def _distance(sharded: Any, whole: Tensor) -> float:
    return float((unshard_sequence(sharded, dim=2) - whole).abs().max())


# Kernels that run without a GPU.
CPU_KERNELS = ("cpu_flash", "reference")

# Kernels that nobody has measured.
UNMEASURED = ("cudnn_flex", "cudnn_sdpa")

# Name of a kernel that runs on most GPUs, and needs no compiler.
PREBUILT = "hub:kernels-community/flash-attn2"

LAUNCH = "torchrun --nproc-per-node 2 -m dtensor_ring doctor"


def _kernels(asked: str | None) -> list[Finding]:
    """Report each kernel, and why it does not run; that is bad only for the kernel asked for."""
    found = available_kernels()
    if asked is not None:
        try:
            found[asked] = missing_kernel(asked)
        except ValueError as error:
            return [Finding(f"kernel {asked}", str(error), is_bad=True)]
    findings = [_of_kernel(name, reason, name == asked) for name, reason in found.items()]
    findings += [Finding(f"paged kernel {x.name}", x.missing() or "runs") for x in PAGED]
    findings.append(Finding(f"kernel of lists {LISTED.name}", LISTED.missing() or "runs"))
    is_fast = any(x is None for name, x in found.items() if name not in CPU_KERNELS)
    if torch.cuda.is_available() and not is_fast:
        advice = "pip install flash-attn, or test a prebuilt one: --kernel " + PREBUILT
        findings.append(Finding("kernels for this GPU", "only the slow reference", advice))
    return findings


def _of_kernel(name: str, reason: str | None, is_asked: bool) -> Finding:
    """Report whether a kernel runs, and how to choose one that comes after the others."""
    what = f"kernel {name}"
    if reason is not None:
        return Finding(what, reason, is_bad=is_asked)
    if name in UNMEASURED:
        found = "installed; nobody has measured it, so others come first"
        how = "prefer_measured takes it where files of calibrate say that it is the fastest"
        return Finding(what, found, f'kernel="{name}" asks for it; {how}')
    return Finding(what, "runs")
