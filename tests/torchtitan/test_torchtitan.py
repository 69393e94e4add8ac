"""torchtitan's trainer with rings, against itself with dense attention and no shards of a sequence.

What is compared are the loss and the norm of the gradient at each of three steps, whose last has
momentum, and each parameter's gradient at the first, from one seed of weights, on packed documents.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.pool import Pool
from tests.scripts import run_launcher, run_script
from tests.test_public import ROOT
from tests.titan import Report, Run, arguments, make_assets, save_seed, train

pytestmark = pytest.mark.skipif(not find_spec("torchtitan"), reason="needs torchtitan")

TOLERANCE = 1e-5
"""Of the curve: an optimizer makes much of little, as it divides by the size of a gradient."""
FIRST_LOSS, GRADIENTS = 1e-6, 5e-6
"""Of the first step, whose weights are the same."""
VALIDATE = ("--validator.enable", "--validator.freq=2", "--validator.steps=2")
ACCUMULATE = ("--training.local_batch_size=1", "--training.global_batch_size=2")
TYPECHECK = "--debug.spmd_typechecking"
PIPELINE = ("--parallelism.pipeline_parallel_schedule=1F1B",)
FULL, NO = "activation-checkpoint:full", "activation-checkpoint:none"
NO_GRAPHS = "--training.disable_cuda_graphs"


def _degrees(**degrees: int) -> tuple[str, ...]:
    names = {
        "dp": "data_parallel_shard",
        "replicas": "data_parallel_replicate",
        "cp": "context_parallel",
        "tp": "tensor_parallel",
        "pp": "pipeline_parallel",
        "ep": "expert_parallel",
    }
    return tuple(f"--parallelism.{names[k]}_degree={v}" for k, v in degrees.items())


CP = _degrees(cp=2)
MTP = "deepseek_v3_mtp"
UNBALANCED = ("--parallelism.context_parallel_load_balancer=None",)


BY_KIND = {"sliding": "direct", "full": "ulysses"}


def _layout(layout: str = "zigzag", strategy: Any = None) -> tuple[str, ...]:
    given = json.dumps({"layout": layout, "strategy": strategy}, separators=(",", ":"))
    return "--override.imports", f"parallel_plans.torchtitan.ring_attention={given}"


def _backend(name: str) -> tuple[str, ...]:
    return (f"--parallelism.spmd_backend={name}",)


class Trainings:
    """Runs from one seed of weights for each family, and what they are compared with."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        make_assets(folder)
        self._pool, self.folder = pool, folder
        self.reference = cache(self._reference)
        self._seed = cache(self._make_seed)

    def run(self, run: Run, *more: str, pool: Pool | None = None) -> Report:
        """What the last rank reports, which has the loss of a pipeline, and gradients of all."""
        seed = f"--checkpoint.initial_load_path={self._seed(run.family)}/checkpoint/step-0"
        more = more or ("--checkpoint.load_only", f"--dump_folder={self.folder}/outputs")
        flags = ("--checkpoint.enable", seed, *more, *run.flags)  # subcommands come last
        run = replace(run, flags=flags)
        pool = pool or self._pool
        reports = pool.run(run.world_size, train, run, str(self.folder), timeout=300)
        stages = (report.gradients for report in reports)
        return replace(reports[-1], gradients={k: x for stage in stages for k, x in stage.items()})

    def _reference(self, family: str, dp: int = 1, tp: int = 1) -> Report:
        """One process, but for heads of gpt_oss: torchtitan's curve depends on their ranks."""
        validate = VALIDATE if family == "llama3" and dp == 1 else ()
        batch = f"--training.global_batch_size={2 * dp}"
        flags = (*_degrees(tp=tp, cp=1), batch, *validate)
        return self.run(Run(family, tp, flags, dense=True, num_replicas=dp))

    def _make_seed(self, family: str) -> Path:
        folder = self.folder / family
        seed = ("--checkpoint.enable", "--checkpoint.create_seed_checkpoint")
        flags = (*_degrees(cp=1), *seed, f"--dump_folder={folder}")
        self._pool.run(1, save_seed, Run(family, 1, flags), str(self.folder))
        return folder


@pytest.fixture(scope="module")
def trainings(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(pool, tmp_path_factory.mktemp("titan"))


def _check(report: Report, reference: Report, first: int = 0, validated: bool = False) -> None:
    """From a step on, the same curve, and the gradients of the first."""
    if first == 0:
        assert report.losses[0] == pytest.approx(reference.losses[0], rel=FIRST_LOSS)
        _check_gradients(report.gradients, reference.gradients)
    assert report.losses == pytest.approx(reference.losses[first:], rel=TOLERANCE)
    assert report.grad_norms == pytest.approx(reference.grad_norms[first:], rel=TOLERANCE)
    assert bool(report.validation) == validated
    if validated:
        assert report.validation == pytest.approx(reference.validation, rel=TOLERANCE)


def _check_gradients(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Each by itself, relative to its largest number."""
    assert found.keys() == expected.keys()
    assert found
    errors = {k: np.abs(found[k] - x).max() / np.abs(x).max() for k, x in expected.items()}
    off = {name: error for name, error in errors.items() if not error <= GRADIENTS}  # NaN is off
    assert not off


CASES: dict[str, tuple[Run, dict[str, int]]] = {
    "two groups of 2": (Run("llama3", 4, (*_degrees(cp=4), *_layout(strategy="ulysses:2"))), {}),
    "balanced": (Run("llama3", 2, (*_layout("balanced"), *VALIDATE)), {}),
    "pipeline": (Run("llama3", 4, (*_degrees(pp=2), *PIPELINE)), {}),
    "partial dtensor, replicas": (
        Run("llama3", 4, (*_degrees(replicas=2), *_backend("partial_dtensor"))),
        {"dp": 2},
    ),
    "typechecked, accumulated": (
        Run("llama3", 4, (*_degrees(tp=2), TYPECHECK, *ACCUMULATE)),
        {},
    ),
    "qwen3": (Run("qwen3", 2), {}),
    "gpt_oss, heads": (Run("gpt_oss", 4, _degrees(tp=2)), {"tp": 2}),
    "deepseek_v3": (Run("deepseek_v3", 2), {}),
    "experts, heads": (Run("deepseek_v3", 4, _degrees(tp=2, ep=2)), {}),
    "gpt_oss, experts": (Run("gpt_oss", 4, _degrees(dp=2, ep=2)), {"dp": 2}),
    "experts, pipeline": (Run("deepseek_v3", 4, (*_degrees(pp=2), *PIPELINE)), {}),
    "several heads, experts, balanced": (
        Run(MTP, 4, (*_degrees(dp=2, ep=2), *_layout("balanced"))),
        {"dp": 2},
    ),
    "several heads, striped": (Run(MTP, 4, (*_layout("striped"), *_degrees(cp=4))), {}),
    "override, contiguous": (
        Run("llama3", 2, (*CP, *_layout("contiguous"), *UNBALANCED, FULL), stock=True),
        {},
    ),
    "override, pipeline": (
        Run("llama3", 4, (*CP, *_degrees(pp=2), *PIPELINE, *_layout(), NO_GRAPHS), stock=True),
        {},
    ),
    "override, full dtensor, strategies": (
        Run(
            *("gpt_oss", 2, (*CP, *_layout(strategy=BY_KIND), *_backend("full_dtensor"))),
            stock=True,
        ),
        {},
    ),
}


REPEATED = {
    "two groups of 2": "groups are in tests/all_to_all, strategies in the last case",
    "deepseek_v3": 'as "several heads, experts, balanced"',
    "experts, heads": 'as "several heads, experts, balanced" and "typechecked, accumulated"',
    "gpt_oss, experts": 'as "several heads, experts, balanced"',
    "experts, pipeline": 'as "pipeline" and "several heads, experts, balanced"',
    "several heads, striped": 'as "several heads, experts, balanced", heads are tested by token',
    "qwen3": "its attention is that of llama3",
    "gpt_oss, heads": 'as "typechecked, accumulated" and "override, full dtensor, strategies"',
    "override, pipeline": 'as "pipeline" and "override, contiguous"',
}
"""What other cases combine with something else."""
TRAININGS = [
    pytest.param(*case, id=name, marks=[pytest.mark.repeats] if name in REPEATED else [])
    for name, case in CASES.items()
]


@pytest.mark.parametrize(("run", "degrees"), TRAININGS)
def test_training(trainings: Trainings, run: Run, degrees: dict[str, int]) -> None:
    validated = VALIDATE[0] in run.flags
    _check(trainings.run(run), trainings.reference(run.family, **degrees), validated=validated)


@pytest.mark.repeats  # axes of "pipeline" and of "partial dtensor, replicas"
def test_pipeline_of_batches(trainings: Trainings) -> None:
    flags = (*_degrees(pp=2, dp=2, cp=2), *PIPELINE)
    pool = Pool(8)
    try:
        report = trainings.run(Run("llama3", 8, flags), pool=pool)
    finally:
        pool.close()
    _check(report, trainings.reference("llama3", dp=2))


def test_documents_matter(trainings: Trainings) -> None:
    forgetful = trainings.run(Run("llama3", 2, ignore_documents=True))
    with pytest.raises(AssertionError):
        _check(forgetful, trainings.reference("llama3"))


COMPILE = ("--compile.enable",)
AOT = (*COMPILE, "--compile.backend=aot_eager")
COMPILED = [
    pytest.param("llama3", AOT, id="llama3"),
    # What Inductor makes of nodes is tested in tests/ops/test_compile.
    pytest.param("llama3", COMPILE, id="llama3, inductor", marks=pytest.mark.repeats),
    # What Inductor makes of experts is its own business.
    pytest.param("gpt_oss", AOT, id="gpt_oss", marks=pytest.mark.repeats),
]
BRIEF = "--training.steps=2"
CHECKPOINTING = [
    pytest.param((), 1, id="selective", marks=pytest.mark.repeats),  # as test_compiled
    pytest.param((FULL,), 2, id="full"),
    pytest.param((NO,), 1, id="none"),
]


@pytest.mark.parametrize(("flags", "forward"), CHECKPOINTING)
def test_rings_of_a_step(trainings: Trainings, flags: tuple[str, ...], forward: int) -> None:
    _check_calls(trainings.run(Run("llama3", 2, (BRIEF, *flags))), forward)


def test_override_of_checkpointing(trainings: Trainings) -> None:
    both = (*_layout(), "parallel_plans.torchtitan.ring_checkpointing")
    _check_calls(trainings.run(Run("llama3", 2, (*CP, BRIEF, *both), stock=True)), forward=1)


@pytest.mark.parametrize(("family", "flags"), COMPILED)
def test_compiled(trainings: Trainings, family: str, flags: tuple[str, ...]) -> None:
    """Each step has other documents, and none compiles again."""
    report = trainings.run(Run(family, 2, flags))
    _check(report, trainings.reference(family))
    _check_calls(report, forward=1)
    assert report.num_graphs[0] > 0
    assert set(report.num_graphs) == {report.num_graphs[0]}


def _check_calls(report: Report, forward: int) -> None:
    """Rings in each step, over two layers."""
    for step, calls in enumerate(report.calls, 1):
        assert calls == {"ring_forward": 2 * forward * step, "ring_backward": 2 * step}


def test_resuming_on_another_ring(trainings: Trainings, tmp_path: Path) -> None:
    """From the checkpoint of step 2, with twice the ranks: the curve goes on."""
    keep = ("--checkpoint.interval=2", "--checkpoint.keep_latest_k=0", f"--dump_folder={tmp_path}")
    trainings.run(Run("llama3", 2), *keep)
    again = Run("llama3", 4, _degrees(cp=4))
    resumed = trainings.run(again, *keep, "--checkpoint.load_step=2")
    assert len(resumed.losses) == 1
    _check(resumed, trainings.reference("llama3"), first=2)


ENTRY = """
import runpy
from examples.torchtitan_cpu import install
install()
runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
"""


def test_stock_entry_point(trainings: Trainings, tmp_path: Path) -> None:
    """`python -m torchtitan.train`, which has to be set to the CPU first, with our names."""
    script = tmp_path / "train.py"
    script.write_text(ENTRY)
    run = Run("llama3", 2, (*_layout("striped"), "--training.steps=2"))
    for rank in run_script(script, *arguments(run, trainings.folder), ranks=2, cwd=tmp_path):
        printed = rank.printed + rank.errors
        assert "layout='striped'" in printed
        assert printed.count("grad_norm") == 2


# Notes what it is asked to run, and in which environment.
NOTED = """#!/bin/sh
folder=$(mktemp -d "$(dirname "$0")/run.XXXXXX")
printf '%s\\0' "$@" >"$folder/command"
env -0 >"$folder/environment"
"""


def test_example(tmp_path: Path) -> None:
    """The commands of the shell script, by processes that need not import torch again."""
    python = tmp_path / "python"
    python.write_text(NOTED)
    python.chmod(0o700)
    flags = ("--training.steps=2", "--training.seq_len=128")
    given = {**os.environ, "PYTHON": str(python)}
    subprocess.run([ROOT / "examples/train_torchtitan.sh", *flags], env=given, check=True)
    for folder in sorted(tmp_path.glob("run.*"), key=lambda path: path.stat().st_mtime_ns):
        command, environment = (
            (folder / name).read_text().split("\0")[:-1] for name in ("command", "environment")
        )
        added = dict(x.split("=", 1) for x in environment)
        added = {name: x for name, x in added.items() if given.get(name) != x}
        done = run_launcher(*command[command[0] == "-m" :], cwd=ROOT, env=added)
        assert done.code == 0, done
    assert (done.printed + done.errors).count("grad_norm") == 2
