"""`transformers.Trainer` on (dp, cp) ranks trains as on one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from parallel_plans.huggingface import context_parallel_plan
from tests.families import VOCABULARY, small_model
from tests.pool import Pool

pytest.importorskip("accelerate")
SEQ_LEN, BATCH = 24, 2


def packed_rows() -> list[dict[str, torch.Tensor]]:
    """Each packed otherwise, with another number of labels."""
    generator, index, rows = torch.Generator().manual_seed(1), torch.arange(SEQ_LEN), []
    for number in range(12):
        tokens = torch.randint(2, VOCABULARY, (SEQ_LEN,), generator=generator)
        cut = 1 + number
        positions = torch.where(index < cut, index, index - cut)
        labels = tokens.masked_fill(index < number, -100)
        rows.append({"input_ids": tokens, "labels": labels, "position_ids": positions})
    return rows


def arguments(folder: str, batch: int, **options: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        gradient_accumulation_steps=2,
        max_steps=3,
        logging_steps=1,
        save_steps=2,
        learning_rate=1e-2,
        optim="sgd",
        max_grad_norm=1.0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options,
    )


def curve(trainer: Any, resume: str | None = None) -> list[float]:
    """Losses and gradient norms by step, and the loss of the evaluation."""
    trainer.train(resume_from_checkpoint=resume)
    log = [
        x
        for entry in trainer.state.log_history
        for x in (entry.get("loss"), entry.get("grad_norm"))
    ]
    return [x for x in log if x is not None] + [trainer.evaluate()["eval_loss"]]


def under_torchrun(what: Callable[..., Any], *args: Any) -> Any:
    """What a function returns where accelerate finds the ranks in the environment."""
    from accelerate.state import AcceleratorState

    rank, world_size = dist.get_rank(), dist.get_world_size()
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
    }
    AcceleratorState._reset_state(reset_partial_state=True)
    with mock.patch.dict(os.environ, {name: str(x) for name, x in names.items()}):
        try:
            return what(*args)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


def ring_curves(folder: str, dp_size: int) -> list[list[float]]:
    """Of a run, and of one that goes on from its second step."""
    from parallel_plans.huggingface.trainer import ContextParallelTrainer

    sizes = dp_size, dist.get_world_size() // dp_size
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_replicate", "cp"))
    rows, curves = packed_rows(), []
    for resume in (None, f"{folder}/checkpoint-2"):
        model = small_model("Llama")
        parallelize_module(model, mesh["cp"], context_parallel_plan(model))
        options = arguments(folder, BATCH // dp_size)
        trainer = ContextParallelTrainer(
            model, options, mesh=mesh, train_dataset=rows, eval_dataset=rows[:4]
        )
        curves.append(curve(trainer, resume))
    return curves


@pytest.mark.parametrize("dp_size", [1, 2])
def test_trains_evaluates_and_resumes_as_one_process(
    pool: Pool, tmp_path: Path, dp_size: int
) -> None:
    from transformers import Trainer

    rows = packed_rows()
    model = small_model("Llama")
    model.config.use_cache = False  # with a cache, the stock model sees no documents
    stock = Trainer(
        model, arguments(str(tmp_path / "stock"), BATCH), train_dataset=rows, eval_dataset=rows[:4]
    )
    expected = curve(stock)
    for curves in pool.run(
        2 * dp_size, under_torchrun, ring_curves, str(tmp_path / "ring"), dp_size
    ):
        for found in curves:
            assert found == pytest.approx(expected, rel=1e-5)


def refuse_losses(folder: str) -> None:
    from parallel_plans.huggingface.trainer import ContextParallelTrainer

    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "cp"))
    for options, function in (({"label_smoothing_factor": 0.1}, None), ({}, torch.add)):
        with pytest.raises(ValueError, match="leave label_smoothing_factor and compute_loss_func"):
            ContextParallelTrainer(
                small_model("Llama"),
                arguments(folder, BATCH, **options),
                mesh=mesh,
                compute_loss_func=function,
            )


def test_refuses_other_losses(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, under_torchrun, refuse_losses, str(tmp_path))
