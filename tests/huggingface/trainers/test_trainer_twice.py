"""Trainers one after another in a process, of which accelerate has one state: each is as alone."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from tests.families import small_model
from tests.huggingface.trainers.test_trainer import BATCH, arguments, packed_rows, under_torchrun
from tests.huggingface.trainers.test_trainer_mesh import losses
from tests.huggingface.trainers.test_trainer_steps import HARMLESS
from tests.pool import Pool

pytest.importorskip("accelerate")
KINDS = ("FSDP", "FSDP", "DDP", "FSDP, other layers", "DDP")
"""Each follows each, and none finds what the one before has left."""
SHORT = {"max_steps": 2, "save_strategy": "no"}
OPTIONS: dict[str, dict[str, Any]] = {
    "DDP": {},
    "FSDP": {"fsdp": True},
    "FSDP, other layers": {
        "fsdp": True,
        "fsdp_config": {
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaMLP"],
        },
    },
}
WRAPPED = {"LlamaDecoderLayer", "LlamaMLP"}
SHARDED = {"DDP": set(), "FSDP": {"LlamaDecoderLayer"}, "FSDP, other layers": {"LlamaMLP"}}
"""Modules with a group of parameters of their own, of those that may be."""


def train_all(folder: str, is_told_first: bool) -> list[tuple[list[float], set[str]]]:
    """Losses and sharded layers of each; all arguments are made first, or before each trainer."""
    from parallel_plans.huggingface.trainer import ContextParallelTrainer

    for message in HARMLESS:
        warnings.filterwarnings("ignore", message)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "cp"))

    def reported(number: int) -> Any:
        return arguments(f"{folder}/{number}", BATCH, **SHORT, **OPTIONS[KINDS[number]])

    first, found = [reported(number) for number in range(len(KINDS)) if is_told_first], []
    for number in range(len(KINDS)):
        trainer = ContextParallelTrainer(
            small_model("Llama"),
            first[number] if is_told_first else reported(number),
            mesh=mesh,
            train_dataset=packed_rows(),
        )
        model: Any = trainer.model
        curve = losses(trainer)
        sharded = [x for x in model.modules() if isinstance(x, FSDPModule)]
        found.append((curve, {type(x).__bases__[-1].__name__ for x in sharded} & WRAPPED))
    return found


@pytest.mark.parametrize("is_told_first", [False, True], ids=["one by one", "all set first"])
def test_each_trains_as_one_process(pool: Pool, tmp_path: Path, is_told_first: bool) -> None:
    from transformers import Trainer

    model = small_model("Llama", use_cache=False)
    options = arguments(str(tmp_path / "stock"), BATCH, **SHORT)
    expected = losses(Trainer(model, options, train_dataset=packed_rows()))
    for found in pool.run(2, under_torchrun, train_all, str(tmp_path), is_told_first):
        assert [sharded for _, sharded in found] == [SHARDED[kind] for kind in KINDS]
        for curve, _ in found:
            assert curve == pytest.approx(expected, rel=1e-5)


def evaluate_first(folder: str) -> list[list[float]]:
    """Losses of an evaluation, a prediction, three steps, and an evaluation, of each kind."""
    from parallel_plans.huggingface.trainer import ContextParallelTrainer

    for message in HARMLESS:
        warnings.filterwarnings("ignore", message)
    mesh, found = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "cp")), []
    checkpointing = {"fsdp": True, "fsdp_config": {"activation_checkpointing": True}}
    data: dict[str, Any] = {"train_dataset": packed_rows(), "eval_dataset": packed_rows()[:4]}
    for number, options in enumerate((OPTIONS["DDP"], OPTIONS["FSDP"], checkpointing)):
        given = arguments(f"{folder}/{number}", BATCH, **SHORT, **options)
        trainer = ContextParallelTrainer(small_model("Llama"), given, mesh=mesh, **data)
        found.append(_evaluated_first(trainer))
    return found


def _evaluated_first(trainer: Any) -> list[float]:
    before = trainer.evaluate()["eval_loss"]
    predicted = trainer.predict(packed_rows()[:4]).metrics["test_loss"]
    return [before, predicted, *losses(trainer), trainer.evaluate()["eval_loss"]]


def test_evaluation_before_training(pool: Pool, tmp_path: Path) -> None:
    """Stock accelerate refuses it with FSDP2, and trains without DDP after it."""
    from transformers import Trainer

    options = arguments(str(tmp_path / "stock"), BATCH, **SHORT)
    data: dict[str, Any] = {"train_dataset": packed_rows(), "eval_dataset": packed_rows()[:4]}
    expected = _evaluated_first(Trainer(small_model("Llama", use_cache=False), options, **data))
    for found in pool.run(2, under_torchrun, evaluate_first, str(tmp_path)):
        for curve in found:
            assert curve == pytest.approx(expected, rel=1e-5)
