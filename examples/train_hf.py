"""Trains a small Hugging Face model on Python's standard library, its sequence sharded.

    python examples/train_hf.py --world 2 --layout zigzag --model llama

Runs the ring under torchrun, then the same training by stock transformers in one process, and
compares the two. Writes `demo.png` to the folder given by `--out`: what each rank did in the last
step, measured, above the losses of both runs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
import torch.distributed as dist
from parts.comparison import Run, largest_difference, plot, show
from parts.small_models import MASKED, MODELS, small_model
from parts.text import read_standard_library
from rich.console import Console
from rich.progress import track
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.tensor.parallel import parallelize_module
from torch.profiler import ProfilerActivity, profile, record_function

from dtensor_ring import Mask, describe_schedule
from parallel_plans.huggingface import context_parallel_plan

TOLERANCE = 1e-2
"""Largest difference of the losses, in nats a byte: rounding grows, mistakes show at once."""


def main() -> None:
    options = parse_options()
    if dist.is_torchelastic_launched():
        train(options)
    else:
        compare(options)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=positive, default=2, help="processes on the ring")
    parser.add_argument("--layout", default="zigzag", help="contiguous, striped or zigzag")
    parser.add_argument("--model", default="llama", choices=MODELS, help="family of the model")
    parser.add_argument("--packed", action="store_true", help="several documents in a sequence")
    parser.add_argument("--seq-len", type=positive, default=2048, help="tokens per sequence")
    parser.add_argument("--steps", type=positive, default=16, help="optimizer steps")
    parser.add_argument("--batch", type=positive, default=2, help="sequences per step")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--compile", action="store_true", help="torch.compile, no graph break")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the results")
    parser.add_argument("--stock", action="store_true", help="train without the ring")
    options = parser.parse_args()
    try:
        describe_schedule(options.layout, Mask.causal(), options.seq_len, options.world)
    except ValueError as error:
        parser.error(str(error))
    if options.stock and not dist.is_torchelastic_launched():
        parser.error("--stock is for runs under torchrun; without it both runs are made")
    return options


def positive(text: str) -> int:
    """An integer of at least 1."""
    if int(text) < 1:
        raise ValueError(f"{text} is not positive")
    return int(text)


def compare(options: argparse.Namespace) -> None:
    """Launch the ring and the single process, then show both."""
    options.out.mkdir(parents=True, exist_ok=True)
    ring = launch(options, options.world, "ring.json")
    stock = launch(options, 1, "stock.json", stock=True)
    difference = largest_difference(ring, stock)
    show(options, ring, stock, difference)
    picture = options.out / "demo.png"
    plot(picture, ring, stock, f"{options.layout}, {options.world} ranks")
    Console(soft_wrap=True).print(
        f"{options.world} ranks, each with a part of the sequence, learned what one process does, "
        f"to {difference:.0e} nats, and waited for messages {ring.waiting:.0%} of a step: {picture}"
    )
    if not difference < TOLERANCE:
        sys.exit(f"the losses differ by {difference:.1e}, which is more than rounding")


def launch(options: argparse.Namespace, world: int, result: str, **others: object) -> Run:
    """Train as under torchrun; every run has `--world` threads in all."""
    # Else the profiler calls it an error that no GPU is there.
    os.environ["KINETO_LOG_LEVEL"] = "99"
    # A fork has imported what this process has. CUDA and macOS's libraries do not work in forks.
    is_forked = options.device == "cpu" and sys.platform == "linux"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id=result,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork" if is_forked else "spawn",
    )
    elastic_launch(config, train)(argparse.Namespace(**vars(options) | others))
    return Run(**json.loads((options.out / result).read_text()))


def train(options: argparse.Namespace) -> None:
    """One rank of a training run; rank 0 writes the result."""
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.set_num_threads(max(1, options.world // world))
    device = torch.device(options.device, rank if options.device == "cuda" else None)
    if options.device == "cuda":
        torch.cuda.set_device(device)
    model: Any = small_model(options.model, options.seq_len).to(device)
    if not options.stock:
        mesh = init_device_mesh(options.device, (world,), mesh_dim_names=("cp",))
        model = parallelize_module(model, mesh["cp"], context_parallel_plan(model, options.layout))
    forward = torch.compile(model, fullgraph=True) if options.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    text, before = read_standard_library(), peak_bytes(device)
    losses, seconds = [], []
    title = "stock, 1 process" if options.stock else f"{options.layout} ring, {world} processes"
    for step in track(range(options.steps), title, disable=rank != 0):
        batch = {name: x.to(device) for name, x in inputs_of(text, step, options).items()}
        with measured(step == options.steps - 1 and not options.stock) as profiler:
            start = time.perf_counter()
            loss = forward(**batch, use_cache=False).loss
            loss.backward()
            average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start)
    spans = gathered_spans(profiler)
    if rank == 0:
        warm = sorted(seconds)[len(seconds) // 2]
        speed = batch["input_ids"].numel() / warm
        run = Run(losses, speed, peak_bytes(device) - before, spans)
        name = "stock.json" if options.stock else "ring.json"
        (options.out / name).write_text(json.dumps(asdict(run)))
    # Python aborts if it ends while gloo's threads let go of the last gradients.
    time.sleep(0.2)
    dist.destroy_process_group()


@contextmanager
def measured(is_on: bool) -> Iterator[profile | None]:
    """A profile of a step, in which rings say what they do."""
    if not is_on:
        yield None
        return
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("ring step: all"):
        yield profiler


def gathered_spans(profiler: profile | None) -> list[list[tuple[str, float, float]]]:
    """What all ranks did, see `Run.spans`; nothing without a profile."""
    if profiler is None:
        return []
    # Of one clock for all processes, unlike the times of `profiler.events()`.
    events = profiler.profiler.kineto_results.events()
    named = [(x.name(), x.start_ns(), x.end_ns()) for x in events if x.name().startswith("ring ")]
    found = ((name.rpartition(": ")[2].split()[0], *times) for name, *times in named)
    mine = sorted(found, key=lambda span: (span[1], -span[2]))
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    first = min(spans[0][1] for spans in everybody)
    return [
        [(kind, (begin - first) / 1e6, (end - first) / 1e6) for kind, begin, end in spans]
        for spans in everybody
    ]


def batch_of(text: torch.Tensor, step: int, options: argparse.Namespace) -> torch.Tensor:
    """The sequences of a step `(B, S)`, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    last = len(text) - options.seq_len
    starts = torch.randint(0, last, (options.batch,), generator=generator)
    return torch.stack([text[start : start + options.seq_len] for start in starts]).long()


def inputs_of(text: torch.Tensor, step: int, options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of the model in a step."""
    tokens = batch_of(text, step, options)
    batch = {"input_ids": tokens, "labels": tokens}
    generator = torch.Generator().manual_seed(step)
    if options.model in MASKED:
        is_masked = torch.rand(tokens.shape, generator=generator) < 0.15
        batch["input_ids"] = tokens.masked_fill(is_masked, 0)
        batch["labels"] = tokens.masked_fill(~is_masked, -100)
    if options.packed:
        begins = torch.rand(tokens.shape, generator=generator) < 4 / options.seq_len
        index = torch.arange(options.seq_len)
        batch["position_ids"] = index - torch.where(begins, index, 0).cummax(1).values
    return batch


def average_gradients(model: torch.nn.Module) -> None:
    """As data parallelism does: their mean over the ranks is the gradient of one process."""
    for parameter in model.parameters():
        if parameter.grad is None:  # an expert that no token of this rank went to
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    mpl.use("Agg")
    main()
