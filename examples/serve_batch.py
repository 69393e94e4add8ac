"""Serves prompts that begin alike from one pool of keys and values, sharded along the sequence.

    python examples/serve_batch.py --world 2 --prompts 64 --prefixes 4 --prefix-len 8192 --new 16

Trains the small Llama of `generate_hf.py` on Python's standard library for a minute, or loads what
an earlier run has trained. Its prompts are four long beginnings of that text, each followed by a
few bytes of its own. They are served at once on 1 rank and on `--world` ranks: each beginning is
computed once, and kept once. Stock transformers then generates for each prompt alone, whose tokens
must be the same; all in float64, so that rounding decides none.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from generate_hf import train, trained_model
from parts.text import read_standard_library
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from tqdm import tqdm
from train_hf import positive
from transformers import ContinuousBatchingConfig

from parallel_plans.huggingface import context_parallel_plan

RESULT = "served.json"
BLOCK = 256
"""Tokens of a block of the pool."""


@dataclass
class Served:
    """What came of all prompts at once."""

    tokens: list[list[int]]
    """By prompt."""
    seconds: float
    prefilled: int
    """Tokens of prompts that were computed."""
    cached: int
    """Tokens of prompts that were taken from the pool."""
    most_shared: int
    """Blocks of all ranks that several requests held at once, at most."""
    bytes_of_rank: int


def main() -> None:
    options = parse_options()
    if dist.is_torchelastic_launched():
        serve_sharded(options)
    else:
        compare(options)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=positive, default=2, help="processes on the axis")
    parser.add_argument("--prompts", type=positive, default=64, help="number of prompts")
    parser.add_argument("--prefixes", type=positive, default=4, help="shared beginnings")
    parser.add_argument("--prefix-len", type=positive, default=8192, help="tokens of a beginning")
    parser.add_argument("--own", type=positive, default=32, help="tokens after a beginning")
    parser.add_argument("--new", type=positive, default=16, help="tokens to generate of each")
    parser.add_argument("--at-once", type=positive, default=16, help="requests that hold blocks")
    parser.add_argument("--seconds", type=float, default=60, help="of training")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the results")
    options = parser.parse_args()
    options.prompt_len = options.prefix_len + options.own
    return options


def prompts_of(options: argparse.Namespace) -> list[list[int]]:
    """Beginnings from different places of the text; those of neighbours differ."""
    text, length = read_standard_library(), options.prefix_len
    prefixes = [text[i * length : (i + 1) * length].tolist() for i in range(options.prefixes)]
    own = text[options.prefixes * length :].split(options.own)
    return [prefixes[i % options.prefixes] + own[i].tolist() for i in range(options.prompts)]


def compare(options: argparse.Namespace) -> None:
    """Serve on one rank and on several, with as many threads in all, and each prompt alone."""
    options.out.mkdir(parents=True, exist_ok=True)
    train(options)
    runs = {world: launch(options, world) for world in sorted({1, options.world})}
    torch.set_num_threads(options.world)
    model, begin = trained_model(options).double(), time.perf_counter()
    stock = [
        alone(model, prompt, options) for prompt in track(prompts_of(options), "stock, one by one")
    ]
    show(options, runs, time.perf_counter() - begin)
    differing = [world for world, run in runs.items() if run.tokens != stock]
    Console().print(f"all tokens agree: {not differing}")
    if differing:
        sys.exit(f"the tokens differ on {differing} ranks")


def alone(model: Any, prompt: list[int], options: argparse.Namespace) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    found = model.generate(ids, attention_mask=mask, max_new_tokens=options.new, do_sample=False)
    return found[0, len(prompt) :].tolist()


def launch(options: argparse.Namespace, world: int) -> Served:
    """Serve under torchrun with these options."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={world}", __file__, *sys.argv[1:]]
    threads = {"OMP_NUM_THREADS": str(max(1, options.world // world))}
    status = subprocess.run(command, check=False, env=os.environ | threads).returncode
    if status:
        sys.exit(status)
    return Served(**json.loads((options.out / RESULT).read_text()))


def serve_sharded(options: argparse.Namespace) -> None:
    """One rank; rank 0 writes what came of it."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = trained_model(options).double()
    model = parallelize_module(model, mesh["cp"], context_parallel_plan(model))
    run = serve(model, prompts_of(options), options)
    if dist.get_rank() == 0:
        (options.out / RESULT).write_text(json.dumps(asdict(run)))
    dist.destroy_process_group()


def serve(model: Any, prompts: list[list[int]], options: argparse.Namespace) -> Served:
    """All prompts at once, in a pool with room for the beginnings and for `--at-once` requests."""
    world = dist.get_world_size()
    per_request = -(-(options.own + options.new) // BLOCK) + 2
    shared = options.prefixes * -(-options.prefix_len // BLOCK)
    config = ContinuousBatchingConfig(
        page_size=BLOCK,
        num_blocks=-(-shared // world) + options.at_once * per_request,
        max_requests_per_batch=options.at_once,
    )
    batch, outputs, shared_at_once = model.init_continuous_batching(None, config), {}, 0
    begin = time.perf_counter()
    ids = batch.add_requests(prompts, max_new_tokens=options.new, do_sample=False)
    title, is_quiet = f"served, {world} ranks", dist.get_rank() > 0
    with tqdm(total=len(prompts), desc=title, unit="request", disable=is_quiet) as line:
        while batch.has_requests():
            ended = batch.step()
            outputs |= {x.request_id: x.generated_tokens for x in ended}
            shared_at_once = max(shared_at_once, sum(batch.pool.usage().shared))
            line.update(len(ended))
            done = batch.counts.decoded / (time.perf_counter() - begin)
            line.set_postfix_str(f"{done:.0f} new tokens/s")
    seconds = time.perf_counter() - begin
    counts = batch.counts
    numbers = counts.prefilled, counts.cached, shared_at_once, batch.num_bytes
    return Served([outputs[x] for x in ids], seconds, *numbers)


def show(options: argparse.Namespace, runs: dict[int, Served], seconds: float) -> None:
    """The runs side by side."""
    title = f"{options.prompts} prompts of {options.prompt_len:,} bytes, {options.new} new of each"
    table = Table(title=title)
    for column in (
        "run",
        "new tokens/s",
        "times",
        "computed",
        "shared",
        "blocks shared",
        "pool per rank",
    ):
        table.add_column(column, justify="left" if column == "run" else "right")
    new = options.prompts * options.new
    everything = f"{options.prompts * options.prompt_len:,}"
    table.add_row("stock, one by one", f"{new / seconds:.1f}", "1.0", everything, "", "", "")
    for world, run in runs.items():
        numbers = f"{run.prefilled:,}", f"{run.cached:,}", f"{run.most_shared:,}"
        speeds = f"{new / run.seconds:.1f}", f"{seconds / run.seconds:.1f}"
        held = f"{run.bytes_of_rank / 2**20:.1f} MiB"
        table.add_row(f"served, {world} rank{'s' * (world > 1)}", *speeds, *numbers, held)
    Console().print(table)


if __name__ == "__main__":
    main()
