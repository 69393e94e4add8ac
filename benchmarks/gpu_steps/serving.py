"""How fast a model serves requests at once, next to a loop of `generate` and to transformers."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.distributed.tensor.parallel import parallelize_module

from gpu_steps.machine import Finding, Machine

CASES = ((16, 256, 0, 32, 1), (16, 2048, 1920, 32, 1))
DRY = ((2, 16, 8, 2, 1, True),)
"""Arguments of `serving.Case`, whose module needs transformers."""
SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
"""Those of Llama 3.2 1B."""
LOOP = "a loop of generate"
AIM = 3.0
"""Times the tokens per second of the loop."""

Way = Callable[[Any], list[list[int]]]
"""Returns the new tokens of each request."""


def serving(machine: Machine) -> Iterator[Finding]:
    """Weights are random, so tokens of 16 bits are not compared: the step `inference` does that."""
    from parallel_plans.tested import too_old

    if reason := too_old("transformers"):
        yield Finding("16 requests at once", f"left out: {reason}")
        return
    from serving import Case, generated, one_by_one

    from parallel_plans.huggingface import context_parallel_plan

    with machine.connected() as mesh:
        stock, planned = _model(machine), _model(machine)
        planned = parallelize_module(planned, mesh, context_parallel_plan(planned))
        ways: dict[str, Way] = {
            LOOP: partial(one_by_one, model=stock),
            "transformers' generate_batch": partial(generated, model=stock),
            "ours": partial(generated, model=planned),
        }
        for sizes in DRY if machine.is_dry else CASES:
            yield from _case(Case(*sizes), ways)


def _case(case: Any, ways: dict[str, Way]) -> Iterator[Finding]:
    loop, new = None, case.requests * case.new
    shared = f", {case.shared:,} shared" * bool(case.shared)
    what = f"{case.requests} requests of {case.prompt_len:,} tokens{shared}, {case.new} new, "
    for name, way in ways.items():
        try:
            seconds = _seconds(partial(way, case), case.repeats, new)
        except Exception as error:  # the other ways are still worth a row
            problem = f"{type(error).__name__}: {error}"[-300:]
            yield Finding(what + name, problem, is_wrong=name == "ours")
            continue
        loop = seconds if name == LOOP else loop
        times = loop / seconds if loop else None  # the loop may have failed
        aim = f"{AIM:.0f} times the loop" if name == "ours" and times and times < AIM else ""
        beside = f", {times:.2f} times the loop" if times else ""
        yield Finding(what + name, f"{new / seconds:.0f} tokens/s{beside}", aim)


def _seconds(run: Callable[[], list[list[int]]], repeats: int, new: int) -> float:
    """The median, after one run to warm up; each run must give so many new tokens."""
    times = []
    for _ in range(1 + repeats):
        begin = time.perf_counter()
        found = sum(map(len, run()))  # ends with tokens on the host
        assert found == new, f"{found} new tokens in place of {new}"
        times.append(time.perf_counter() - begin)
    return median(times[1:])


def _model(machine: Machine) -> Any:
    from serving import TINY

    return llama(machine, TINY if machine.is_dry else SIZES)


def llama(machine: Machine, sizes: dict[str, int]) -> Any:
    """A Llama of these sizes, always with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    how = {"eos_token_id": None, "pad_token_id": 0, "dtype": machine.dtype}
    with torch.device(machine.device):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=1024, **sizes, **how))
    return model.to(machine.dtype).eval()
