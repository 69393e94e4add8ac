"""What trainers of other libraries do to a model or a step, and `ContextParallelTrainer` bears."""

from __future__ import annotations

import warnings
from functools import wraps
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from tests.families import small_model
from tests.huggingface.planned import under_plan
from tests.huggingface.trainers.test_trainer import BATCH, arguments, packed_rows, under_torchrun
from tests.huggingface.trainers.test_trainer_mesh import losses
from tests.huggingface.trainers.test_trainer_steps import HARMLESS, own_forward
from tests.pool import Pool

pytest.importorskip("accelerate")
NUM_ROWS = 4


def wrapped(model: Any, mesh: Any) -> Any:
    """A forward of another library over that of the model."""
    if mesh is not None:
        under_plan(model, mesh=mesh)
    plain = model.forward

    @wraps(type(model).forward)
    def forward(self: Any, **kwargs: Any) -> Any:
        return plain(**kwargs)

    model.forward = MethodType(forward, model)
    return model


def headed(model: Any, mesh: Any) -> Any:
    """The plan on the backbone; its embedding is the weight of the head behind whole outputs."""
    if mesh is not None:
        under_plan(model.model, unshard_outputs=True, mesh=mesh)
    model.forward = MethodType(own_forward, model)
    return model


def planned(model: Any, mesh: Any) -> Any:
    if mesh is not None:
        under_plan(model, mesh=mesh)
    return model


def trainers() -> tuple[dict[str, type], type]:
    """Those of other libraries by name, and ours; both are imported on first use."""
    from transformers import Trainer

    from parallel_plans.huggingface.trainer import ContextParallelTrainer

    class WithoutCount(Trainer):
        """As TRL's: its `prediction_step` does not say how many labels there are."""

        def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                return self.compute_loss(model, self._prepare_inputs(inputs)), None, None

    class WithoutOutputs(Trainer):
        """As TRL's: whole logits cost a second forward of it."""

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if (args and args[0]) or kwargs.get("return_outputs"):
                assert not model.training, "nobody asked for outputs"
            return super().compute_loss(model, inputs, *args, **kwargs)

    others = {"stock": Trainer, "no count": WithoutCount, "no outputs": WithoutOutputs}
    return others, ContextParallelTrainer


TRAPS = {
    "forward under a wrapper": (wrapped, "stock"),
    "head behind whole outputs": (headed, "stock"),
    "loss of an evaluation that counts no labels": (planned, "no count"),
    "outputs that nobody asked for": (planned, "no outputs"),
}


def trained(folder: str, trap: str, is_ring: bool) -> list[float]:
    """Losses and gradient norms by step, and the loss of an evaluation."""
    change, name = TRAPS[trap]
    others, ours = trainers()
    cls, mesh, options = others[name], None, {}
    if is_ring:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "cp"))
        cls = type("Mixed", (ours,) if name == "stock" else (ours, cls), {})
        options = {"mesh": mesh}
    model = small_model("Llama", tie_word_embeddings=True, use_cache=False)
    rows = packed_rows()
    trainer = cls(
        change(model, mesh and mesh["cp"]),
        arguments(folder, BATCH),
        train_dataset=rows,
        eval_dataset=rows[:NUM_ROWS],
        **options,
    )
    trainer.model_accepts_loss_kwargs = True  # where its forward does not say so
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    numbers = [entry[name] for entry in log for name in ("loss", "grad_norm")]
    return [*map(float, numbers), trainer.evaluate()["eval_loss"]]


@pytest.mark.parametrize("trap", TRAPS)
def test_is_as_one_process(pool: Pool, tmp_path: Path, trap: str) -> None:
    expected = trained(str(tmp_path / "stock"), trap, False)
    for found in pool.run(2, under_torchrun, trained, str(tmp_path / "ring"), trap, True):
        assert found == pytest.approx(expected, rel=1e-5)


def classified(folder: str, is_ring: bool) -> list[float]:
    """Of a head whose loss is a mean over its batch, and that says so."""
    others, ours = trainers()
    mesh = (
        init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "cp")) if is_ring else None
    )
    model = small_model("Llama", "ForSequenceClassification", num_labels=3, use_cache=False)
    model.accepts_loss_kwargs = False
    rows = [{"input_ids": x["input_ids"]} for x in packed_rows()]
    rows = [row | {"labels": torch.tensor(number % 3)} for number, row in enumerate(rows)]
    cls, options = (ours, {"mesh": mesh}) if is_ring else (others["stock"], {})
    batch = BATCH // 2 if is_ring else BATCH
    trainer = cls(model, arguments(folder, batch), train_dataset=rows, eval_dataset=rows, **options)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    numbers = [entry[name] for entry in log for name in ("loss", "grad_norm")]
    return [*map(float, numbers), trainer.evaluate()["eval_loss"]]


def test_losses_that_take_no_count(pool: Pool, tmp_path: Path) -> None:
    expected = classified(str(tmp_path / "stock"), False)
    for found in pool.run(2, under_torchrun, classified, str(tmp_path / "ring"), True):
        assert found == pytest.approx(expected, rel=1e-5)


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
