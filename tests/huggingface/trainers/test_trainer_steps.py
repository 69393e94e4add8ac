"""Four steps of `ContextParallelTrainer`, under DDP and FSDP2, are those of one process."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from parallel_plans.huggingface import ring_checkpoint_contexts
from tests.families import VOCABULARY, small_model
from tests.huggingface.planned import under_plan
from tests.huggingface.test_families_trained import TENSOR_PARALLEL
from tests.huggingface.trainers.test_trainer import SEQ_LEN, arguments, packed_rows, under_torchrun
from tests.pool import Pool

pytest.importorskip("accelerate")
STEPS, BATCH, RESUMED = 4, 2, 2
# Of accelerate, and of FSDP2, which says not to write to the sharded outputs.
HARMLESS = ("Slicing a flattened dim", "FSDP2-wrapped module .* returned a view", "TypedStorage is")
POLICY = {"use_reentrant": False, "context_fn": ring_checkpoint_contexts}


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
    # A head of the user's own is in test_trainer_traps, too.
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
