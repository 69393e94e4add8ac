"""Generates from a long prompt, with the keys and values sharded along the sequence.

    python examples/generate_hf.py --world 2 --prompt-len 32768 --new 64

Trains the small Llama of `train_hf.py` on Python's standard library for a minute, or loads what an
earlier run has trained. Then it generates from a prompt of the same text, by stock transformers in
one process and on `--world` ranks, whose tokens must be the same.
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
from parts.small_models import small_model
from parts.text import read_standard_library
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from train_hf import batch_of, positive
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from parallel_plans.huggingface import ContextParallelCache, context_parallel_plan
from parallel_plans.huggingface.core.versions import cache_name

RESULT = "generated.json"
TRAINED_LENGTH = 512
"""Tokens of a sequence in training."""


@dataclass
class Run:
    """Measurements of one generation."""

    tokens: list[int]
    seconds_to_first: float
    milliseconds_per_token: float
    cache_bytes: list[int]
    """By rank."""


class Progressed(BaseStreamer):
    """Shows how far it is, and notes when each token came; the first call brings the prompt."""

    def __init__(self, title: str, total: int, disable: bool) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        self._progress = Progress(*columns, TimeElapsedColumn(), disable=disable)
        self._task = self._progress.add_task(title, total=total)
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        if not self.times:
            self._progress.start()
        else:
            self._progress.advance(self._task)
        self.times.append(time.perf_counter())

    def end(self) -> None:
        self._progress.stop()


def main() -> None:
    options = parse_options()
    if dist.is_torchelastic_launched():
        generate_sharded(options)
    else:
        compare(options)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=positive, default=2, help="processes on the axis")
    parser.add_argument("--prompt-len", type=positive, default=32768, help="tokens of the prompt")
    parser.add_argument("--new", type=positive, default=64, help="tokens to generate")
    parser.add_argument("--seconds", type=float, default=60, help="of training")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the results")
    options = parser.parse_args()
    if options.new < 2:
        parser.error("--new must be at least 2: the first token comes with the prompt")
    return options


def compare(options: argparse.Namespace) -> None:
    """Generate here and on several ranks, with as many threads in all, and show both."""
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.world)
    train(options)
    model = trained_model(options)
    cache = DynamicCache(config=model.config)
    stock = generate(model, cache, "stock, 1 process", options)
    pairs = ((layer.keys, layer.values) for layer in cache.layers)
    stock.cache_bytes.append(sum(x.numel() * x.itemsize for pair in pairs for x in pair))
    ours = launch(options)
    show(options, stock, ours)
    same = stock.tokens == ours.tokens
    Console().print(f"all {options.new} tokens agree: {same}")
    Console().print(bytes(ours.tokens).decode(errors="replace"), style="dim", markup=False)
    if not same:
        sys.exit("the tokens differ")


def train(options: argparse.Namespace) -> None:
    """Write the checkpoint, unless there is one."""
    path = checkpoint(options)
    if path.exists():
        return
    model, text = model_of(options), read_standard_library()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    asked = argparse.Namespace(seq_len=TRAINED_LENGTH, batch=8)
    begin, step, past = time.monotonic(), 0, 0.0
    with Progress() as progress:
        task = progress.add_task("training", total=options.seconds)
        while past < options.seconds:
            tokens = batch_of(text, step, asked)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step, past = step + 1, time.monotonic() - begin
            progress.update(task, completed=past)
    torch.save(model.state_dict(), path)


def checkpoint(options: argparse.Namespace) -> Path:
    return options.out / "generate_hf.pt"


def model_of(options: argparse.Namespace) -> Any:
    """The small Llama, for as many positions as there will be."""
    return small_model("llama", max(TRAINED_LENGTH, options.prompt_len + options.new))


def trained_model(options: argparse.Namespace) -> Any:
    model = model_of(options).eval()
    model.load_state_dict(torch.load(checkpoint(options)))
    model.generation_config.eos_token_id = None  # each byte is text
    return model


def launch(options: argparse.Namespace) -> Run:
    """Generate under torchrun with these options."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={options.world}", __file__, *sys.argv[1:]]
    threads = {"OMP_NUM_THREADS": "1"}  # of a rank; without, torchrun warns
    status = subprocess.run(command, check=False, env=os.environ | threads).returncode
    if status:
        sys.exit(status)
    return Run(**json.loads((options.out / RESULT).read_text()))


def generate_sharded(options: argparse.Namespace) -> None:
    """One rank; rank 0 writes what came of it."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = trained_model(options)
    model = parallelize_module(model, mesh["cp"], context_parallel_plan(model))
    cache = ContextParallelCache(model)
    title = f"sharded, {dist.get_world_size()} processes"
    run = generate(model, cache, title, options)
    run.cache_bytes.extend(cache.usage().held)
    if dist.get_rank() == 0:
        (options.out / RESULT).write_text(json.dumps(asdict(run)))
    dist.destroy_process_group()


def generate(model: Any, cache: Any, title: str, options: argparse.Namespace) -> Run:
    """Greedily, from the beginning of the text."""
    prompt = read_standard_library()[: options.prompt_len].long().unsqueeze(0)
    is_shown = not dist.is_initialized() or dist.get_rank() == 0
    streamer, begin = Progressed(title, options.new, not is_shown), time.perf_counter()
    found = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=options.new,
        do_sample=False,
        streamer=streamer,
        **{cache_name(model): cache},
    )
    first, *others = streamer.times[1:]
    milliseconds = 1000 * (others[-1] - first) / len(others)
    return Run(found[0, options.prompt_len :].tolist(), first - begin, milliseconds, [])


def show(options: argparse.Namespace, *runs: Run) -> None:
    """The runs side by side."""
    table = Table(title=f"{options.new} bytes after a prompt of {options.prompt_len:,}")
    for column in ("run", "first token", "each token", "cache per rank"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for name, run in zip(("stock, 1 process", f"{options.world} ranks"), runs, strict=True):
        each = f"{run.milliseconds_per_token:.1f} ms"
        held = f"{max(run.cache_bytes) / 2**20:.2f} MiB"
        table.add_row(name, f"{run.seconds_to_first:.2f} s", each, held)
    Console().print(table)


if __name__ == "__main__":
    main()
