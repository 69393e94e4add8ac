"""Runs a program on the ranks and on the stock model in one process, and says what came of it."""

from __future__ import annotations

import linecache
import logging
import re
import shutil
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from dtensor_ring.dtensor.annotation import tokens_of
from tests.border.programs import Program, Step
from tests.border.trying import HINTS, differs, made_whole, said
from tests.pool import Pool, RankError

RIGHT, REFUSED, AS_STOCK = "right", "refused", "raises as stock"
SILENT, RAW, SOME, HANGS = "silent", "raw error", "error on some ranks", "hangs or dies"
GOOD = (RIGHT, REFUSED, AS_STOCK)
OURS = "/dtensor_ring/", "/parallel_plans/"
SECONDS, COMPILING = 60, 300
"""A program takes less than one, unless it compiles."""
Tolerances = dict[torch.dtype, float]
TOLERANCE: Tolerances = {torch.float64: 1e-5, torch.float32: 5e-4}
"""Of the largest number."""
AFTER_STEP: Tolerances = {torch.float64: 1e-4, torch.float32: 5e-4}
"""Norms of transformers round doubles to float32, which a step of an optimizer may enlarge."""
NOISE = {torch.float64: 1e-9, torch.float32: 5e-6}
"""Where all numbers are small."""
ROUNDED: Tolerances = {}
LOW = 6e-2
"""After something was rounded to bfloat16, whatever the dtype."""
OF_PLANS = re.compile(r"\.full_tensor\(\)|\.redistribute\(.*?\]\)|, output_logits=True")
"""What the stock model's lines are without."""


@dataclass(frozen=True)
class Fate:
    """What came of a program.

    Attributes:
        verdict: one of those above.
        step: number of the step where it ended.
        said: what is wrong, or what the error said.
    """

    verdict: str
    step: int
    said: str = ""

    @property
    def is_good(self) -> bool:
        return self.verdict in GOOD


def fate_of(pool: Pool, program: Program, run: Callable[..., Fate], *args: Any) -> Fate:
    """What came of a program on all its ranks, by `run(program, *args)`."""
    timeout = COMPILING if "torch.compile" in str(program) else SECONDS
    try:
        fates = pool.run(program.ranks, run, program, *args, timeout=timeout)
    except RankError as error:
        return Fate(HANGS, -1, str(error))
    if len({(fate.verdict, fate.step) for fate in fates}) == 1:
        return fates[0]
    ends = [f"rank {i}: {x.verdict} at step {x.step}: {x.said}" for i, x in enumerate(fates)]
    return Fate(SOME, min(x.step for x in fates), "\n".join(ends))


def run_program(program: Program, **changed: Any) -> Fate:
    """What came of a program on this rank; its names may be changed."""
    ours, stock = names_of_both(program)
    with quiet():
        try:
            return _followed(program, ours | changed, stock)
        finally:
            for folder in ours["folders"]:
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def quiet() -> Iterator[None]:
    """What libraries tell users is not for who reads a thousand programs."""
    says, level = transformers.logging, transformers.logging.get_verbosity()
    warnings.simplefilter("ignore")  # until the run ends
    says.set_verbosity_error()
    says.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        says.enable_progress_bar()
        says.set_verbosity(level)


def _followed(program: Program, ours: dict[str, Any], stock: dict[str, Any]) -> Fate:
    """What came of the steps, by the names under a plan and those of the stock model."""
    tolerances = TOLERANCE
    for number, step in enumerate(program.steps):
        if "bfloat16" in step.code:
            tolerances = ROUNDED
        elif "optimizer.step()" in step.code:
            tolerances = tolerances and AFTER_STEP
        code = OF_PLANS.sub("", step.code)
        verdict, text = _judged(_ran(exec, step.code, ours), _ran(exec, code, stock), tolerances)
        for expression in step.compares:
            if verdict == RIGHT:
                values = (_ran(eval, expression, names) for names in (ours, stock))
                verdict, text = _judged(*values, tolerances)
                text = f"{expression}: {text}"
        if verdict == RAW and _raises(program.steps[number + 1 :], stock, text):
            verdict = AS_STOCK
        if verdict != RIGHT:
            return Fate(verdict, number, text)
    return Fate(RIGHT, len(program.steps))


def _raises(steps: Sequence[Step], stock: dict[str, Any], text: str) -> bool:
    """Whether later steps raise this error on the stock model, too: a plan runs a model earlier."""
    for step in steps:
        found = _ran(exec, OF_PLANS.sub("", step.code), stock)
        if isinstance(found, Exception):
            return "".join(traceback.format_exception_only(found)) in text
    return False


def names_of_both(program: Program) -> tuple[dict[str, Any], dict[str, Any]]:
    """The names that the lines of a program use, under a plan and on the stock model."""
    ours: dict[str, Any] = {"__name__": "program"}
    exec(program.preamble, ours)
    ours |= {"whole": _whole, "at": at, "gradients": gradients, "weights": weights}
    nothing = {
        "parallelize_module": lambda model, mesh, plan: model,
        "context_parallel_plan": lambda model, *args, **options: None,
        "restore_model": lambda model: model,
        "stock_model": nullcontext,
        "average": lambda model: None,
        "shard_weights": lambda model: None,
        "shard_sequence": lambda x, mesh, dim: x,
        "unshard_sequence": lambda x, dim: x,
        "DistributedDataParallel": lambda model: model,
        "ContextParallelCache": lambda model: transformers.DynamicCache(config=model.config),
    }
    return ours, ours | nothing


def _whole(value: Any) -> Any:
    return tree_map_only(
        DTensor, lambda x: made_whole(x) if has_tokens(x) else x.full_tensor(), value
    )


def has_tokens(x: DTensor) -> bool:
    """Whether it is a sequence, and no weight that FSDP shards."""
    return tokens_of(x.device_mesh) is not None


def at(value: Any, mask: Tensor) -> Tensor:
    """The numbers `(B, S, ...)` of tokens that count, and else zeros."""
    return torch.where(mask[..., None] > 0, _whole(value), 0.0)


def gradients(model: nn.Module) -> list[Tensor]:
    """Of all weights, zero where there is none."""
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in model.parameters()]


def weights(model: nn.Module) -> list[Tensor]:
    """All weights and buffers."""
    return [*model.parameters(), *model.buffers()]


def _ran(run: Callable[..., Any], code: str, names: dict[str, Any]) -> Any:
    """The value of lines that run, whole, or the error that they raise."""
    try:
        return _whole(run(code, names))
    except Exception as error:
        return error


def _judged(found: Any, expected: Any, tolerances: Tolerances) -> tuple[str, str]:
    """The verdict on what lines gave, and why, by what they give on the stock model."""
    if isinstance(expected, Exception):
        raises = f"stock raises {type(expected).__name__}: {said(expected)}"
        return (AS_STOCK if isinstance(found, Exception) else SILENT), raises
    if isinstance(found, Exception):
        if is_refusal(found):
            return REFUSED, said(found)
        return RAW, "".join(traceback.format_exception(found))
    wrong = _differs(found, expected, tolerances)
    return (SILENT, wrong) if wrong else (RIGHT, "")


def is_refusal(error: Exception) -> bool:
    """Whether an error is raised by this package, or says what to write instead."""
    if HINTS.search(said(error)):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    file, line = frames[-1].filename, linecache.getline(frames[-1].filename, frames[-1].lineno or 0)
    is_meant = line.lstrip().startswith("raise") and any(x in file for x in OURS)
    return is_meant and bool(str(error))


def _differs(found: Any, expected: Any, tolerances: Tolerances) -> str:
    """In what two values differ beyond rounding, of numbers by the largest of them."""
    leaves, wanted = tree_leaves(found), tree_leaves(expected)
    if len(leaves) != len(wanted):
        return f"{len(leaves)} results, not {len(wanted)}"
    numbers = [x for x in wanted if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]
    least = 1e-3 * max((_largest(x) for x in numbers), default=0.0)
    for one, other in zip(leaves, wanted, strict=True):
        if isinstance(other, Tensor) and other.is_floating_point():
            wrong = _far(one, other, tolerances.get(other.dtype, LOW), least)
        elif isinstance(other, float) and not tolerances:
            wrong = "" if abs(one - other) <= LOW * (1 + abs(other)) else f"{one}, not {other}"
        else:
            wrong = differs(one, other) or ""
        if wrong:
            return wrong
    return ""


def _far(found: Any, expected: Tensor, tolerance: float, least: float) -> str:
    if not isinstance(found, Tensor):
        return f"a {type(found).__name__}, not a tensor"
    # Losses of transformers are float32 in a model of doubles, where ours are doubles.
    is_loss = found.dtype == torch.float64 and expected.dtype == torch.float32 and not found.ndim
    if found.shape != expected.shape or (found.dtype != expected.dtype and not is_loss):
        wanted = f"{tuple(expected.shape)} of {expected.dtype}"
        return f"{tuple(found.shape)} of {found.dtype}, not {wanted}"
    # In doubles, eager attention of transformers gives NaN beside padding on the left.
    is_same = (found == expected) | expected.isnan()
    error = (found.detach().double() - expected.detach().double()).abs()
    error = error.masked_fill(is_same, 0.0).nan_to_num(torch.inf)
    allowed = tolerance * max(_largest(expected), least) + NOISE.get(expected.dtype, 1e-3)
    if not error.numel() or error.max() <= allowed:
        return ""
    return f"off by {error.max():.2g}, of {_largest(expected):.2g}"


def _largest(x: Tensor) -> float:
    finite = x.detach().double().abs().nan_to_num(0.0, 0.0)
    return float(finite.max()) if x.numel() else 0.0
