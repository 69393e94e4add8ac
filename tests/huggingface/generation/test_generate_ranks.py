"""Ranks that generate: their messages, and what happens when they do not do the same."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from dtensor_ring import RingError
from dtensor_ring.agreement.group_state import OTHERS_TIMEOUT
from parallel_plans.huggingface import ContextParallelCache
from tests.huggingface.generation.generating import (
    NUM_NEW,
    check_bits,
    decode_messages,
    generate,
    sharded,
    tokens,
)
from tests.pool import on_ranks


class OtherToken(transformers.LogitsProcessor):
    """Chooses another token on the last rank, at a step."""

    def __init__(self, step: int, token: int) -> None:
        self.left, self.token = step, token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0 and dist.get_rank() == dist.get_world_size() - 1:
            scores[:, self.token] = scores.max() + 1
        return scores


class Raises(OtherToken):
    """Raises there."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0 and dist.get_rank() == dist.get_world_size() - 1:
            raise KeyError("planted")
        return scores


PLANTED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "another token": (OtherToken(3, 7), {}, "differ in tokens given as agree: .* rank"),
    "another last token": (OtherToken(NUM_NEW, 7), {}, "differ in tokens: .* rank"),
    "an early end": (
        OtherToken(3, 1),
        {"eos_token_id": 1, "min_new_tokens": 0},
        "differ in direction: .*the end of generate",
    ),
    "an error": (Raises(3, 0), {}, "KeyError: 'planted'"),
}


@pytest.mark.parametrize("name", PLANTED)
@on_ranks(3)
def test_ranks_that_drift_apart(name: str) -> None:
    planted, options, match = PLANTED[name]
    ours = sharded("Llama")
    is_last = dist.get_rank() == dist.get_world_size() - 1
    expected = KeyError if name == "an error" and is_last else RingError
    with pytest.raises(expected, match="planted" if expected is KeyError else match):
        generate(ours, input_ids=tokens(), logits_processor=[planted], **options)


def fails(batch: int, ids: Tensor) -> list[int]:
    raise KeyError("planted on all")


@on_ranks(2)
def test_ranks_that_begin_differently() -> None:
    """What differs before the first token is named, and the group goes on."""
    ours, rank = sharded("Llama"), dist.get_rank()
    for changes, match in (
        ({"input_ids": tokens() + rank}, "differ in input_ids: .*checksum"),
        ({"max_new_tokens": 3 + rank}, "differ in max_new_tokens: 3 on .0., 4 on .1."),
        ({"stop_strings": ["a" * (1 + rank)]}, "differ in stop_strings"),
        ({"logits_processor": [Raises(9, 0)][rank:]}, "differ in logits_processor"),
    ):
        with pytest.raises(ValueError, match=match):
            generate(ours, **{"input_ids": tokens()} | changes)
    torch.manual_seed(rank)
    asked = {"input_ids": tokens(), "max_new_tokens": 2}
    with pytest.raises(ValueError, match=r"torch.manual_seed\(s\), one s .* random state"):
        ours.generate(**asked, do_sample=True)
    found = ours.generate(**asked)
    check_bits(found)
    # Late: what all ranks are refused alike is no failure.
    time.sleep((OTHERS_TIMEOUT + 0.2) * rank)
    with pytest.raises(ValueError, match="max_time would stop"):
        ours.generate(**asked, max_time=1.0)
    with pytest.raises(KeyError, match="planted on all"):  # the group stays in order
        ours.generate(**asked, prefix_allowed_tokens_fn=fails)
    assert torch.equal(ours.generate(**asked), found)


OTHER_TURNS = {
    "tokens": (70, 70, "differ in input_ids"),
    "a number": (70, 2, "differ in direction"),
}


@pytest.mark.parametrize("name", OTHER_TURNS)
@on_ranks(3)
@torch.no_grad()
def test_other_turns_of_a_cache(name: str) -> None:
    """All ranks raise, after whatever number of forwards on which they agreed."""
    ours, is_last = sharded("Gemma 3"), dist.get_rank() == dist.get_world_size() - 1
    first, last, match = OTHER_TURNS[name]
    cache = ContextParallelCache(ours)
    ours(tokens(), cache=cache)
    with pytest.raises(RingError, match=match):
        ours(tokens(last).flip(1) if is_last else tokens(first), cache=cache)
    assert cache.get_seq_length() == 13


@on_ranks(2)
def test_one_message_for_each_full_layer() -> None:
    full = {"Llama": 2, "Gemma 3": 1, "Mistral, short window": 0, "DeepSeek-V3": 2}
    for family, expected in full.items():
        found = decode_messages(sharded(family), {"input_ids": tokens()})
        assert found == [expected] * 3, family
