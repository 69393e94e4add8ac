"""Measure `generate_batch` over a sharded pool on CPUs.

Run ``python benchmarks/serving.py``: it starts its processes itself, prints tables, and writes them
with every single time to ``benchmarks/results``, a card for each section: `requests` is many
requests at once against stock transformers, `drafts` several tokens of a request in a step against
one. Name sections to run only these. With ``--quick`` requests are few and short, and the results
go to ``out``. One process has two threads, and each of two ranks has one. Leave the machine alone
meanwhile.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import origin, publish, spawn, table_of
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
    long = Case(16, 8392, 8192, 32, 1)
    return [Case(16, 256, 0, 32, 3), Case(16, 2048, 1920, 32, 1), long, small]


def model_of(case: "Case | DraftCase") -> Any:
    torch.manual_seed(0)
    sizes = TINY if case.tiny else SIZES
    config = LlamaConfig(vocab_size=1024, eos_token_id=None, pad_token_id=0, **sizes)
    return LlamaForCausalLM(config).eval()


def prompts_of(case: "Case | DraftCase") -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(1024, (case.shared,), generator=generator).tolist()
    shape = case.requests, case.prompt_len - case.shared
    return [shared + x for x in torch.randint(1024, shape, generator=generator).tolist()]


def options(case: "Case | DraftCase") -> Any:
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


PLAIN, DRAFTED = "a token of a request a step", "drafts"
RIGHT = 0.7
"""How often a proposed token is right, given that those before it are."""


@dataclass(frozen=True)
class DraftCase:
    """Requests at once, tokens of their prompts, of what follows, and of a draft."""

    requests: int
    prompt_len: int
    new: int
    draft: int
    repeats: int
    tiny: bool = False
    shared: int = 0


@dataclass(frozen=True)
class DraftMeasurement:
    """Seconds for all requests by contender, those of the first rank's CPU, and what steps did."""

    case: DraftCase
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu_seconds: dict[str, list[float]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    proposed: int = 0
    accepted: int = 0


def draft_cases(quick: bool) -> list[DraftCase]:
    if quick:
        return [DraftCase(2, 32, 12, 4, 1, tiny=True)]
    tiny = DraftCase(16, 64, 64, 6, 5, tiny=True)
    pairs = (1, 4), (1, 6), (4, 3), (4, 6), (16, 2), (16, 6)
    return [tiny, *(DraftCase(requests, 64, 64, draft, 3) for requests, draft in pairs)]


class Guesses:
    """An assistant that knows what follows, and tells it wrong so often; it costs next to nothing.

    Args:
        known: the tokens of all requests, with what follows.
        prompt_len: tokens of a prompt, by which a request is known.
    """

    def __init__(self, known: Sequence[Sequence[int]], prompt_len: int) -> None:
        self._known = {tuple(x[:prompt_len]): x for x in known}
        self._prompt_len = prompt_len

    def __call__(
        self, sequences: Sequence[Sequence[int]], counts: Sequence[int]
    ) -> list[list[int]]:
        return [self._guess(*pair) for pair in zip(sequences, counts, strict=True)]

    def _guess(self, tokens: Sequence[int], count: int) -> list[int]:
        prompt = tuple(tokens[: self._prompt_len])
        follows = self._known[prompt][len(tokens) : len(tokens) + count]
        draw = random.Random(f"{prompt[:4]} {len(tokens)}")  # the same on all ranks
        return [x if draw.random() < RIGHT else (x + 1) % 1024 for x in follows]


def drafted(case: DraftCase, model: Any, **how: Any) -> tuple[list[list[int]], Any]:
    """The tokens of all requests, and the counts."""
    batch = model.init_continuous_batching(None, options(case))
    ids = batch.add_requests(prompts_of(case), max_new_tokens=case.new, **how)
    outputs = {x.request_id: x.generated_tokens for x in batch}
    return [outputs[x] for x in ids], batch.counts


def measure_drafts(case: DraftCase, mesh: DeviceMesh) -> DraftMeasurement:
    """With drafts and without in turns, on all ranks."""
    model = model_of(case)
    model = parallelize_module(model, mesh, context_parallel_plan(model))
    expected, _ = drafted(case, model)
    known = [x + y for x, y in zip(prompts_of(case), expected, strict=True)]
    guesses = Guesses(known, case.prompt_len)
    ways = {PLAIN: {}, DRAFTED: {"assistant_model": guesses, "num_assistant_tokens": case.draft}}
    result, counts = DraftMeasurement(case), drafted(case, model, **ways[DRAFTED])[1]
    for _ in range(case.repeats):
        for name, how in ways.items():
            dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            tokens, counts = drafted(case, model, **how)
            result.seconds.setdefault(name, []).append(time.perf_counter() - begin)
            result.cpu_seconds.setdefault(name, []).append(time.process_time() - cpu)
            assert tokens == expected, f"{name}: other tokens"
            result.steps[name] = counts.steps
    return replace(result, proposed=counts.proposed, accepted=counts.accepted)


def report_drafts(console: Console, measurements: list[DraftMeasurement]) -> None:
    """Print what was measured, in Markdown."""
    console.print(
        f"\nLlamas of 4 layers, float32, greedy; {WORLD_SIZE} ranks of one thread, blocks of "
        f"{BLOCK} tokens;\nmedians. A function proposes tokens, each of which is right with "
        f"probability {RIGHT} if those\nbefore it are: it costs next to nothing. The times include "
        "prompts. All give the same tokens.\n"
    )
    names = "new tokens/s", "times", "of CPU time", "right of proposed", "steps", "ms a step"
    table = table_of(("requests", "by"), names)
    for m in measurements:
        case = m.case
        what = f"{case.requests} of {case.prompt_len}, {case.new} new" + ", tiny model" * case.tiny
        for name, times in m.seconds.items():
            by, cells = f"drafts of {case.draft}", [f"{m.accepted:,} of {m.proposed:,}"]
            if name == PLAIN:
                by, cells = name, [""]
            ratios = (f"{_ratio(x, name):.2f}" for x in (m.seconds, m.cpu_seconds))
            seconds, steps = median(times), m.steps[name]
            cells += [f"{steps}", f"{1e3 * seconds / steps:.2f}"]
            table.add_row(what, by, f"{case.requests * case.new / seconds:.1f}", *ratios, *cells)
    console.print(table)


def _ratio(seconds: dict[str, list[float]], name: str) -> float:
    """How many times faster than without drafts: the median of neighbouring times."""
    pairs = zip(seconds[PLAIN], seconds[name], strict=True)
    return median(plain / other for plain, other in pairs)


def requests(quick: bool, about: dict[str, str]) -> None:
    """Run the section of many requests at once."""
    results = spawn(WORLD_SIZE, measure, cases(quick))
    measurements = [Measurement(**(r | {"case": Case(**r["case"])})) for r in results]
    measured = {"measurements": [asdict(m) for m in measurements]}
    show = partial(report, measurements=measurements)
    publish("serving", "Many requests at once on CPUs", quick, about, measured, show)


def drafts(quick: bool, about: dict[str, str]) -> None:
    """Run the section of several tokens of a request in a step."""
    results = spawn(WORLD_SIZE, measure_drafts, draft_cases(quick))
    measurements = [DraftMeasurement(**(r | {"case": DraftCase(**r["case"])})) for r in results]
    measured = {"measurements": [asdict(m) for m in measurements]}
    show = partial(report_drafts, measurements=measurements)
    publish("serving_drafts", "Several tokens of a request in a step", quick, about, measured, show)


SECTIONS = {"requests": requests, "drafts": drafts}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="take less than a minute")
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), help=", ".join(SECTIONS))
    given = parser.parse_args()
    about = origin()
    for name in given.sections:
        SECTIONS[name](given.quick, about)


if __name__ == "__main__":
    main()
