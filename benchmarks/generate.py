"""Measure generation of a Hugging Face model over two ranks on CPUs, against one process.

Run ``python benchmarks/generate.py``: it starts its processes itself, prints a table, and writes it
with every single time to ``benchmarks/results``. With ``--quick`` prompts are short, and the
results go to ``out``. One process has one thread, and so has each rank. Leave the machine alone
meanwhile.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import is_quick, origin, publish, spawn, table_of
from rich.console import Console
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from parallel_plans.huggingface import ContextParallelCache, context_parallel_plan
from parallel_plans.huggingface.core.versions import cache_name

WORLD_SIZE = 2
HEADS, KEY_HEADS, HEAD_DIM, LAYERS = 16, 8, 64, 2
STEPS = 20
"""Tokens that are decoded after each prompt."""


@dataclass(frozen=True)
class Case:
    """Tokens of the prompt, and how often it is read."""

    prompt_len: int
    repeats: int


@dataclass(frozen=True)
class Measurement:
    """Seconds to the first token, seconds of each step, and bytes of the cache, by contender."""

    case: Case
    first: dict[str, list[float]] = field(default_factory=dict)
    steps: dict[str, list[float]] = field(default_factory=dict)
    cache_bytes: dict[str, int] = field(default_factory=dict)


def cases(quick: bool) -> list[Case]:
    return [Case(512, 2)] if quick else [Case(16384, 3), Case(32768, 1)]


def model_of(prompt_len: int) -> Any:
    """A Llama whose time is that of attention."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=prompt_len + STEPS + 1,
    )
    return LlamaForCausalLM(config).eval()


def generate(model: Any, cache: Any, prompt: Tensor) -> tuple[list[int], float, list[float]]:
    """Greedy tokens, seconds to the first one, and seconds of each other one."""
    tokens, times, given = [], [time.perf_counter()], prompt
    for _ in range(STEPS + 1):
        output = model(input_ids=given, logits_to_keep=1, **{cache_name(model): cache})
        given = output.logits[:, -1:].argmax(-1)
        tokens.append(int(given))
        times.append(time.perf_counter())
    seconds = [end - begin for begin, end in pairwise(times)]
    return tokens, seconds[0], seconds[1:]


def stock_bytes(cache: DynamicCache) -> int:
    pairs = ((layer.keys, layer.values) for layer in cache.layers)
    return sum(x.numel() * x.itemsize for pair in pairs for x in pair)


def measure(case: Case, mesh: DeviceMesh) -> Measurement:
    """One process, while the others wait, then all; they must generate the same tokens."""
    result = Measurement(case)
    prompt = torch.randint(256, (1, case.prompt_len), generator=torch.Generator().manual_seed(0))
    stock, ours = model_of(case.prompt_len), model_of(case.prompt_len)
    plan = context_parallel_plan(ours)
    ours = parallelize_module(ours, mesh, plan)
    makers: dict[str, tuple[Any, Callable[[], Any]]] = {
        "1 process": (stock, lambda: DynamicCache(config=stock.config)),
        "2 ranks": (ours, lambda: ContextParallelCache(ours)),
    }
    for _ in range(case.repeats):
        found = {}
        for name, (model, make) in makers.items():
            dist.barrier()
            if name == "1 process" and mesh.get_local_rank():
                continue
            cache = make()
            found[name], first, steps = generate(model, cache, prompt)
            result.first.setdefault(name, []).append(first)
            result.steps.setdefault(name, []).extend(steps)
            is_stock = isinstance(cache, DynamicCache)
            held = stock_bytes(cache) if is_stock else max(cache.usage().held)
            result.cache_bytes[name] = held
        assert len({tuple(tokens) for tokens in found.values()}) == 1, f"{found} differ"
    return result


def report(console: Console, measurements: list[Measurement]) -> None:
    """Print what was measured, in Markdown."""
    console.print(
        f"\nA Llama of {LAYERS} layers of {HEADS} and {KEY_HEADS} heads of {HEAD_DIM}, float32, "
        f"greedy, {STEPS} steps after each prompt.\nOne process of one thread against "
        f"{WORLD_SIZE} ranks of one thread; medians. Both generate the same tokens.\n"
    )
    table = table_of(("prompt", "what"), ("1 process", "2 ranks", "ratio"))
    for m in measurements:
        rows = [("first token, s", m.first, 1.0), ("step, ms", m.steps, 1e3)]
        for what, seconds, unit in rows:
            alone, both = (unit * median(seconds[name]) for name in ("1 process", "2 ranks"))
            cells = [f"{alone:.2f}", f"{both:.2f}", f"{both / alone:.3f}"]
            table.add_row(f"{m.case.prompt_len:,}", what, *cells)
        alone, both = (m.cache_bytes[name] / 2**20 for name in ("1 process", "2 ranks"))
        cells = [f"{alone:.1f}", f"{both:.1f}", f"{both / alone:.3f}"]
        table.add_row(f"{m.case.prompt_len:,}", "cache of a rank, MiB", *cells)
    console.print(table)


def main() -> None:
    quick = is_quick(__doc__)
    about = origin()
    results = spawn(WORLD_SIZE, measure, cases(quick), bind=True)
    measurements = [Measurement(**(r | {"case": Case(**r["case"])})) for r in results]
    measured = {"measurements": [asdict(m) for m in measurements]}
    show = partial(report, measurements=measurements)
    publish("generate", "Generation over ranks on CPUs", quick, about, measured, show)


if __name__ == "__main__":
    main()
