"""GRPO with completions that the ranks generate themselves, by `generate_batch`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.huggingface.trainers.test_trainer import under_torchrun
from tests.huggingface.trainers.test_trl import GROUPS
from tests.huggingface.trainers.trl_runs import Run, counted_numbers, harmless, model_of, trainer_of
from tests.pool import Pool

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
