"""TRL's trainers on (dp, cp) ranks train as on one process, and report the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.families import small_model
from tests.huggingface.planned import under_plan
from tests.huggingface.trainers.test_trainer import under_torchrun
from tests.huggingface.trainers.trl_runs import (
    RESUMED,
    Result,
    Run,
    Sizes,
    counted_numbers,
    harmless,
    mixin_of,
    model_of,
    result_of,
    trainer_of,
)
from tests.pool import Pool, on_ranks

pytest.importorskip("trl")


@dataclass(frozen=True)
class Case:
    """A run, the ranks that train it, and those that go on with it from its second step."""

    run: Run
    sizes: Sizes
    resumed: Sizes = None

    def __str__(self) -> str:
        return f"{self.run}-{self.sizes}"


PACKED = {"packing": True, "max_length": 24, "eval_packing": False}
ASSISTANT = {"assistant_only_loss": True, "loss_type": "dft"}
CHECKPOINTING = {"activation_checkpointing": True}
ADAM = {"optim": "adamw_torch", "adam_epsilon": 1e-3, "learning_rate": 0.003}
GROUPS = {"num_generations": 2, "eval_strategy": "no"}
SFT = [
    Case(
        Run("SFT", "text", tied=True, fsdp=True, options=PACKED | ADAM, saves=True), (2, 2), (1, 4)
    ),
    Case(Run("SFT", "completion"), (2, 2)),
    Case(Run("SFT", "messages", options=ASSISTANT), (1, 2)),
]
PREFERENCES = [
    Case(Run("DPO", "preference"), (1, 2)),
    Case(Run("KTO", "label"), (1, 2)),
    # Over all rewards, which those of ranks that share a batch must not enter twice.
    Case(Run("GRPO", "prompt", options=GROUPS | {"scale_rewards": "batch"}), (1, 2)),
    Case(Run("GRPO", "prompt", lora=True, options=GROUPS | {"beta": 0.1}), (1, 2)),
]
REWARD = [Case(Run("Reward", "preference"), (1, 2))]
REPEATED = [
    # Each trainer, FSDP2, adapters, replicas and resuming are in other rows. Adapters of SFT are in
    # test_examples, under FSDP2 in test_trainer_steps, and checkpoints of activations in both.
    Case(Run("SFT", "text", lora=True, fsdp=True, options=PACKED | CHECKPOINTING), (2, 2)),
    Case(Run("SFT", "text", saves=True), (2, 2), (1, 4)),
    Case(Run("SFT", "text", tied=True, options=PACKED | CHECKPOINTING), (2, 2)),
    Case(Run("SFT", "text", options={"padding_free": True, "max_length": None}), (1, 2)),
    Case(Run("DPO", "preference", lora=True, options={"precompute_ref_log_probs": True}), (1, 2)),
    # Replicas shuffle what they generated each for itself, so that steps compare only whole.
    Case(Run("GRPO", "prompt", options=GROUPS | {"gradient_accumulation_steps": 1}), (2, 2)),
    Case(Run("SFT", "text", lora=True), (2, 2)),
    Case(Run("SFT", "text", fsdp=True), (2, 2)),
    Case(Run("DPO", "preference", fsdp=True), (2, 2)),
    Case(Run("Reward", "preference", fsdp=True), (2, 2)),
]


def assert_equal(
    found: Result, expected: Result, num_replicas: int, is_resumed: bool = False
) -> None:
    # TRL counts the tokens of a resumed run from its start, and Trainer takes means of its steps.
    left_out = ["num_tokens", "train_"] if is_resumed else []
    # Trainer counts padding, too, and each replica pads its own rows.
    left_out += ["flos"] if num_replicas > 1 or is_resumed else []
    numbers, wanted = (
        {name: x for name, x in result[0].items() if not any(word in name for word in left_out)}
        for result in (found, expected)
    )
    assert numbers == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        *(SFT + PREFERENCES + REWARD),
        *(pytest.param(case, marks=pytest.mark.repeats) for case in REPEATED),
    ],
    ids=str,
)
def test_trains_and_reports_as_one_process(pool: Pool, tmp_path: Path, case: Case) -> None:
    expected = result_of(case.run, str(tmp_path / "stock"))
    folder, world_size = str(tmp_path / "ring"), torch.Size(case.sizes or ()).numel()
    runs = [(case.sizes, None), (case.resumed, f"{folder}/checkpoint-{RESUMED}")]
    for sizes, resume in runs[: 1 + case.run.saves]:
        given = (result_of, case.run, folder, sizes, resume)
        for found in pool.run(world_size, under_torchrun, *given, timeout=300):
            assert_equal(found, expected, (sizes or (1, 1))[0], is_resumed=resume is not None)


FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def per_token(layout: str | None, shifted: bool) -> tuple[dict[str, Any], int]:
    """What TRL's head says of tokens, the gradient of its sum, and the rows that it projects."""
    from trl.trainer.utils import add_fused_lm_head

    from parallel_plans.huggingface.trl import _shard_tokens

    model = small_model("Llama", use_cache=False)
    if layout is not None:
        under_plan(model, layout)
    add_fused_lm_head(model, temperature=0.7, outputs=FIELDS)
    _shard_tokens(model)
    seen: list[int] = []
    model.model.register_forward_hook(lambda *x: seen.append(x[-1].last_hidden_state.shape[1]))
    tokens = torch.arange(2, 24).view(2, 11)
    labels = tokens.masked_fill(tokens % 5 == 0, -100)
    named = {"shift_labels" if shifted else "labels": labels}
    if shifted:
        named["labels"] = labels
    output = model(input_ids=tokens, **named, fused_lm_head=True)
    (output.loss + output.entropy.mean()).backward()
    gradient = model.lm_head.weight.grad
    if layout is not None:  # gradients average over the axis
        torch.distributed.all_reduce(gradient)
        gradient /= 2
    found = {name: getattr(output, name).detach() for name in (*FIELDS, "label_mask", "loss")}
    return found | {"gradient": gradient}, seen[0]


SHIFTED = [("zigzag", False), ("striped", True), ("balanced", False)]
OTHERS = [("zigzag", True), ("striped", False), ("balanced", True)]


@pytest.mark.parametrize(
    ("layout", "shifted"),
    [*SHIFTED, *(pytest.param(*pair, marks=pytest.mark.repeats) for pair in OTHERS)],
)
def test_head_projects_own_tokens_only(pool: Pool, layout: str, shifted: bool) -> None:
    expected, length = per_token(None, shifted)
    for found, rows_seen in pool.run(2, per_token, layout, shifted):
        assert length == 11
        assert rows_seen <= 6  # of 11
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@on_ranks(2, timeout=300, around=under_torchrun)
def test_refuses_what_it_would_compute_otherwise(tmp_path: Path) -> None:
    """By what is mixed, given or asked for, and how the message goes on."""
    folder = str(tmp_path)
    import trl

    sft, dpo, grpo = Run("SFT", "text"), Run("DPO", "preference"), Run("GRPO", "prompt")
    groups = replace(grpo, options=GROUPS)
    uneven = GROUPS | {"num_generations": 4, "gradient_accumulation_steps": 1}
    for run, given, message in (
        (replace(sft, options={"neftune_noise_alpha": 5.0}), {}, "neftune_noise_alpha scales"),
        (sft, {"model": small_model("Qwen3-MoE")}, "set router_aux_loss_coef=0.0"),
        (dpo, {"ref_model": None}, "TRL would make a reference model .*; give ref_model="),
        (replace(grpo, options=GROUPS | {"beta": 0.1}), {}, "TRL would make a reference model"),
        (groups, {"rollout_func": None}, "completions come from elsewhere or .* give rollout_func"),
        (replace(groups, options=GROUPS | {"log_completions": True}), {}, "leave it out"),
        (replace(groups, options=uneven), {}, "a multiple of the 4 generations .*, got 2"),
    ):
        with pytest.raises(ValueError, match=message), harmless():
            trainer_of(run, folder, (2, 1), **given)
    for mixed, trainer in (("SFT", trl.GRPOTrainer), ("GRPO", trl.SFTTrainer)):
        kind = type("Mixed", (mixin_of(mixed), trainer), {})
        with pytest.raises(TypeError, match=r"is for TRL's .*, got Mixed; write class X\("):
            kind(model_of(sft))
    with harmless():
        trainer = trainer_of(groups, folder, (2, 1))
        tiled = trainer_of(dpo, folder, (2, 1), plan={"mlp_tile": 5})
    for model in (tiled.model, tiled.ref_model):
        assert "forward" in vars(model.model.layers[0].mlp), "a reference has all of the plan"
    with pytest.raises(ValueError, match="or use_transformers_continuous_batching=True"):
        trainer._generate_single_turn([[1]], None, {}, 2)


def share_error() -> str:
    from parallel_plans.huggingface.grpo import ContextParallelGRPOMixin

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    trainer: Any = SimpleNamespace(_mesh=mesh)
    number = torch.distributed.get_rank()
    assert ContextParallelGRPOMixin._share(trainer, lambda: 7 + number) == 7
    with pytest.raises((ZeroDivisionError, RuntimeError)) as caught:
        ContextParallelGRPOMixin._share(trainer, lambda: 1 // number)
    return str(caught.value)


def test_rollouts_that_fail_do_so_on_all_ranks(pool: Pool) -> None:
    first, second = pool.run(2, share_error)
    assert second == f"the first rank of the axis failed with ZeroDivisionError: {first}"


@on_ranks(1)
def test_refuses_a_head_in_a_group_of_its_own() -> None:
    from parallel_plans.huggingface.trl import _check_head

    model = small_model("Llama")
    _check_head(model)
    fully_shard(model.lm_head, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match=r"sharded by itself, .* in a group with other"):
        _check_head(model)


pytest.importorskip("trl")

TEMPERATURE = 0.7
OWN = GROUPS | {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"page_size": 4},
}
SHORT = {"max_completion_length": 5, "temperature": TEMPERATURE, "max_steps": 3}
Turn = tuple[list[list[int]], list[list[int]], list[list[float]]]
"""Tokens of prompts and completions, and log-probabilities of the latter."""


def trained(folder: str, given: list[Turn] | None) -> tuple[dict[str, Any], Any, list[Turn]]:
    """Numbers of a training on two ranks, its weights, and what was generated or given."""
    turns: list[Turn] = []

    def from_outside(prompts: list[str], trainer: Any) -> dict[str, Any]:
        torch.randint(2**62, ())  # as our own draw, since TRL shuffles completions next
        names = "prompt_ids", "completion_ids", "logprobs"
        return dict(zip(names, (given or []).pop(0), strict=True))

    run = Run("GRPO", "prompt", options=(OWN if given is None else GROUPS) | SHORT)
    rollouts = {"rollout_func": None if given is None else from_outside}
    with harmless():
        trainer = trainer_of(run, folder, (1, 2), **rollouts)
        generate = trainer._generate_single_turn

        def noted(prompt_ids: list[list[int]], *others: Any) -> Any:
            turns.append((prompt_ids, *generate(prompt_ids, *others)))
            return turns[-1][1:]

        trainer._generate_single_turn = noted
        trainer.train()
    weights = {name: x.detach().clone() for name, x in trainer.model.named_parameters()}
    return counted_numbers(trainer), weights, turns


def both(folder: str) -> tuple[Turn, ...]:
    """Steps with own completions equal those with the same ones from outside."""
    numbers, weights, turns = trained(f"{folder}/own", None)
    assert len(turns) > 1
    wanted, given, none = trained(f"{folder}/given", list(turns))
    assert not none
    assert numbers == pytest.approx(wanted, rel=1e-6, abs=1e-7)
    torch.testing.assert_close(weights, given, rtol=1e-6, atol=1e-7)
    return tuple(turns)


def test_steps_equal_those_with_given_completions(pool: Pool, tmp_path: Any) -> None:
    found, other = pool.run(2, under_torchrun, both, str(tmp_path), timeout=300)
    assert found == other
    prompts, completions, logprobs = found[0]
    assert prompts[0] == prompts[1], "two completions of each prompt"
    assert any(x != y for x, y in zip(completions[::2], completions[1::2], strict=True))
    model = model_of(Run("GRPO", "prompt"))
    for prompt, completion, theirs in zip(prompts, completions, logprobs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / TEMPERATURE).log_softmax(-1)
        expected = expected.gather(1, torch.tensor(completion).unsqueeze(1))[:, 0]
        assert theirs == pytest.approx(expected.tolist(), abs=1e-5)
