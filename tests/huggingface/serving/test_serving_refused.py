"""Calls and requests that cannot be served: an error for those, and the others go on."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import ContinuousBatchingConfig

from dtensor_ring import RingError
from tests.huggingface.generation.generating import sharded, stock
from tests.huggingface.serving.workloads import (
    GREEDY,
    Arrival,
    Workload,
    check_pool,
    in_groups,
    prompt_of,
)
from tests.pool import on_ranks

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 2}, "decodes greedily or samples, .* beam_search; call generate"),
    "no assistant": ({"assistant_model": "gpt2"}, "must be a model, or a function .* got str"),
    "two assistants": (
        {"assistant_model": len, "prompt_lookup_num_tokens": 2},
        "assistant_model and prompt_lookup_num_tokens both propose tokens",
    ),
    "no token to look up": ({"prompt_lookup_num_tokens": 0}, "a number of tokens from 1, got 0"),
    "schedule": (
        {"prompt_lookup_num_tokens": 2, "num_assistant_tokens_schedule": "fast"},
        "num_assistant_tokens_schedule must be one of",
    ),
    "lossy drafts": (
        {"prompt_lookup_num_tokens": 2, "assistant_ensemble_weight": 0.5},
        "assistant_ensemble_weight=0.5 is not supported",
    ),
    "two tokenizers": ({"assistant_tokenizer": 1}, "assistant_tokenizer is not an option"),
    "early exit": ({"assistant_early_exit": 2}, "the options ask for assisted_generation"),
    "time": ({"max_time": 1.0}, "max_time=1.0 is not supported by generate_batch"),
    "mask": ({"attention_mask": 1}, "attention_mask is not an option of generate_batch"),
    "static": ({"cache_implementation": "static"}, "cache_implementation='static' is not"),
    "id": ({"request_id": "first"}, r"ids of requests must be new and differ, got \['first'\]"),
    "two greedy samples": ({"num_return_sequences": 2}, "num_return_sequences"),
}


def batch_of_one(model: Any, **options: Any) -> Any:
    batch = Workload((Arrival(0, prompt_of(0, 9), 5),), max_tokens=64).batch(model, **options)
    batch.add_request(prompt_of(0, 9), "first", max_new_tokens=5, **GREEDY)
    return batch


@on_ranks(2)
def test_calls_that_are_refused() -> None:
    model = sharded("Llama")
    batch = batch_of_one(model)
    for changes, match in REFUSED.values():
        before = batch.pool.usage(), list(batch._requests)
        with pytest.raises((ValueError, TypeError), match=match):
            batch.add_request(prompt_of(1, 5), **{"max_new_tokens": 2} | changes)
        assert (batch.pool.usage(), list(batch._requests)) == before
    with pytest.raises(TypeError, match=r"a prompt must be a row of token ids"):
        batch.add_request("text", max_new_tokens=2)
    with pytest.raises(ValueError, match="no request 'other' to cancel: it is unknown"):
        batch.cancel_request("other")
    outputs = list(batch)
    assert [x.request_id for x in outputs] == ["first"]
    assert len(outputs[0].generated_tokens) == 5
    with pytest.raises(ValueError, match=r"no request 'first' to cancel: .* ended before"):
        batch.cancel_request("first")


FAILED = {
    "empty": ((), "at least one token, got none"),
    "unknown token": ((3, 99), "tokens must be from 0 to 31, got 99"),
    "too long": (
        prompt_of(0, 90),
        "which need 12 blocks of 4 tokens on a rank, and the pool has 4",
    ),
}


@on_ranks(2)
def test_requests_that_fail() -> None:
    """The others end, in order of their own."""
    batch = batch_of_one(sharded("Llama"))
    for name, (prompt, _) in FAILED.items():
        batch.add_request(prompt, name, max_new_tokens=2, **GREEDY)
        check_pool(batch)
    outputs = {x.request_id: x for x in batch}
    assert list(outputs) == [*FAILED, "first"]
    for name, (_, match) in FAILED.items():
        assert match in outputs[name].error
        assert not outputs[name].generated_tokens
    assert outputs["first"].error is None
    assert not any(batch.pool.usage().held)


@on_ranks(2)
def test_ranks_whose_queues_differ() -> None:
    """A rank whose queue differs: all ranks say so, nothing was added, and the batch goes on."""
    model, rank = sharded("Llama"), dist.get_rank()
    batch = batch_of_one(model)
    for call, match in (
        (lambda: batch.add_request(prompt_of(rank, 5), max_new_tokens=2), "differ in tokens"),
        (
            lambda: batch.add_request((3,), max_new_tokens=2 + rank),
            "differ in max_new_tokens: 2 on",
        ),
        (lambda: batch.add_request((3,), max_new_tokens=2, seed=rank), "differ in seed"),
        (lambda: batch.cancel_request(["first", "x"][rank]), "differ in request to cancel"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
        assert list(batch._requests) == ["first"]
    assert len(next(iter(batch)).generated_tokens) == 5


def without_numbers(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Scores from which nothing can be drawn, after two tokens."""
    return scores * torch.inf if ids.shape[1] == 11 else scores


@pytest.mark.parametrize("groups", [(), ((0,), (1,))], ids=["one group", "two"])
@on_ranks(2)
def test_scores_that_give_no_token(groups: tuple[tuple[int, ...], ...]) -> None:
    """Such a request keeps the tokens before, also where the others are told; the others go on."""
    with in_groups(*groups) if groups else nullcontext():
        batch = batch_of_one(sharded("Llama"), return_logprobs=True)
        asked = {"max_new_tokens": 5, "do_sample": True}
        wrong = asked | {"logits_processor": [without_numbers]}
        batch.add_request(prompt_of(1, 9), "drawn", **wrong)
        batch.add_request(prompt_of(1, 9), "drafted", prompt_lookup_num_tokens=2, **wrong)
        batch.add_request(prompt_of(2, 9), "cold", temperature=1e-40, **asked)
        found = {x.request_id: x for x in batch}
    for name, length in (("drawn", 2), ("drafted", 2), ("cold", 0)):
        assert found[name].error.startswith("no token can be drawn, as scores are inf or NaN")
        assert len(found[name].generated_tokens) == len(found[name].logprobs) == length
    assert len(found["first"].generated_tokens) == 5
    assert not any(batch.pool.usage().held)


class Planted(Exception):
    """Of a processor on one rank."""


@on_ranks(2)
def test_a_rank_raises() -> None:
    """A rank raises in a step: the others are told, requests wait again, and no block is lost."""
    rank = dist.get_rank()

    def raises(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if rank and ids.shape[1] == 11:
            raise Planted
        return scores

    batch = Workload((Arrival(0, prompt_of(0, 9), 5),), max_tokens=64).batch(sharded("Llama"))
    batch.add_request(prompt_of(0, 9), max_new_tokens=5, logits_processor=[raises], **GREEDY)
    with pytest.raises(Planted if rank else RingError):
        list(batch)
    assert not any(batch.pool.usage().held)
    assert batch.has_requests()


@on_ranks(1)
def test_configs_that_are_refused() -> None:
    model = sharded("Llama")
    for changes, match in (
        ({"scheduler_type": "prefill_first"}, "scheduler_type='prefill_first' .* not supported"),
        ({"allow_block_sharing": False}, "allow_block_sharing=False"),
        ({"max_batch_tokens": 3, "max_requests_per_batch": 4}, "each request needs a token"),
    ):
        with pytest.raises(ValueError, match=match):
            model.generate_batch([[3]], None, ContinuousBatchingConfig(**changes))
    with pytest.raises(ValueError, match="persistent_manager are not supported"):
        model.generate_batch([[3]], persistent_manager=True)
    assert model.generate_batch([]) == {}
    longest = sharded("Llama, dynamic")
    with pytest.raises(ValueError, match="a rotary embedding whose factors depend on the longest"):
        longest.generate_batch([[3]])


@on_ranks(2)
def test_assistants_that_are_refused() -> None:
    """Assistants that cannot propose tokens; nothing was added, and the batch goes on."""
    model, rank = sharded("Llama"), dist.get_rank()
    batch = batch_of_one(model)
    other, seeded = stock("Llama"), stock("Llama")
    other.config.vocab_size = 40
    with torch.no_grad():
        seeded.lm_head.weight.add_(rank)
    for assistant, match in (
        (other, "assistant_model has 40 tokens in its vocabulary, and the model has 32"),
        (stock("Llama, dynamic"), "a rotary embedding whose factors depend on the longest"),
        (stock("Qwen3-Next"), "is a Qwen3NextForCausalLM, whose layers have states: tokens that"),
        (seeded, "have the same assistant_model .* differ in weights"),
    ):
        with pytest.raises(ValueError, match=match):
            batch.add_request((3, 4), max_new_tokens=2, assistant_model=assistant)
        assert list(batch._requests) == ["first"]
    assert len(next(iter(batch)).generated_tokens) == 5


@pytest.mark.parametrize(
    ("wrong", "match"),
    [([], "a list of tokens for each of 1"), ([[99]], "from 0 to 31, got 99")],
)
@on_ranks(2)
def test_functions_that_propose_nothing_of_use(wrong: Any, match: str) -> None:
    """What an assistant returns on one rank is no draft: all are told, and no block is lost."""
    rank, batch = dist.get_rank(), batch_of_one(sharded("Llama"))
    how = {"assistant_model": lambda *_: wrong if rank else [[5]], **GREEDY}
    batch.add_request((3, 4, 5), max_new_tokens=5, **how)
    with pytest.raises(ValueError if rank else RingError, match=match if rank else None):
        list(batch)
    assert not any(batch.pool.usage().held)


@on_ranks(2)
def test_ranks_whose_drafts_differ() -> None:
    """Ranks propose other tokens: all say so, in the message of a layer."""
    rank = dist.get_rank()
    batch = batch_of_one(sharded("Llama"))
    how = {"assistant_model": lambda *_: [[5 + rank]], **GREEDY}
    batch.add_request((3, 4, 5), max_new_tokens=5, **how)
    with pytest.raises(RingError):
        list(batch)
