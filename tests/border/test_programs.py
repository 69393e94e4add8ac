"""Programs that users write give what they give on the stock model, or an error that says more."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from dtensor_ring.dtensor import sequence
from tests.border.fuzz import ENOUGH, Tally, explore, failure
from tests.border.programs import BUILD, Program, Step, programs
from tests.border.running import (
    AS_STOCK,
    RAW,
    REFUSED,
    RIGHT,
    SILENT,
    SOME,
    Fate,
    fate_of,
    run_program,
)
from tests.pool import Pool

NUM_PROGRAMS = 8
"""On each number of ranks; `make border` tries 2,000."""
PLAN = Step("plan", "parallelize_module(model, mesh, context_parallel_plan(model, 'zigzag'))")
FORWARD = Step("forward", "out = model(input_ids=ids)\nx = out.logits", ("x",))
LOSS = Step("forward", "loss = model(input_ids=ids, labels=targets).loss", ("loss",))
BACKWARD = Step("backward", "loss.backward()\naverage(model)", ("gradients(model)",))
TOKEN = Step("operation", "y = x[:, -1]", ("y",))


def program(*steps: Step, length: int = 12) -> Program:
    return Program("Llama", 2, 2, length, "double", (BUILD, *steps))


@pytest.mark.parametrize("ranks", [2, 3])
def test_drawn_programs(pool: Pool, request: pytest.FixtureRequest, ranks: int) -> None:
    run = partial(fate_of, pool, run=run_program)
    fates, failed = explore(programs(ranks), run, NUM_PROGRAMS)
    assert failed is None, failure(failed, fates[failed])
    tally = Tally()
    tally.add(fates, None)
    assert tally.fates.total() == NUM_PROGRAMS
    assert tally.share_right >= ENOUGH, "\n".join(tally.report())
    request.node.user_properties.append(("programs of users", NUM_PROGRAMS))


FOUND = {
    "a gradient of an output": Step(
        "backward", "x.backward(other)\naverage(model)", ("gradients(model)",)
    ),
    "a gradient like an output": Step(
        "backward", "x.backward(torch.ones_like(x))\naverage(model)", ("gradients(model)",)
    ),
    "tokens beside the sequence": Step("operation", "y = x[:, -1:].detach() - x", ("y",)),
    "a hook of no module": Step(
        "change",
        "model.lm_head.register_forward_hook(eval('lambda module, args, out: out * 2', {}))\n"
        "loss = model(input_ids=ids, labels=targets).loss",
        ("loss",),
    ),
}
"""Steps that were wrong once, after a call of a planned model."""


@pytest.mark.parametrize("length", [12, 13])
@pytest.mark.parametrize("name", FOUND)
def test_what_programs_found(pool: Pool, name: str, length: int) -> None:
    tried = program(PLAN, FORWARD, FOUND[name], length=length)
    fate = fate_of(pool, tried, run_program)
    assert fate.verdict == RIGHT, failure(tried, fate)


def in_rank_order(local: Any, dim: int, group: Any, length: int, layout: Any) -> Any:
    """The whole sequence as DTensor would gather it, without a gradient."""
    parts = [local] * dist.get_world_size()
    dist.all_gather_object(parts, local.detach())
    return torch.cat(parts, dim)


def as_ranks_order_it(program: Program) -> Fate:
    with patch.object(sequence, "whole_sequence", in_rank_order):
        return run_program(program)


def without_averages(program: Program) -> Fate:
    return run_program(program, average=lambda model: None)


def _fails(error: Exception, where: set[int]) -> Callable[[Any], None]:
    def average(model: Any) -> None:
        if dist.get_rank() in where:
            raise error

    return average


def with_an_error_on_a_rank(program: Program) -> Fate:
    return run_program(program, average=_fails(ValueError("to_local()"), {1}))


def with_a_raw_error(program: Program) -> Fate:
    return run_program(program, average=_fails(KeyError("x"), {0, 1}))


TRAINED = program(PLAN, LOSS, BACKWARD)
FAULTS: dict[str, tuple[Program, Callable[[Program], Fate], str, str]] = {
    "no fault": (TRAINED, run_program, RIGHT, ""),
    "tokens in the order of ranks": (program(PLAN, FORWARD), as_ranks_order_it, SILENT, "x: off"),
    "gradients of a rank alone": (TRAINED, without_averages, SILENT, "gradients(model): off"),
    "an error of a rank alone": (TRAINED, with_an_error_on_a_rank, SOME, "rank 1: refused at"),
    "an error of a library": (TRAINED, with_a_raw_error, RAW, "KeyError"),
    "an error that the stock model raises later": (
        program(PLAN, LOSS, BACKWARD, Step("operation", "y = {}['x']")),
        with_a_raw_error,
        AS_STOCK,
        "KeyError: 'x'",
    ),
    "a refusal": (
        program(PLAN, FORWARD, Step("refused", "y = x.flip(1)", ("y",))),
        run_program,
        REFUSED,
        "unshard_sequence(x, ",
    ),
    "a program that is wrong": (
        program(PLAN, FORWARD, Step("operation", "y = x[:, 99]", ("y",))),
        run_program,
        AS_STOCK,
        "IndexError",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_judge(pool: Pool, name: str) -> None:
    tried, run, verdict, text = FAULTS[name]
    fate = fate_of(pool, tried, run)
    assert fate.verdict == verdict, fate
    assert text in fate.said
    assert fate_of(pool, TRAINED, run_program).verdict == RIGHT  # the pool goes on


def test_failures_become_short(pool: Pool) -> None:
    """A fault in one function is found, and the program that shows it has few steps."""
    run = partial(fate_of, pool, run=as_ranks_order_it)
    fates, failed = explore(programs(2), run, NUM_PROGRAMS)
    assert failed is not None
    assert fates[failed].verdict == SILENT
    assert len(failed.steps) <= 4
    for line in ("torchrun", "model = build()", "context_parallel_plan(model"):
        assert line in failure(failed, fates[failed])
