"""Workloads of a continuous batch, and each of their requests alone on the stock model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from string import ascii_lowercase
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    ContinuousBatchingConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

from parallel_plans.huggingface.serving.continuous_batch import ContinuousBatch
from tests.families import VOCABULARY
from tests.huggingface.generation.generating import exact_softmax
from tests.paged.test_block_pool import check_counts

Options = dict[str, Any]


@cache
def letters() -> PreTrainedTokenizerFast:
    """A tokenizer of all tokens: letters, and pairs of them, so that texts do not end tokens."""
    pairs = [("a", "b"), ("b", "c"), ("c", "a"), ("a", "a")]
    texts = ["<pad>", "<end>", *ascii_lowercase, *map("".join, pairs)]
    tokenizer = Tokenizer(models.BPE({x: i for i, x in enumerate(texts)}, pairs))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


class FewerOfThoseBefore(LogitsProcessor):
    """The frequency penalty of OpenAI's interface, which a GenerationConfig does not have."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.nn.functional.one_hot(input_ids, scores.shape[1]).sum(1)
        return scores - 0.4 * counts


def _every_third(batch: int, tokens: Tensor) -> list[int]:
    return [*range(len(tokens) % 3, VOCABULARY, 3)]


def _ends(ids: Tensor, scores: Tensor) -> Tensor:
    return (ids[:, -1] % 3 == 0) & (ids.shape[1] > 13)


SAMPLED = {"do_sample": True, "temperature": 1.5}
CHOICES: dict[str, Options] = {
    "greedy": {},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[3], [4, 5], [9, 9, 2]]},
    "sequence_bias": {"sequence_bias": [[[5], 0.4], [[6, 7], -1.0]]},
    "encoder penalties": {"encoder_repetition_penalty": 1.4, "encoder_no_repeat_ngram_size": 2},
    "suppress_tokens": {"suppress_tokens": [2, 7, 11], "begin_suppress_tokens": [3, 5]},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": [*range(2, 32, 3)]},
    "eos_token_id": {"eos_token_id": [*range(2, 32, 5)]},
    "forced_eos_token_id": {"forced_eos_token_id": 4, "eos_token_id": 4},
    "exponential_decay_length_penalty": {
        "exponential_decay_length_penalty": (2, 1.3),
        "eos_token_id": 8,
    },
    "stop_strings": {"stop_strings": ["a", "bc", "fx", "op", "t"], "tokenizer": letters()},
    "stopping_criteria": {"stopping_criteria": [_ends]},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": _every_third},
    "logits_processor": {"logits_processor": LogitsProcessorList([FewerOfThoseBefore()])},
    "sampled": SAMPLED,
    "sampled, top_p": SAMPLED | {"top_p": 0.8},
    "sampled, top_k": {"do_sample": True, "top_k": 5, "no_repeat_ngram_size": 2},
    "sampled, min_p": SAMPLED | {"min_p": 0.05, "renormalize_logits": True},
    "sampled, cutoffs": SAMPLED
    | {"typical_p": 0.9, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01, "top_h": 0.9},
    "sampled, penalties": SAMPLED | {"repetition_penalty": 1.2, "bad_words_ids": [[3], [4, 5]]},
    "sampled, stop_strings": SAMPLED | {"stop_strings": ["e", "xy", "ca"], "tokenizer": letters()},
    "sampled, watermark": SAMPLED | {"watermarking_config": WatermarkingConfig(bias=1.0)},
    "sampled, SynthID": SAMPLED
    | {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[5, 9, 3])},
    "sampled, logits_processor": SAMPLED
    | {"logits_processor": LogitsProcessorList([FewerOfThoseBefore()])},
}


LONGEST = 300
"""Tokens of a prompt and of what follows."""
GREEDY = {"eos_token_id": None, "pad_token_id": 0}


@dataclass(frozen=True)
class Arrival:
    """A request, the step before which it comes, and that before which it is cancelled.

    `kind` is the name of its options in `CHOICES`; several samples are always sampled.
    """

    step: int
    prompt: tuple[int, ...]
    num_new: int
    num_samples: int = 1
    cancelled: int | None = None
    kind: str = "greedy"

    @property
    def how(self) -> dict[str, Any]:
        """Its options, but for its length and the number of samples."""
        return GREEDY | CHOICES[self.kind] | ({"do_sample": True} if self.num_samples > 1 else {})

    def names(self, number: int) -> list[str]:
        """The ids of its outputs."""
        return [str(number), *(f"{number}__child#{i}" for i in range(self.num_samples - 1))]


@dataclass(frozen=True)
class Workload:
    """Requests and sizes of the pool; `spare` blocks more than the longest of them needs."""

    arrivals: tuple[Arrival, ...]
    block: int = 4
    spare: int = 2
    max_tokens: int = 16
    max_requests: int = 8

    def batch(self, model: Any, **options: Any) -> ContinuousBatch:
        """One whose pool is just large enough."""
        return self.batch_of(model, model.context_parallel_sharding.axis.mesh.size(), **options)

    def batch_of(
        self, model: Any, size: int, groups: dict[str, Any] | None = None, **options: Any
    ) -> ContinuousBatch:
        """One whose pool is just large enough on so many ranks."""
        longest = max(len(x.prompt) + x.num_new for x in self.arrivals) - 1
        config = ContinuousBatchingConfig(
            page_size=self.block,
            num_blocks=-(-longest // (self.block * size)) + self.spare,
            max_batch_tokens=self.max_tokens,
            max_requests_per_batch=self.max_requests,
            seed=7,
            **options,
        )
        return model.init_continuous_batching(None, config, **groups or {})


@contextmanager
def in_groups(prefill: tuple[int, ...], decode: tuple[int, ...]) -> Iterator[None]:
    """Batches of workloads have these groups; all ranks must call it."""
    meshes = [DeviceMesh("cpu", [*ranks]) for ranks in (prefill, decode)]
    size = min(len(prefill), len(decode))

    def batch(self: Workload, model: Any, **options: Any) -> Any:
        groups = {"prefill": meshes[0], "decode": meshes[1]}
        return self.batch_of(model, size, groups, **options)

    with mock.patch.object(Workload, "batch", batch):
        yield


def served(model: Any, workload: Workload, **options: Any) -> tuple[ContinuousBatch, dict]:
    """The batch at its end, and the outputs by id; the pool is checked after each step."""
    batch, outputs, step = workload.batch(model), {}, 0
    while batch.has_requests() or any(x.step >= step for x in workload.arrivals):
        for number, arrival in enumerate(workload.arrivals):
            if arrival.step == step:
                how = arrival.how | {"max_new_tokens": arrival.num_new, **options}
                how |= {"num_return_sequences": arrival.num_samples}
                batch.add_request(arrival.prompt, str(number), seed=100 * number, **how)
            if arrival.cancelled == step and str(number) in batch._requests:
                batch.cancel_request(str(number))
        outputs |= {x.request_id: x for x in batch.step()}
        check_pool(batch)
        step += 1
        assert step < 5000, "it does not end"
    usage = batch.pool.usage()
    assert not usage.num_sequences
    assert not any(usage.held)
    return batch, outputs


def check_pool(batch: ContinuousBatch) -> None:
    """Each block is held by the sequences of requests that run, and by no others."""
    scheduler = batch._scheduler
    running = scheduler.prefilling + scheduler.decoding
    assert len(running) == batch.pool.usage().num_sequences
    assert all(x.sequence is None for x in scheduler.waiting)
    check_counts(batch.pool, [x.held for x in running])


def check_workload(model: Any, alone: Any, workload: Workload, **options: Any) -> ContinuousBatch:
    """All requests have the tokens that the stock model gives to each of them alone."""
    batch, outputs = served(model, workload, **options)
    for number, arrival in enumerate(workload.arrivals):
        for sample, name in enumerate(arrival.names(number)):
            output = outputs[name]
            assert output.prompt_ids == list(arrival.prompt)
            expected = alone(arrival, 100 * number + sample)
            if output.error is not None:
                assert arrival.cancelled is not None
                assert "cancelled" in output.error
                expected = expected[: len(output.generated_tokens)]
            assert output.generated_tokens == expected, f"{name} of {workload}"
    return batch


def alone_on(model: Any) -> Any:
    """What the stock model gives to a prompt, with the random state of a seed."""

    @cache
    def generate(prompt: tuple[int, ...], num_new: int, kind: str, seed: int | None) -> list[int]:
        with exact_softmax(), torch.random.fork_rng():
            torch.manual_seed(seed or 0)
            how = {"do_sample": seed is not None, **GREEDY, **CHOICES[kind]}
            found = model.generate(torch.tensor([prompt]), max_new_tokens=num_new, **how)
        return found[0, len(prompt) :].tolist()

    def alone(arrival: Arrival, seed: int) -> list[int]:
        is_drawn = arrival.how.get("do_sample")
        given = arrival.prompt, arrival.num_new, arrival.kind
        return generate(*given, seed if is_drawn else None)

    return alone


def prompt_of(kind: int, num_tokens: int) -> tuple[int, ...]:
    """The first tokens of one of a few endless texts."""
    generator = torch.Generator().manual_seed(kind)
    return tuple(
        torch.randint(2, VOCABULARY, (LONGEST,), generator=generator)[:num_tokens].tolist()
    )


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    """Prompts begin like one of two texts, and go on like another."""
    num_new = draw(st.integers(1, 8))
    # Most are short, since a long prompt takes many steps.
    longest = draw(st.sampled_from([12, 12, 40, LONGEST - 8]))
    shared, own = draw(st.integers(0, longest)), draw(st.integers(0, 4))
    prompt = prompt_of(draw(st.integers(0, 1)), shared) + prompt_of(
        2 + draw(st.integers(0, 2)), own
    )
    step = draw(st.integers(0, 6))
    cancelled = draw(st.none() | st.none() | st.integers(step + 1, step + 8))
    return Arrival(step, prompt or (5,), num_new, draw(st.sampled_from([1, 1, 1, 3])), cancelled)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    return Workload(
        tuple(draw(st.lists(arrivals(), min_size=2, max_size=6))),
        block=draw(st.sampled_from([1, 4, 8])),
        spare=draw(st.sampled_from([0, 1, 4, 40])),
        max_tokens=draw(st.sampled_from([4, 16, 64, 400])),
        max_requests=draw(st.sampled_from([1, 2, 4])),
    )
