"""Finds a passkey in a million tokens, and trains on them for a step, on a few CPU ranks.

    python examples/million.py --world 2 --other 4

Trains a small model to find passkeys, hides one in the sources of Python's standard library, and
asks for it: the prompt is prefilled in chunks by the ring, its keys and values stay sharded over
the ranks. At `--compared` tokens stock transformers must generate the same tokens in one process.
Then a training step on as many tokens runs on `--world` ranks and on `--other` ranks, which must
have the same loss and the same norm of the gradients. `--part` chooses one of the two.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parts.passkey import NUM_DIGITS, QUESTION, draw_passkey, hide, learn, passkey_model, sharpen
from parts.rank_memory import AliveTensors, of_all_ranks
from parts.text import read_standard_library
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from train_hf import average_gradients, peak_bytes, positive

from parallel_plans.huggingface import (
    ContextParallelCache,
    context_parallel_plan,
    ring_checkpoint_contexts,
)
from parallel_plans.huggingface.core.versions import cache_name

MILLION = 2**20
PARTS = ("passkey", "step")
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-5, 1e-4
"""Largest relative differences of two numbers of ranks: sums of float32 in another order."""
BACKWARD = 2.5
"""Work of a backward pass over an attention, in units of its forward pass: 5 products, not 2."""
CPU = torch.device("cpu")


@dataclass
class Taught:
    """A training: its seconds, and the share of digits that were right at its end."""

    seconds: float
    right: float


@dataclass
class Found:
    """An answer to a prompt.

    Attributes:
        num_tokens: tokens of the prompt.
        answer: the generated tokens.
        seconds: of the prompt.
        milliseconds_per_token: of the tokens after it.
        cache_bytes: keys and values that each rank keeps.
        alive_bytes: of tensors of each rank, at most.
        resident_bytes: by which the memory of each process grew, at most.
    """

    num_tokens: int
    answer: list[int]
    seconds: float
    milliseconds_per_token: float
    cache_bytes: list[int]
    alive_bytes: list[int]
    resident_bytes: list[int]


@dataclass
class Step:
    """A training step: its seconds, and the bytes of each rank as those of `Found`."""

    num_tokens: int
    num_ranks: int
    loss: float
    gradient_norm: float
    seconds: float
    alive_bytes: list[int]
    resident_bytes: list[int]


class PairBar:
    """A bar in units of work: the pairs of query and key that attention has scored."""

    def __init__(self, title: str, total: float) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
        is_shown = not dist.is_initialized() or dist.get_rank() == 0
        self._progress = Progress(*columns, TimeElapsedColumn(), disable=not is_shown)
        self._task = self._progress.add_task(title, total=total)
        self._total, self._reached = total, 0.0

    def __enter__(self) -> PairBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def reach(self, pairs: float) -> None:
        """Show that so many are done; what is computed again is not done twice."""
        self._reached = min(self._total, max(self._reached, pairs))
        self._progress.update(self._task, completed=self._reached)


def main() -> None:
    options = parse_options()
    if dist.is_torchelastic_launched():
        work(options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    wrong = [text for part in PARTS if options.part in (part, "all") for text in RUN[part](options)]
    if wrong:
        sys.exit("; ".join(wrong))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", default="all", choices=("all", *PARTS))
    parser.add_argument("--world", type=positive, default=2, help="ranks, of one thread each")
    parser.add_argument("--other", type=positive, default=4, help="ranks of the step to compare")
    parser.add_argument("--tokens", type=positive, default=MILLION, help="of the sequence")
    parser.add_argument("--chunk", type=positive, default=131072, help="tokens of a prefill")
    parser.add_argument("--compared", type=positive, default=8192, help="tokens for one process")
    parser.add_argument("--depth", type=float, default=0.3, help="of the passkey, from 0 to 1")
    parser.add_argument("--seconds", type=float, default=600, help="of training, at most")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the results")
    options = parser.parse_args()
    if not 0 <= options.depth <= 1:
        parser.error(f"--depth must be from 0 to 1, got {options.depth}")
    return options


def run_passkey(options: argparse.Namespace) -> list[str]:
    """Train, ask one process and all ranks, show both; return what is wrong."""
    torch.set_num_threads(options.world)
    teach(options)
    stock = ask_stock(options)
    write(options, "stock", 1, [stock])
    launch(options, "passkey", options.world)
    short, long = (Found(**x) for x in read(options, "passkey", options.world))
    ranks = f"{options.world} ranks"
    show_found([("stock", stock), (ranks, short), (ranks, long)])
    hidden = draw_passkey(torch.Generator().manual_seed(1)).tolist()
    where = f"at {options.depth:.0%} of {options.tokens:,} tokens"
    Console().print(f"hidden {where}: {as_text(hidden)}, found: {as_text(long.answer)}")
    wrong = [] if stock.answer == short.answer else ["one process generates other tokens"]
    return wrong if hidden == long.answer else [*wrong, "the passkey was not found"]


def run_step(options: argparse.Namespace) -> list[str]:
    """Take the step on both numbers of ranks, and show them; return what differs."""
    steps = []
    for num_ranks in (options.world, options.other):
        launch(options, "step", num_ranks)
        steps += [Step(**x) for x in read(options, "step", num_ranks)]
    show_steps(steps)
    loss, norm = (
        abs(getattr(steps[1], name) / getattr(steps[0], name) - 1)
        for name in ("loss", "gradient_norm")
    )
    Console().print(f"relative differences: loss {loss:.1e}, norm of the gradients {norm:.1e}")
    wrong = [] if loss < LOSS_TOLERANCE else ["the losses differ"]
    return wrong if norm < NORM_TOLERANCE else [*wrong, "the gradients differ"]


RUN: dict[str, Callable[[argparse.Namespace], list[str]]]
RUN = {"passkey": run_passkey, "step": run_step}


def launch(options: argparse.Namespace, part: str, num_ranks: int) -> None:
    """Run a part on so many ranks under torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={num_ranks}", __file__, *sys.argv[1:], "--part", part]
    threads = {"OMP_NUM_THREADS": "1"}  # of a rank; without, torchrun warns
    status = subprocess.run(command, check=False, env=os.environ | threads).returncode
    if status:
        sys.exit(status)


def file_of(options: argparse.Namespace, part: str, num_ranks: int) -> Path:
    return options.out / f"{part}-{num_ranks}.json"


def write(options: argparse.Namespace, part: str, num_ranks: int, results: list[Any]) -> None:
    text = json.dumps([asdict(x) for x in results])
    file_of(options, part, num_ranks).write_text(text)


def read(options: argparse.Namespace, part: str, num_ranks: int) -> list[dict[str, Any]]:
    """What so many ranks have written."""
    return json.loads(file_of(options, part, num_ranks).read_text())


def work(options: argparse.Namespace) -> None:
    """One rank of a part."""
    dist.init_process_group("gloo", timeout=timedelta(hours=6))  # of a hop, beside much work
    run(options)
    # Python aborts if it ends while gloo's threads let go of the last gradients.
    time.sleep(0.2)
    dist.destroy_process_group()


def run(options: argparse.Namespace) -> None:
    """Run a part on the ranks of the default group; rank 0 writes what came of it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    if options.part == "step":
        results: list[Any] = [train_step(options, mesh)]
    else:
        lengths = options.compared, options.tokens
        results = [ask_ranks(options, num_tokens, mesh) for num_tokens in lengths]
    if dist.get_rank() == 0:
        write(options, options.part, mesh.size(), results)


def teach(options: argparse.Namespace) -> None:
    """Write the checkpoint of a model that finds passkeys, unless there is one."""
    if checkpoint(options).exists():
        return
    model, begin = passkey_model(MILLION), time.monotonic()
    # No text of a prompt.
    right = learn(model, read_standard_library()[options.tokens :], options.seconds)
    torch.save(model.state_dict(), checkpoint(options))
    taught = Taught(time.monotonic() - begin, right)
    write(options, "taught", 1, [taught])
    Console().print(f"after {taught.seconds:.0f} s of training {right:.0%} of the digits are right")


def checkpoint(options: argparse.Namespace) -> Path:
    return options.out / "million.pt"


def trained_model(options: argparse.Namespace, num_tokens: int) -> Any:
    model = passkey_model(num_tokens).eval()
    model.load_state_dict(torch.load(checkpoint(options)))
    sharpen(model, num_tokens)
    return model


def prompt_of(options: argparse.Namespace, num_tokens: int) -> Tensor:
    """A prompt `(1, S)` of the first text of all, which nobody has trained on."""
    text = read_standard_library()[:num_tokens]
    return hide(text, draw_passkey(torch.Generator().manual_seed(1)), options.depth).unsqueeze(0)


def ask_stock(options: argparse.Namespace) -> Found:
    """The answer of transformers in one process, to a prompt that it has the memory for."""
    from transformers import DynamicCache

    model = trained_model(options, options.compared)
    cache, before = DynamicCache(config=model.config), peak_bytes(CPU)
    with AliveTensors() as alive:
        title = f"{options.compared:,} tokens, stock transformers"
        answer, *times = generate(model, cache, prompt_of(options, options.compared), title)
    pairs = ((layer.keys, layer.values) for layer in cache.layers)
    held = sum(x.numel() * x.itemsize for pair in pairs for x in pair)
    grown = peak_bytes(CPU) - before
    return Found(options.compared, answer, *times, [held], [alive.peak], [grown])


def ask_ranks(options: argparse.Namespace, num_tokens: int, mesh: DeviceMesh) -> Found:
    """The answer of all ranks, whose keys and values are sharded."""
    model = trained_model(options, num_tokens)
    model = parallelize_module(model, mesh, context_parallel_plan(model, "zigzag"))
    cache, before = ContextParallelCache(model), peak_bytes(CPU)
    with AliveTensors() as alive:
        prompt, title = (
            prompt_of(options, num_tokens),
            f"{num_tokens:,} tokens, {mesh.size()} ranks",
        )
        chunk = min(options.chunk, math.ceil(num_tokens / 4))
        answer, *times = generate(model, cache, prompt, title, prefill_chunk_size=chunk)
    memory = list(cache.usage().held), of_all_ranks(alive.peak)
    return Found(num_tokens, answer, *times, *memory, of_all_ranks(peak_bytes(CPU) - before))


def generate(
    model: Any, cache: Any, prompt: Tensor, title: str, **how: int
) -> tuple[list[int], float, float]:
    """Greedy tokens, seconds of the prompt, and milliseconds of each token after it."""
    num_tokens, times = prompt.shape[1], [time.perf_counter()]
    with PairBar(title, num_tokens**2 / 2) as bar:

        def ran(*_: Any) -> None:
            times.append(time.perf_counter())
            bar.reach(cache.get_seq_length() ** 2 / 2)

        hook = model.register_forward_hook(ran)
        how |= {cache_name(model): cache, "max_new_tokens": NUM_DIGITS}
        asked = {"attention_mask": torch.ones_like(prompt), "do_sample": False}
        answer = model.generate(prompt, **asked, **how)[0, num_tokens:].tolist()
        hook.remove()
    first, last = times[-len(answer)], times[-1]  # after the prompt, and after the last token
    return answer, first - times[0], 1000 * (last - first) / (len(answer) - 1)


def train_step(options: argparse.Namespace, mesh: DeviceMesh) -> Step:
    """Forward and backward over the text, from random weights."""
    model = passkey_model(options.tokens)
    # Attention is not computed again in backward, all else is.
    model.activation_checkpointing_enable(
        {"use_reentrant": False, "context_fn": ring_checkpoint_contexts}
    )
    model = parallelize_module(model, mesh, context_parallel_plan(model, "zigzag"))
    tokens = read_standard_library()[: options.tokens].long().unsqueeze(0)
    title = f"a step on {options.tokens:,} tokens, {mesh.size()} ranks"
    before, begin = peak_bytes(CPU), time.perf_counter()
    with PairBar(title, (1 + BACKWARD) * sum(pairs_of_layers(model, options.tokens))) as bar:
        watch(model, bar, options.tokens)
        with AliveTensors() as alive:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            average_gradients(model)
        bar.reach(math.inf)
    seconds = time.perf_counter() - begin
    norm = torch.stack([x.grad.norm() for x in model.parameters()]).norm().item()
    memory = of_all_ranks(alive.peak), of_all_ranks(peak_bytes(CPU) - before)
    return Step(options.tokens, mesh.size(), loss.item(), norm, seconds, *memory)


def pairs_of_layers(model: Any, num_tokens: int) -> list[float]:
    """Pairs of query and key in each layer."""
    windows = [layer.self_attn.sliding_window or num_tokens for layer in model.model.layers]
    return [num_tokens * x - x * x / 2 for x in (min(x, num_tokens) for x in windows)]


def watch(model: Any, bar: PairBar, num_tokens: int) -> None:
    """Let each layer tell the bar when it has run, and when its gradient has come."""
    pairs = pairs_of_layers(model, num_tokens)

    def tell(number: int) -> Callable[..., None]:
        before, after = sum(pairs[: number + 1]), sum(pairs[number + 1 :])

        def ran(module: Any, args: Any, output: Tensor) -> None:
            bar.reach(before)
            if output.requires_grad:
                output.register_hook(lambda _: bar.reach(sum(pairs) + BACKWARD * after))

        return ran

    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(tell(number))


def show_found(runs: list[tuple[str, Found]]) -> None:
    """The answers one below the other."""
    table = Table(title=f"What follows {QUESTION[1:].decode()!r}")
    table.add_column("run", no_wrap=True)
    for column in ("tokens", "answer", "tokens/s", "s", "ms/token", "cache", "tensors", "process"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, run in runs:
        speed = f"{run.num_tokens / run.seconds:,.0f}"
        times = speed, f"{run.seconds:.1f}", f"{run.milliseconds_per_token:.0f}"
        memory = map(mebibytes, (run.cache_bytes, run.alive_bytes, run.resident_bytes))
        table.add_row(name, f"{run.num_tokens:,}", as_text(run.answer), *times, *memory)
    Console().print(table)


def show_steps(steps: list[Step]) -> None:
    """The steps one below the other."""
    table = Table(title=f"A training step on {steps[0].num_tokens:,} tokens")
    for column in ("ranks", "loss", "gradients", "tokens/s", "s", "tensors", "process"):
        table.add_column(column, justify="right", no_wrap=True)
    for step in steps:
        results = f"{step.loss:.7f}", f"{step.gradient_norm:.6f}"
        times = f"{step.num_tokens / step.seconds:,.0f}", f"{step.seconds:.1f}"
        memory = map(mebibytes, (step.alive_bytes, step.resident_bytes))
        table.add_row(str(step.num_ranks), *results, *times, *memory)
    Console().print(table)


def as_text(tokens: list[int]) -> str:
    """Bytes as text; what is no printable ASCII is escaped."""
    return ascii(bytes(tokens).decode("latin-1"))[1:-1]


def mebibytes(num_bytes: list[int]) -> str:
    """Of the rank that has most."""
    return f"{max(num_bytes) / 2**20:,.1f} MiB"


if __name__ == "__main__":
    main()
