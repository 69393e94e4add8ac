"""torchtitan's trainer with rings, against itself with dense attention and no shards of a sequence.

What is compared are the loss and the norm of the gradient at each of five steps, from one seed of
weights, on packed documents.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pool

pytest.importorskip("torchtitan")

from tests.titan import Report, Run, make_assets, save_seed, train

TOLERANCE = 1e-5
VALIDATE = ("--validator.enable", "--validator.freq=2", "--validator.steps=2")
ACCUMULATE = ("--training.local_batch_size=2", "--training.global_batch_size=4")
PIPELINE = ("--parallelism.pipeline_parallel_schedule=1F1B",)
FULL, NO = "activation-checkpoint:full", "activation-checkpoint:none"


def _degrees(**degrees: int) -> tuple[str, ...]:
    names = {
        "dp": "data_parallel_shard",
        "replicas": "data_parallel_replicate",
        "cp": "context_parallel",
        "tp": "tensor_parallel",
        "pp": "pipeline_parallel",
    }
    return tuple(f"--parallelism.{names[k]}_degree={v}" for k, v in degrees.items())


def _layout(layout: str) -> tuple[str, ...]:
    return "--override.imports", f'parallel_plans.torchtitan.ring_attention={{"layout":"{layout}"}}'


def _backend(name: str) -> tuple[str, ...]:
    return (f"--parallelism.spmd_backend={name}",)


class Trainings:
    """Runs from one seed of weights for each family, and what they are compared with."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        make_assets(folder)
        self._pool, self._folder = pool, folder
        self.reference = cache(self._reference)
        self._seed = cache(self._make_seed)

    def run(self, run: Run, *more: str) -> Report:
        """What the last rank reports, which has the loss of a pipeline."""
        folder = self._seed(run.family)
        seed = "--checkpoint.load_only", f"--checkpoint.initial_load_path={folder}/checkpoint/step-0"
        flags = more or ("--checkpoint.enable", *seed, f"--dump_folder={folder}")
        return self._pool.run(run.world_size, train, run, str(folder), flags, timeout=300)[-1]

    def _reference(self, family: str, num_batches: int) -> Report:
        return self.run(
            Run(family, num_batches, (*_degrees(dp=num_batches, cp=1), *VALIDATE), dense=True)
        )

    def _make_seed(self, family: str) -> Path:
        folder = self._folder / family
        folder.mkdir()
        self._pool.run(1, save_seed, Run(family, 1, _degrees(cp=1)), str(folder))
        return folder


@pytest.fixture(scope="module")
def trainings(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(pool, tmp_path_factory.mktemp("titan"))


def _check(report: Report, reference: Report, first: int = 0) -> None:
    assert report.losses == pytest.approx(reference.losses[first:], rel=TOLERANCE)
    assert report.grad_norms == pytest.approx(reference.grad_norms[first:], rel=TOLERANCE)
    if report.validation:
        assert report.validation == pytest.approx(reference.validation, rel=TOLERANCE)


CASES: dict[str, tuple[Run, int]] = {
    "ring of 1": (Run("llama3", 1, _degrees(cp=1)), 1),
    "ring of 2": (Run("llama3", 2, VALIDATE), 1),
    "ring of 4": (Run("llama3", 4, _degrees(cp=4)), 1),
    "contiguous": (Run("llama3", 2, _layout("contiguous")), 1),
    "striped": (Run("llama3", 2, (*_layout("striped"), *VALIDATE)), 1),
    "balanced": (Run("llama3", 2, (*_layout("balanced"), *VALIDATE)), 1),
    "batches": (Run("llama3", 4, _degrees(dp=2)), 2),
    "replicas": (Run("llama3", 4, _degrees(replicas=2)), 2),
    "heads": (Run("llama3", 4, _degrees(tp=2)), 1),
    "pipeline": (Run("llama3", 4, (*_degrees(pp=2), *PIPELINE)), 1),
    "full dtensor": (Run("llama3", 2, _backend("full_dtensor")), 1),
    "partial dtensor": (Run("llama3", 4, (*_degrees(tp=2), *_backend("partial_dtensor"))), 1),
    "partial dtensor, one axis": (Run("llama3", 2, _backend("partial_dtensor")), 1),
    "compiled": (Run("llama3", 2, ("--compile.enable",)), 1),
    "checkpointed": (Run("llama3", 2, (FULL,)), 1),
    "not checkpointed": (Run("llama3", 2, (NO,)), 1),
    "accumulated": (Run("llama3", 2, ACCUMULATE), 1),
    "typechecked": (Run("llama3", 4, (*_degrees(tp=2), "--debug.spmd_typechecking")), 1),
    "qwen3": (Run("qwen3", 2), 1),
    "gpt_oss": (Run("gpt_oss", 2), 1),
    "deepseek_v3": (Run("deepseek_v3", 2), 1),
}


@pytest.mark.parametrize(("run", "num_batches"), CASES.values(), ids=CASES.keys())
def test_training(trainings: Trainings, run: Run, num_batches: int) -> None:
    _check(trainings.run(run), trainings.reference(run.family, num_batches))
