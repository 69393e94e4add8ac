"""`transformers.Trainer` on (dp, cp) ranks trains as on one process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.families import VOCABULARY, small_model
from tests.huggingface.planned import under_plan
from tests.pool import Pool, on_ranks

pytest.importorskip("accelerate")
SEQ_LEN, BATCH = 25, 2
CLOCK = ("_per_second", "_runtime")


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


class Stream(torch.utils.data.IterableDataset):
    """Rows one after another, of no known number."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(packed_rows())


def arguments(folder: str, batch: int, **options: Any) -> Any:
    """Of three steps of SGD, if nothing else is said."""
    from transformers import TrainingArguments

    defaults: dict[str, Any] = {"max_steps": 3, "save_steps": 2, "optim": "sgd"}
    defaults |= {"include_num_input_tokens_seen": "all"}
    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        gradient_accumulation_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        max_grad_norm=1.0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **(defaults | options),
    )


def figures(trainer: Any, resume: str | None = None) -> dict[str, float]:
    """All that a training, an evaluation and a prediction report, but for what a clock says.

    A run that was resumed reports another speed and mean of its own steps: they are left out.
    """
    trainer.train(resume_from_checkpoint=resume)
    trainer.evaluate()
    reports = [*trainer.state.log_history, trainer.predict(trainer.eval_dataset).metrics]
    found = {
        f"{number} {name}": x
        for number, report in enumerate(reports)
        for name, x in counted(report).items()
        if not (resume and name.startswith("train_"))
    }
    return found | {"flos": trainer.state.total_flos, "epoch": trainer.state.epoch}


def counted(report: dict[str, float]) -> dict[str, float]:
    """A report with numbers of samples, steps and tokens, not with how many there are a second."""
    found = {name: x for name, x in report.items() if not name.endswith(CLOCK)}
    for name in report.keys() - found.keys():
        what, is_rate, _ = name.partition("_per_second")
        if is_rate:
            number = report[name] * report[f"{name.partition('_')[0]}_runtime"]
            unit = SEQ_LEN if what.endswith("tokens") else 1  # both are rounded
            found[what] = unit * round(number / unit)
    return found


def rows_without(name: str) -> list[dict[str, torch.Tensor]]:
    """So few that they fill no batch."""
    return [{k: x for k, x in row.items() if k != name} for row in packed_rows()[:3]]


def predictions(trainer: Any) -> list[torch.Tensor]:
    """Of rows that fill no batch, with and without labels."""
    both = packed_rows()[:3], rows_without("labels")
    return [torch.tensor(trainer.predict(rows).predictions) for rows in both]


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


@dataclass(frozen=True)
class Case:
    """Ranks, how tokens are sharded, and from what; options are the ring's only."""

    dp_size: int
    cp_size: int
    layout: str
    num_evaluated: int
    is_streamed: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def data(self) -> dict[str, Any]:
        rows = packed_rows()
        train = Stream() if self.is_streamed else rows
        return {"train_dataset": train, "eval_dataset": rows[: self.num_evaluated]}


# Where replicas share a last batch that is not full, `Trainer` itself weights its rows otherwise.
CHECKPOINTING = (("activation_checkpointing", True),)
CASES = [
    Case(2, 2, "zigzag", 4),
    Case(2, 2, "contiguous", 4, is_streamed=True),
    Case(1, 2, "balanced", 3),
    Case(1, 2, "striped", 3, options=CHECKPOINTING),
]
"""Each layout, replicas or none, rows and a stream of them at least once."""
REPEATED = [
    Case(1, 2, "striped", 3),
    Case(1, 2, "zigzag", 3, is_streamed=True),
    Case(1, 1, "zigzag", 3),  # nothing travels
    Case(1, 2, "contiguous", 3, options=CHECKPOINTING),
]
Found = tuple[dict[str, float], list[torch.Tensor]]
"""Figures, and predictions."""


def ring_runs(folder: str, case: Case) -> list[Found]:
    """A run, and one that goes on from its second step."""
    from parallel_plans.huggingface.trainer import ContextParallelTrainer

    sizes = case.dp_size, case.cp_size
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_replicate", "cp"))
    runs = []
    for resume in (None, f"{folder}/checkpoint-2"):
        model = small_model("Llama")
        under_plan(model, case.layout, mesh=mesh["cp"])
        model.accepts_loss_kwargs = False  # as ESM says; the plan's loss takes them all the same
        options = arguments(folder, BATCH // case.dp_size, **dict(case.options))
        trainer = ContextParallelTrainer(model, options, mesh=mesh, **case.data())
        seed = trainer.get_train_dataloader().worker_init_fn
        assert case.is_streamed or seed.keywords["rank"] == mesh.get_local_rank("dp_replicate")
        runs.append((figures(trainer, resume), predictions(trainer)))
    return runs


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.repeats) for case in REPEATED)],
    ids=str,
)
def test_trains_evaluates_and_resumes_as_one_process(
    pool: Pool, tmp_path: Path, case: Case
) -> None:
    from transformers import Trainer

    model = small_model("Llama")
    model.config.use_cache = False  # with a cache, the stock model sees no documents
    stock = Trainer(model, arguments(str(tmp_path / "stock"), BATCH), **case.data())
    expected, predicted = figures(stock), predictions(stock)
    folder = str(tmp_path / "ring")
    for runs in pool.run(case.dp_size * case.cp_size, under_torchrun, ring_runs, folder, case):
        for is_resumed, (found, logits) in enumerate(runs):
            of_run = {name: x for name, x in expected.items() if name in found or not is_resumed}
            assert found == pytest.approx(of_run, rel=1e-5)
            torch.testing.assert_close(logits, predicted, atol=1e-4, rtol=1e-4)


@on_ranks(2, around=under_torchrun)
def test_survives_what_accelerate_unwraps() -> None:
    """Mixed precision wraps the plan's forward; without the wrapper it is the plan's again."""
    from accelerate import Accelerator

    tokens = torch.arange(SEQ_LEN).unsqueeze(0)
    model: Any = small_model("Llama")
    under_plan(model, "zigzag")
    expected = model(input_ids=tokens, labels=tokens).loss
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare_model(model)
    prepared(input_ids=tokens, labels=tokens)
    found = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert found(input_ids=tokens, labels=tokens).loss == expected


NUM_VIRTUAL = 3


def prompted(model: Any) -> Any:
    """With tokens before each sequence that are trained."""
    from peft import PromptTuningConfig, get_peft_model

    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=NUM_VIRTUAL)
    torch.manual_seed(2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        return get_peft_model(model, config)


def predict_prompted(folder: str) -> torch.Tensor:
    from parallel_plans.huggingface.trainer import ContextParallelTrainer

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "cp"))
    model = small_model("Llama")
    under_plan(model, "zigzag", mesh=mesh["cp"])
    trainer = ContextParallelTrainer(prompted(model), arguments(folder, BATCH), mesh=mesh)
    return torch.tensor(trainer.predict(rows_without("position_ids")).predictions)


def test_predictions_under_prompt_tuning(pool: Pool, tmp_path: Path) -> None:
    from transformers import Trainer

    pytest.importorskip("peft")
    stock = Trainer(prompted(small_model("Llama")), arguments(str(tmp_path / "stock"), BATCH))
    expected = torch.tensor(stock.predict(rows_without("position_ids")).predictions)
    for logits in pool.run(2, under_torchrun, predict_prompted, str(tmp_path / "ring")):
        assert logits.shape[1] == SEQ_LEN + NUM_VIRTUAL
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
