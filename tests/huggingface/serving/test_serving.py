"""What steps of a batch compute, send and keep, and what is refused: the other requests go on."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import ContinuousBatchingConfig

from dtensor_ring import RingError
from dtensor_ring.transport.transport import ProcessGroupTransport
from tests.huggingface.generation.generating import SEND_RECORD, Collectives, sharded, stock
from tests.huggingface.serving.workloads import (
    GREEDY,
    Arrival,
    Workload,
    alone_on,
    check_pool,
    check_workload,
    in_groups,
    prompt_of,
    served,
)
from tests.pool import Pool, on_ranks

BLOCK, LENGTHS = 4, (17, 17, 18, 9, 9, 22, 1)
"""Of prompts: two new tokens fill no block."""


def shared_prompts() -> list[tuple[int, ...]]:
    """Prompts with two beginnings, some of them equal."""
    return [prompt_of(number % 2, length) for number, length in enumerate(LENGTHS)] + [
        prompt_of(0, 8) + prompt_of(5, 5)
    ]


@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks()
def test_prefixes_are_computed_once() -> None:
    """Each full block that several prompts begin with is computed once, and kept once."""
    prompts = shared_prompts()
    arrivals = tuple(Arrival(number // 4, prompt, 2) for number, prompt in enumerate(prompts))
    batch, _ = served(sharded("Llama"), Workload(arrivals, BLOCK, 99, 24, 16))
    # The last token of a prompt is decoded.
    ends = [(prompt, (len(prompt) - 1) // BLOCK * BLOCK) for prompt in prompts]
    blocks = {prompt[:end] for prompt, last in ends for end in range(BLOCK, last + 1, BLOCK)}
    rest = sum(len(prompt) - 1 - last for prompt, last in ends)
    assert batch.counts.prefilled == BLOCK * len(blocks) + rest
    assert batch.counts.prefilled + batch.counts.cached == sum(len(x) - 1 for x in prompts)
    assert sum(batch.pool.usage().cached) == len(blocks)


@on_ranks(2)
def test_samples_share_a_prompt() -> None:
    """Samples of a prompt share its blocks: a prompt is computed once, but for its last token.

    The last block that they share is not full, so each gets a copy of it.
    """
    prompt, num_samples, num_new = prompt_of(0, BLOCK + 4), 4, 8
    workload = Workload((Arrival(0, prompt, num_new, num_samples),), BLOCK, 20, 64, 8)
    batch = check_workload(sharded("Llama"), alone_on(stock("Llama")), workload)
    assert batch.counts.prefilled == len(prompt) - 1
    assert batch.counts.decoded == num_new * num_samples


@pytest.mark.parametrize("family", ["Llama", "Gemma 3"])
@on_ranks(2)
def test_one_message_for_each_layer(family: str) -> None:
    """For the whole batch, in each step after prompts were prefilled; models have two layers."""
    model, counts = sharded(family), []
    arrivals = tuple(Arrival(0, prompt_of(i, 9 + i), 6) for i in range(5))
    batch = Workload(arrivals, BLOCK, 99, 400, 16).batch(model)
    batch.add_requests([x.prompt for x in arrivals], max_new_tokens=6, **GREEDY)
    batch.step()
    while batch.has_requests():
        with (
            mock.patch.object(ProcessGroupTransport, "send_record", autospec=True) as send_record,
            mock.patch.object(ProcessGroupTransport, "start") as start,
            Collectives() as collectives,
        ):
            send_record.side_effect = SEND_RECORD
            batch.step()
        assert not [x for call in start.call_args_list for side in call.args for x in side]
        # Call records carry what is merged; nothing else is sent.
        assert {*collectives.found} <= {"c10d.send.default", "c10d.recv_.default"}
        assert collectives.found.count("c10d.send.default") <= send_record.call_count
        counts.append(send_record.call_count)
    assert counts == [2] * 6


def counted(batch: Any) -> tuple[int, int]:
    return batch.counts.prefilled, batch.counts.decoded


@on_ranks(2)
def test_a_step_runs_the_model_once() -> None:
    """A step runs the model once, and each layer has one ring, whatever comes and goes."""
    model = sharded("Llama")
    axis = type(model.context_parallel_sharding.axis)
    arrivals = [Arrival(step, prompt_of(i, 3 + 5 * i), 4) for i, step in enumerate((0, 0, 1, 2, 2))]
    batch = Workload(tuple(arrivals), BLOCK, 99, 12, 8).batch(model)
    attention, kinds = axis.attention, set()
    with (
        mock.patch.object(model, "forward", wraps=model.forward) as forward,
        mock.patch.object(axis, "attention", autospec=True, side_effect=attention) as rings,
    ):
        for step in range(12):
            prompts = [x.prompt for x in arrivals if x.step == step]
            if prompts:
                batch.add_requests(prompts, max_new_tokens=4, **GREEDY)
            before = counted(batch)
            batch.step()
            computes = [x > y for x, y in zip(counted(batch), before, strict=True)]
            kinds.add(tuple(computes))
            assert (forward.call_count, rings.call_count) == (any(computes), 2 * computes[0])
            forward.reset_mock()
            rings.reset_mock()
    assert kinds == {(True, False), (True, True), (False, True), (False, False)}


@on_ranks(3)
def test_bytes_of_a_rank() -> None:
    """A rank keeps its part of the tokens, and at most a block of each sequence more."""
    model = sharded("Llama")
    size, rank = model.context_parallel_sharding.axis.mesh.size(), torch.distributed.get_rank()
    prompts = [prompt_of(i, 30 + 7 * i) for i in range(4)]
    batch = Workload(tuple(Arrival(0, x, 4) for x in prompts), BLOCK, 99, 400, 16).batch(model)
    batch.add_requests(prompts, max_new_tokens=4, **GREEDY)
    batch.step()
    tokens = sum(map(len, prompts))
    assert BLOCK * batch.pool.usage().held[rank] <= tokens / size + BLOCK * len(prompts)


def sampled_tokens(seeds: tuple[int, ...]) -> dict[int, tuple[list[int], list[float]]]:
    """By seed, the tokens of a request and their log-probabilities."""
    model = sharded("Llama")
    arrivals = tuple(Arrival(0, prompt_of(seed, 11), 6) for seed in seeds)
    batch = Workload(arrivals, BLOCK, 20, 400, 16).batch(model, return_logprobs=True)
    for seed, arrival in zip(seeds, arrivals, strict=True):
        how = {"do_sample": True, "temperature": 1.5, "max_new_tokens": arrival.num_new, **GREEDY}
        batch.add_request(arrival.prompt, str(seed), seed=seed, **how)
    return {int(x.request_id): (x.generated_tokens, x.logprobs) for x in batch}


def test_sampled_tokens_do_not_depend_on_the_batch(pool: Pool) -> None:
    """They are those that the stock model samples from a random state with their seed."""
    together = pool.run(2, sampled_tokens, (1, 2, 3, 4))
    assert together[0] == together[1]
    for seed in (1, 3):
        alone = pool.run(2, sampled_tokens, (seed,))[0][seed]
        assert alone[0] == together[0][seed][0]
        assert alone[1] == pytest.approx(together[0][seed][1], abs=1e-6)
    model: Any = stock("Llama")
    torch.manual_seed(3)
    how = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 6, **GREEDY}
    found = model.generate(torch.tensor([prompt_of(3, 11)]), **how)
    assert found[0, 11:].tolist() == together[0][3][0]


@on_ranks(2)
def test_eight_bits() -> None:
    """About a fourth of the bytes of float64 and more, and the tokens of a batch of one."""
    found = {}
    prompts = [prompt_of(i, 40) for i in range(3)]
    arrivals = tuple(Arrival(0, x, 4) for x in prompts)
    for kv_dtype in (None, "int8"):
        batch, outputs = served(
            sharded("Llama", cache_dtype=kv_dtype), Workload(arrivals, 8, 9, 400, 4)
        )
        found[kv_dtype] = batch.num_bytes, {k: x.generated_tokens for k, x in outputs.items()}
    assert found["int8"][0] < 0.5 * found[None][0]
    for number, arrival in enumerate(arrivals):
        _, alone = served(sharded("Llama", cache_dtype="int8"), Workload((arrival,), 8, 9, 400, 4))
        assert alone["0"].generated_tokens == found["int8"][1][str(number)]


@on_ranks(2)
def test_requests_stop() -> None:
    """A request ends after a token that ends sequences, like the stock model alone."""
    model, alone, ends = sharded("Llama"), stock("Llama"), [*range(2, 32, 3)]
    how = {"max_new_tokens": 12, "eos_token_id": ends, "pad_token_id": 0, "repetition_penalty": 1.1}
    prompts = [prompt_of(i, 9 + i) for i in range(4)]
    found = model.generate_batch(prompts, **how)
    assert list(found) == [f"req_{i}" for i in range(4)]
    for prompt, output in zip(prompts, found.values(), strict=True):
        expected = alone.generate(torch.tensor([prompt]), **how)[0, len(prompt) :].tolist()
        assert output.generated_tokens == expected
        assert output.is_finished()
    assert len({len(x.generated_tokens) for x in found.values()}) > 1


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
    """A request that fails ends at once, and the other requests end as usual."""
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
    [([], "a list of tokens for each of 1"), ([[99]], "from 0 to 31, got 99"), ([[6]], None)],
)
@on_ranks(2)
def test_drafts_of_one_rank(wrong: Any, match: str | None) -> None:
    """What an assistant returns on one rank is no draft, or another one: all ranks say so."""
    rank, batch = dist.get_rank(), batch_of_one(sharded("Llama"))
    how = {"assistant_model": lambda *_: wrong if rank else [[5]], **GREEDY}
    batch.add_request((3, 4, 5), max_new_tokens=5, **how)
    is_own = rank and match is not None
    with pytest.raises(ValueError if is_own else RingError, match=match if is_own else None):
        list(batch)
    assert not any(batch.pool.usage().held)
