"""Measure `generate_batch` over a sharded pool on CPUs, against stock transformers.

Run ``python benchmarks/serving.py``: it starts its processes itself, prints a table, and writes it
with every single time to ``benchmarks/results``. With ``--quick`` requests are few and short, and
the results go to ``out``. One process has two threads, and each of two ranks has one. Leave the
machine alone meanwhile.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import is_quick, origin, publish, spawn, table_of
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from transformers import ContinuousBatchingConfig, LlamaConfig, LlamaForCausalLM

from parallel_plans.huggingface import context_parallel_plan

WORLD_SIZE, BLOCK = 2, 64
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""A model whose time is that of the host."""
LOOP, STOCK, ONE, TWO = "loop of generate", "transformers", "ours, 1 rank", "ours, 2 ranks"


@dataclass(frozen=True)
class Case:
    """Requests at once, tokens of their prompts, and of what follows; a part may be shared."""

    requests: int
    prompt_len: int
    shared: int
    new: int
    repeats: int
    tiny: bool = False


@dataclass(frozen=True)
class Measurement:
    """Seconds for all requests and bytes of a rank's pool, by contender; steps of ours."""

    case: Case
    seconds: dict[str, list[float]] = field(default_factory=dict)
    pool_bytes: dict[str, int] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)


def cases(quick: bool) -> list[Case]:
    if quick:
        return [Case(4, 64, 32, 4, 1)]
    small = Case(16, 16, 0, 32, 2, tiny=True)
    return [Case(16, 256, 0, 32, 3), Case(16, 2048, 1920, 32, 1), small]


def model_of(case: Case) -> Any:
    torch.manual_seed(0)
    sizes = TINY if case.tiny else SIZES
    config = LlamaConfig(vocab_size=1024, eos_token_id=None, pad_token_id=0, **sizes)
    return LlamaForCausalLM(config).eval()


def prompts_of(case: Case) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(1024, (case.shared,), generator=generator).tolist()
    shape = case.requests, case.prompt_len - case.shared
    return [shared + x for x in torch.randint(1024, shape, generator=generator).tolist()]


def options(case: Case) -> Any:
    """Room for all requests, and as many tokens in a step as they like."""
    blocks = case.requests * -(-(case.prompt_len + case.new) // BLOCK)
    return ContinuousBatchingConfig(
        page_size=BLOCK, num_blocks=blocks, max_requests_per_batch=64, max_batch_tokens=2048
    )


def one_by_one(case: Case, model: Any) -> list[list[int]]:
    found = []
    for prompt in prompts_of(case):
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=case.new)
        found.append(out[0, len(prompt) :].tolist())
    return found


def generated(case: Case, model: Any) -> list[list[int]]:
    outputs = model.generate_batch(
        prompts_of(case),
        continuous_batching_config=options(case),
        max_new_tokens=case.new,
    )
    return [outputs[x].generated_tokens for x in outputs]


def at_once(case: Case, model: Any, result: Measurement, name: str) -> list[list[int]]:
    if name == STOCK:
        return generated(case, model)
    batch = model.init_continuous_batching(None, options(case))
    ids = batch.add_requests(prompts_of(case), max_new_tokens=case.new)
    outputs = {x.request_id: x.generated_tokens for x in batch}
    used = batch.pool.usage()
    result.pool_bytes[name] = batch.num_bytes * max(used.cached) // used.num_blocks
    result.steps[name] = batch.counts.steps
    return [outputs[x] for x in ids]


def contenders(case: Case, mesh: DeviceMesh) -> dict[str, tuple[Any, Callable[..., Any], int]]:
    """By name: a model, what to call, and the threads of a process."""
    alone = init_device_mesh("cpu", (WORLD_SIZE, 1), mesh_dim_names=("ranks", "cp"))["cp"]
    made = {}
    for name, axis in ((ONE, alone), (TWO, mesh)):
        model = model_of(case)
        made[name] = parallelize_module(model, axis, context_parallel_plan(model))
    return {
        LOOP: (model_of(case), lambda case, model, *_: one_by_one(case, model), WORLD_SIZE),
        STOCK: (model_of(case), at_once, WORLD_SIZE),
        ONE: (made[ONE], at_once, WORLD_SIZE),
        TWO: (made[TWO], at_once, 1),
    }


def measure(case: Case, mesh: DeviceMesh) -> Measurement:
    """Contenders in turns; the second rank waits while one process is measured."""
    result, parts = Measurement(case), contenders(case, mesh)
    for _ in range(case.repeats):
        found = {}
        for name, (model, call, threads) in parts.items():
            dist.barrier()
            if name != TWO and mesh.get_local_rank():
                continue
            torch.set_num_threads(threads)
            begin = time.perf_counter()
            found[name] = call(case, model, result, name)
            result.seconds.setdefault(name, []).append(time.perf_counter() - begin)
        same = [tokens == found[TWO] for tokens in found.values()]
        assert all(same), f"tokens differ: {dict(zip(found, same, strict=True))}"
    return result


def report(console: Console, measurements: list[Measurement]) -> None:
    """Print what was measured, in Markdown."""
    console.print(
        f"\nLlamas of 4 layers, float32, greedy; blocks of {BLOCK} tokens. One process of "
        f"{WORLD_SIZE} threads, or {WORLD_SIZE} ranks of one; medians. All give the same tokens.\n"
    )
    names = "new tokens/s", "times the loop", "pool of a rank, MiB", "ms a step", "a request, us"
    table = table_of(("requests", "by"), names)
    for m in measurements:
        case = m.case
        what = f"{case.requests} of {case.prompt_len:,}"
        what += f", {case.shared:,} shared" * bool(case.shared) + ", tiny model" * case.tiny
        loop = median(m.seconds[LOOP])
        for name, times in m.seconds.items():
            seconds = median(times)
            cells = [f"{case.requests * case.new / seconds:.1f}", f"{loop / seconds:.2f}"]
            if name in m.steps:
                step = 1e3 * seconds / m.steps[name]
                cells.append(f"{m.pool_bytes[name] / 2**20:.1f}")
                cells += [f"{step:.2f}", f"{1e3 * step / case.requests:.0f}"]
            table.add_row(what, name, *cells)
    console.print(table)


def main() -> None:
    quick = is_quick(__doc__)
    about = origin()
    results = spawn(WORLD_SIZE, measure, cases(quick))
    measurements = [Measurement(**(r | {"case": Case(**r["case"])})) for r in results]
    measured = {"measurements": [asdict(m) for m in measurements]}
    show = partial(report, measurements=measurements)
    publish("serving", "Many requests at once on CPUs", quick, about, measured, show)


if __name__ == "__main__":
    main()
