"""Whole rings on one GPU, whose ranks are threads: every layout, mask and kind of documents.

Outputs and gradients of each rank are compared with dense attention in float64 on the same device.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from harness import op_stages
from torch import Tensor

from dtensor_ring import Balanced, Mask, ZigZag
from dtensor_ring.compute.kernels import KERNELS
from dtensor_ring.planning.layout import Layout
from dtensor_ring.transport.transport import QUANTISED
from gpu_steps.alone import best_kernels
from gpu_steps.by_processes import error_of
from gpu_steps.machine import Finding, Machine, left_out
from tests.decoding import Decode, check
from tests.dense import dense_attention
from tests.layouts import LAYOUTS
from tests.played_group import PlayedGroup, play_group
from tests.rings import Case, Ring

RANKS, TOKENS = 8, 1024
MAX_SECONDS = 150
"""Seconds, so that other steps have theirs."""
LARGEST = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Errors by dtype, next to the largest entry."""


def by_threads(machine: Machine) -> Iterator[Finding]:
    end = machine.left - min(MAX_SECONDS, machine.left)
    kernels = ["reference", *best_kernels(machine.device)]
    parts = {kernel: _parts(machine, kernel) for kernel in kernels}
    for name in parts["reference"]:  # every kernel has its turn early: some compile for long
        for kernel in kernels:
            what = f"{num_ranks(machine)} threads, {name}, {kernel}"
            if what in machine.found or name not in parts[kernel]:
                continue
            yield _found(what, parts[kernel][name]) if machine.left > end else left_out(what)


def _found(what: str, check_all: Callable[[], str]) -> Finding:
    try:
        return Finding(what, check_all())
    except Exception as error:  # the other layouts are still worth a row
        return Finding(what, f"{type(error).__name__}: {error}"[:500], is_wrong=True)


def num_ranks(machine: Machine) -> int:
    return 4 if machine.is_dry else RANKS


def _parts(machine: Machine, kernel: str) -> dict[str, Callable[[], str]]:
    """What to check, by name."""
    tokens = 64 if machine.is_dry else TOKENS
    cuts = ((0, 1, 3, tokens // 3, tokens // 3 + 1, tokens - 5, tokens),)
    masks = [Mask.causal(), Mask.full(), Mask.sliding(tokens // 9), Mask.local(30, 20)]
    masks.append(Mask(None, 0, prefix=3))
    balanced = Balanced(masks[0], tokens, num_ranks(machine), cuts[0], block=8)
    layouts: tuple[Layout, ...] = (*LAYOUTS, balanced)
    if machine.is_dry:
        layouts, masks = (ZigZag(), balanced), masks[:1] + masks[2:3]

    def rings_of(layout: Layout) -> Iterator[Ring]:
        for mask in masks:
            for documents in (None, cuts) if layout is not balanced else (cuts,):
                yield Ring(layout, num_ranks(machine), tokens, mask, documents)

    def checked(layout: Layout) -> Callable[[], str]:
        return lambda: _rings(machine, kernel, list(rings_of(layout)))

    parts = {layout.spec: checked(layout) for layout in layouts}
    gathered = Ring(ZigZag(), num_ranks(machine), tokens, masks[0], cuts, strategy="all_gather")
    parts["all-gather"] = lambda: _rings(machine, kernel, [gathered])
    if kernel in ("reference", best_kernels(machine.device)[0]):
        parts["decoding"] = lambda: _decoded(machine, kernel, tokens)
    return parts


def _rings(machine: Machine, kernel: str, rings: list[Ring]) -> str:
    """How far they are off.

    Raises:
        AssertionError: if one is too far off.
    """
    dtype = torch.float32 if kernel == "reference" else machine.dtype
    errors: list[float] = []
    for ring in rings:
        if KERNELS[kernel].supports(ring.problem(machine.device, dtype, 64, 64)):
            continue
        case = Case(ring, dtype, head_dims=(64, 64), kernel=kernel)
        errors.append(error_of_ring(case, machine.device))
        if not errors[-1] <= LARGEST[dtype]:
            raise AssertionError(f"off by {errors[-1]:.0e}: {ring.mask}, {ring.documents}")
    return f"{len(errors)} rings, off by {max(errors):.0e}" if errors else "cannot do any"


def error_of_ring(case: Case, device: str) -> float:
    """The largest of all ranks: of output, log-sum-exp and gradients."""
    wholes, ring = _dense(case, device), case.ring
    by_rank = play_group(ring.world_size, lambda group: _attended(case, device, group))
    errors = []
    for rank, results in enumerate(by_rank):
        positions = ring.positions(rank)
        for found, whole in zip(results, wholes, strict=True):
            errors.append(error_of(found, whole[:, :, positions]) if len(positions) else 0.0)
    return torch.tensor(errors).max().item()  # NaN if any is


def _dense(case: Case, device: str) -> list[Tensor]:
    """Output and gradients, whole and in float64."""
    if case.policy.kv_dtype in QUANTISED:  # rounded shard by shard, on a CPU
        out, _, *grads = case.expected()
        return [x.to(device) for x in (out, *grads)]
    inputs = [x.to(device) for x in case.inputs()]
    seen = case.ring.visible().to(device)
    found = dense_attention(*inputs, case.ring.mask, scale=case.scale, seen=seen)
    return [found.out.detach(), *found.backward(case.grads()[0].to(device))]


@torch.no_grad()
def _attended(case: Case, device: str, group: PlayedGroup) -> list[Tensor]:
    """Of a rank. Not by autograd, which has one thread for all that a GPU computes backward."""
    grad_out = case.grads()[0][:, :, case.ring.positions(group.rank())]
    shards = [x.detach().to(device) for x in (grad_out, *case.shards(group.rank()))]
    forward, backward = op_stages(shards, case.call(group_name=group.group_name))
    return [*forward(), *backward()]


def _decoded(machine: Machine, kernel: str, tokens: int) -> str:
    """A token, three tokens, and a window, of keys that the ranks hold by their layout.

    Raises:
        AssertionError: if ranks differ, or are too far off.
    """
    dtype = torch.float32 if kernel == "reference" else machine.dtype
    one = Decode(
        *(ZigZag(), tokens, (tokens - 1,), num_ranks(machine)),
        **{"dtype": dtype, "head_dims": (64, 64), "device": machine.device},
        kernel="reference" if kernel == "reference" else None,
    )
    three = replace(one, starts=(tokens - 3, tokens - 9), num_queries=3)
    cases = [one, replace(one, merge="two_shot"), three, replace(three, mask=Mask.sliding(9))]
    for case in cases:
        check(case)
    return f"{len(cases)} calls as dense, the ranks alike to the bit"
