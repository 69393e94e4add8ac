"""Measure rings of 4 and 8 ranks on one GPU: what they add to a kernel on the whole sequence.

Run ``python benchmarks/gpu.py``: the ranks of a ring run one after the other, and what they would
receive is copied on the device. It prints tables and writes them, with a picture, to
``benchmarks/results``. With ``--quick`` it measures one small case and writes to ``out`` instead.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from random import Random
from typing import Any

import torch
from alone import (
    Attention,
    in_turns,
    merge_share,
    positions_of,
    rank_stages,
    seconds_of,
    torch_stages,
    whole_inputs,
)
from baselines import Stages
from gpu_card import Overlap, Row, draw, name_of, report
from harness import origin, publish
from torch import Tensor

from dtensor_ring import Balanced, Contiguous, Mask, Striped, ZigZag
from dtensor_ring.compute.kernels import KERNELS
from dtensor_ring.planning.layout import Layout

CAUSAL, WINDOW = Mask.causal(), Mask.sliding(4096)
NUM_DOCUMENTS = 16
RATES = (400e9, 100e9, 50e9, 25e9)
"""Bytes per second of links."""


def documents(seq_len: int) -> tuple[int, ...]:
    """Boundaries of documents of uneven length, always the same."""
    return 0, *sorted(Random(0).sample(range(1, seq_len), NUM_DOCUMENTS - 1)), seq_len


def attentions(device: str, quick: bool) -> Iterator[tuple[Attention, int]]:
    """The attention to measure, and the number of repeats."""
    if quick:
        dims = {"heads": (4, 2), "head_dim": 64, "device": device}
        bounds = documents(512)
        for layout, cuts in ((ZigZag(), None), (Contiguous(), bounds)):
            yield from _by_kernel(2, 256, layout, CAUSAL, cuts, 1, **dims)
        return
    bounds = documents(8 * 8192)
    everywhere: list[tuple[Layout, Mask, Any]] = [
        (ZigZag(), CAUSAL, None),
        (Striped(), CAUSAL, None),
        (Contiguous(), CAUSAL, None),
        (ZigZag(), WINDOW, None),
        (Contiguous(), WINDOW, None),
        (ZigZag(), CAUSAL, bounds),
        (Contiguous(), CAUSAL, bounds),
        (Balanced(CAUSAL, 8 * 8192, 8, bounds), CAUSAL, bounds),
    ]
    for layout, mask, cuts in everywhere:
        yield from _by_kernel(8, 8192, layout, mask, cuts, 7, device=device)
    for world_size, shard, repeats in ((4, 8192, 7), (8, 32768, 2), (4, 131072, 1)):
        for mask, cuts in ((CAUSAL, None), (WINDOW, None), (CAUSAL, documents(world_size * shard))):
            found = _by_kernel(world_size, shard, ZigZag(), mask, cuts, repeats, device=device)
            yield from list(found)[:1]


def _by_kernel(
    world_size: int,
    shard: int,
    layout: Layout,
    mask: Mask,
    cuts: tuple[int, ...] | None,
    repeats: int,
    **dims: Any,
) -> Iterator[tuple[Attention, int]]:
    """The attention by each kernel that can, but for the reference, best first."""
    for name, kernel in KERNELS.items():
        attention = Attention(name, world_size, shard, layout, mask, cuts, **dims)
        reason = kernel.missing() or kernel.supports(attention.problem())
        if reason is None and name != "reference":
            yield attention, repeats


def measure(attention: Attention, repeats: int) -> Row:
    """One launch, our ranks and those of PyTorch's ring in turns."""
    device, world_size = attention.device, attention.world_size
    shards = attention.inputs()
    single = rank_stages(attention.whole(), 0, whole_inputs(attention, shards))
    ours = [rank_stages(attention, rank, shards) for rank in range(world_size)]
    contenders = {
        "single": lambda: seconds_of(single, device),
        "ours": lambda: _sum(seconds_of(stages, device) for stages in ours),
    }
    theirs: list[Stages] = []
    if attention.cu_seqlens is None and (attention.layout, attention.mask) == (ZigZag(), CAUSAL):
        theirs = [torch_stages(attention, rank, shards) for rank in range(world_size)]
        contenders["torch"] = lambda: _sum(seconds_of(stages, device) for stages in theirs)
    for rings in (ours, theirs):
        check_agreement(attention, single, rings)
    times = in_turns(contenders, repeats)
    share = sum(merge_share(stages, device) for stages in ours) / world_size
    return Row(attention, times["single"], times["ours"], times.get("torch"), share)


def check_agreement(attention: Attention, single: Stages, rings: list[Stages]) -> None:
    """Compare outputs and gradients of queries of each rank with those of one launch.

    Gradients of keys are sums over ranks, of which a rank alone has its own part only.
    """
    out, grad_query = single[0]()[0], single[1]()[0]
    for rank, (forward, backward) in enumerate(rings):
        positions = positions_of(attention, rank)
        for what, ours, whole in (
            ("outputs", forward()[0], out),
            ("gradients of queries", backward()[0], grad_query),
        ):
            expected = whole[:, :, positions]
            error, size = (_norm(ours - expected), _norm(expected))
            if not error <= 2e-2 * size:  # entries shrink as rows see more keys
                raise AssertionError(f"{what} of rank {rank} differ by {error} of {size}")


def _norm(x: Tensor) -> float:
    return torch.linalg.vector_norm(x, dtype=torch.float32).item()


def _sum(times: Iterator[list[float]]) -> list[float]:
    return [sum(of_stage) for of_stage in zip(*times, strict=True)]


def overlap(attention: Attention, rate: float, repeats: int) -> Overlap:
    """A rank in the middle, all of whose messages come over a link."""
    rank, shards = attention.world_size // 2, attention.inputs()
    links = {"free": None, "linked": rate}
    stages = {name: rank_stages(attention, rank, shards, given) for name, given in links.items()}
    times = in_turns(
        {name: partial(seconds_of, x, attention.device) for name, x in stages.items()}, repeats
    )
    num_hops = attention.plan(rank).num_received / attention.shard  # of whole shards
    shard = sum(x.numel() * x.itemsize for x in shards[2:])
    sums = 4 * shard // attention.dtype.itemsize
    transfers = [num_hops * shard / rate, num_hops * (2 * shard + sums) / rate]
    return Overlap(attention, rate, times["free"], times["linked"], transfers)


def machine(device: str) -> dict[str, str]:
    """Where the numbers come from."""
    about = origin()
    if device == "cuda":
        about["GPU"] = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
        about["cuDNN"] = str(torch.backends.cudnn.version())
    for package in ("triton", "flash-attn", "flash-attn-4"):
        try:
            about[package] = version(package)
        except PackageNotFoundError:
            continue
    return about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one small case")
    parser.add_argument("--device", default="cuda", help="cpu tries the script, with --quick")
    arguments = parser.parse_args()
    device, quick = arguments.device, arguments.quick
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("this needs a CUDA device; --device cpu --quick tries the script without")
    about: dict[str, str] = machine(device)
    rows: list[Row] = []
    overlaps: list[Overlap] = []
    with torch.no_grad():
        for attention, repeats in attentions(device, quick):
            with _noted(about, f"{attention.kernel}, {name_of(attention)}"):
                rows.append(measure(attention, repeats))
        for rate in RATES if device == "cuda" and rows else ():
            with _noted(about, f"a link of {rate / 1e9:.0f} GB/s"):
                overlaps.append(overlap(rows[0].attention, rate, 5))
    measured = {"rows": [_plain(x) for x in rows], "overlaps": [_plain(x) for x in overlaps]}
    show = partial(report, rows=rows, overlaps=overlaps)
    folder = publish("gpu", "Rings on one GPU", quick, about, measured, show)
    draw(folder / "gpu.png", rows)


@contextmanager
def _noted(about: dict[str, str], what: str) -> Iterator[None]:
    """Keeps a failure for the card: the other rows are still worth one."""
    try:
        yield
    except Exception as error:  # compilers of kernels raise what they like
        about[f"failed: {what}"] = f"{type(error).__name__}: {error}"[:200]


def _plain(found: Row | Overlap) -> dict[str, Any]:
    """The value as JSON takes it."""
    return asdict(found) | {"attention": str(found.attention)}


if __name__ == "__main__":
    main()
