"""Steps of `ContextParallelTrainer` are those of one process, whatever libraries do to them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cache, wraps
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import parallelize_module

from parallel_plans.huggingface import ring_checkpoint_contexts
from tests.families import VOCABULARY, small_model
from tests.huggingface.planned import under_plan
from tests.huggingface.test_families_trained import TENSOR_PARALLEL
from tests.huggingface.trainers.test_trainer import (
    BATCH,
    SEQ_LEN,
    arguments,
    packed_rows,
    under_torchrun,
)
from tests.pool import Pool

pytest.importorskip("accelerate")
STEPS, RESUMED = 4, 2
# Of accelerate, and of FSDP2, which says not to write to the sharded outputs.
HARMLESS = ("Slicing a flattened dim", "FSDP2-wrapped module .* returned a view", "TypedStorage is")
POLICY = {"use_reentrant": False, "context_fn": ring_checkpoint_contexts}


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def padded_rows() -> list[dict[str, torch.Tensor]]:
    """Each of another length, padded on the right and, every third, on the left."""
    generator, index, rows = torch.Generator().manual_seed(2), torch.arange(SEQ_LEN), []
    for number in range(12):
        tokens = torch.randint(2, VOCABULARY, (SEQ_LEN,), generator=generator)
        mask = (index >= number) if number % 3 == 0 else (index < SEQ_LEN - number)
        # The first token after padding has no label: what predicts it is padding.
        labels = tokens.masked_fill(~(mask & mask.roll(1)), -100)
        rows.append({"input_ids": tokens, "labels": labels, "attention_mask": mask.long()})
    return rows


ROWS = {"packed": packed_rows, "padded": padded_rows}


def own_forward(self: Any, input_ids: Any, labels: Any = None, **kwargs: Any) -> dict[str, Any]:
    """A head and a loss of the user's own, behind whole hidden states."""
    count = kwargs.pop("num_items_in_batch", None)
    hidden = self.model(input_ids=input_ids, **kwargs, use_cache=False).last_hidden_state
    logits = self.lm_head(hidden.tanh())
    target = labels[:, 1:].flatten()
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), target, reduction="sum")
    count = (target != -100).sum() if count is None else count
    return {"loss": (loss + 0.01 * (hidden**2).sum()) / count, "logits": logits}


def model_of(kind: str, mesh: Any = None) -> Any:
    """A model without a plan, but where the plan goes on a part of it."""
    model = small_model("Llama", tie_word_embeddings=kind in ("tied", "head"), use_cache=False)
    if kind == "head":
        if mesh is not None:
            under_plan(model.model, unshard_outputs=True, mesh=mesh["cp"])
        model.forward = MethodType(own_forward, model)
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(
            r=2, lora_alpha=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False
        )
        torch.manual_seed(1)
        model = get_peft_model(model, adapters)
    return model


BY_ADAM: dict[str, Any] = {
    "max_steps": STEPS,
    "save_steps": RESUMED,
    "include_num_input_tokens_seen": "no",
}
# Adam's epsilon is far from zero gradients, whose sign is a matter of rounding.
BY_ADAM |= {"optim": "adamw_torch_fused", "adam_epsilon": 1e-2}


def accuracy(found: Any) -> dict[str, float]:
    predicted, labels = found.predictions[:, :-1], found.label_ids[:, 1:]
    return {"accuracy": float(np.mean(predicted[labels != -100] == labels[labels != -100]))}


def best(logits: Any, _: Any) -> Any:
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


METRICS = {"compute_metrics": accuracy, "preprocess_logits_for_metrics": best}


@dataclass(frozen=True)
class Record:
    """What a training was, and led to."""

    losses: list[float]
    norms: list[float]
    evaluated: list[float]
    parameters: dict[str, torch.Tensor]


def record(trainer: Any, resume: str | None = None) -> Record:
    trainer.train(resume_from_checkpoint=resume)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    results = trainer.evaluate()
    state = trainer.accelerator.get_state_dict(trainer.model)
    # Copies: torch would send views of shared memory, which dies with its process.
    parameters = {name: x.numpy().copy() for name, x in state.items()}
    return Record(
        [entry["loss"] for entry in log],
        [float(entry["grad_norm"]) for entry in log],
        [results["eval_loss"], results["eval_accuracy"]],
        {name: torch.from_numpy(x) for name, x in parameters.items()},
    )


@cache
def stock(data: str, kind: str, folder: Path) -> Record:
    from transformers import Trainer

    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
    rows, options = ROWS[data](), arguments(str(folder / f"{data} {kind}"), BATCH, **BY_ADAM)
    trainer = Trainer(model_of(kind), options, train_dataset=rows, eval_dataset=rows[:4], **METRICS)
    trainer.model_accepts_loss_kwargs = True
    return record(trainer)


@dataclass(frozen=True)
class Case:
    """A mesh, what is trained, and how."""

    axes: tuple[tuple[str, int], ...]
    data: str
    kind: str
    is_sharded: bool = False
    has_checkpoints: bool = False
    resumes: bool = False
    plan: tuple[tuple[str, Any], ...] = ()


SHARDED, DDP = (("dp_shard", 2), ("cp", 2)), (("dp_replicate", 2), ("cp", 2))
CASES = [
    # Sharded over cp, replicated over dp.
    Case(
        DDP,
        "padded",
        "tied",
        is_sharded=True,
        has_checkpoints=True,
        plan=(("mlp_tile", 5), ("offload", True)),
    ),
    Case(SHARDED, "packed", "lora", is_sharded=True, resumes=True),
    Case((("cp", 2), ("tp", 2)), "packed", "untied", is_sharded=True),
]
"""Each mesh, model and way to train at least once."""
REPEATED = [
    Case((("cp", 4),), "padded", "untied", is_sharded=True),
    # A head of the user's own is among the traps, too.
    Case(SHARDED, "packed", "head", is_sharded=True),
    Case(DDP, "packed", "head"),
    Case(SHARDED, "padded", "head", is_sharded=True, has_checkpoints=True),
]


def train(folder: str, case: Case, resume: str | None = None) -> Record:
    from parallel_plans.huggingface.trainer import ContextParallelTrainer

    for message in (*HARMLESS, "`is_gradient_checkpointing` is deprecated"):
        warnings.filterwarnings("ignore", message)
    names, sizes = zip(*case.axes, strict=True)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    dp_size = int(np.prod([size for name, size in case.axes if name not in ("cp", "tp")]))
    model = model_of(case.kind, mesh)
    if "tp" in names:
        for layer in model.model.layers:
            styles = {name: style() for name, style in TENSOR_PARALLEL.items()}
            parallelize_module(layer, mesh["tp"], styles)
            layer.self_attn.num_key_value_groups = 2
    options: dict[str, Any] = {"fsdp": True} if case.is_sharded else {}
    if case.has_checkpoints:
        options |= {"activation_checkpointing": True, "activation_checkpointing_kwargs": POLICY}
    rows = ROWS[case.data]()
    trainer = ContextParallelTrainer(
        model,
        arguments(folder, BATCH // dp_size, **BY_ADAM, **options),
        mesh=mesh,
        plan=dict(case.plan) or None,
        train_dataset=rows,
        eval_dataset=rows[:4],
        **METRICS,
    )
    return record(trainer, resume)


def check(found: Record, expected: Record) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)
    assert found.evaluated == pytest.approx(expected.evaluated, rel=1e-5)
    for name, x in found.parameters.items():  # those of LoRA: the adapters
        error = (x - expected.parameters[name]).norm() / expected.parameters[name].norm()
        assert error < 1e-5, name


@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        *(pytest.param(case, marks=pytest.mark.repeats) for case in REPEATED),
    ],
    ids=str,
)
def test_steps_equal_one_process(
    pool: Pool, tmp_path: Path, tmp_path_factory: Any, case: Case
) -> None:
    expected = stock(case.data, case.kind, tmp_path_factory.getbasetemp())
    world_size = int(np.prod([size for _, size in case.axes]))
    found = pool.run(world_size, under_torchrun, train, str(tmp_path), case)[0]
    assert len(found.losses) == STEPS
    assert found.parameters.keys() == expected.parameters.keys()
    check(found, expected)
    if case.resumes:
        (data, dp_size), _ = case.axes
        other = replace(case, axes=((data, dp_size), ("cp", 1)))
        checkpoint = f"{tmp_path}/checkpoint-{RESUMED}"
        resumed = pool.run(2, under_torchrun, train, str(tmp_path), other, checkpoint)[0]
        check(resumed, expected)


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
SHARDED_LAYERS = {"DDP": set(), "FSDP": {"LlamaDecoderLayer"}, "FSDP, other layers": {"LlamaMLP"}}
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
        assert [sharded for _, sharded in found] == [SHARDED_LAYERS[kind] for kind in KINDS]
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
