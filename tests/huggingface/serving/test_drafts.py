"""Several tokens of a request in a step: they are those without drafts, whatever is proposed."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from parallel_plans.huggingface.serving.drafts import looked_up
from parallel_plans.huggingface.serving.verify import Draft, drawn
from tests.huggingface.generation.generating import sharded, stock
from tests.huggingface.serving.test_workloads import FULL_POOL
from tests.huggingface.serving.workloads import (
    CHOICES,
    GREEDY,
    Arrival,
    Options,
    Workload,
    alone_on,
    check_workload,
    in_groups,
    prompt_of,
    served,
)
from tests.pool import Pool, on_ranks


def repeated(kind: int, num_tokens: int) -> tuple[int, ...]:
    """A prompt in which lookups find something."""
    return (prompt_of(kind, 7) * num_tokens)[:num_tokens]


MIXED = Workload(
    (
        Arrival(0, repeated(0, 17), 12),
        Arrival(0, repeated(0, 17), 9, num_samples=3),
        Arrival(1, repeated(1, 30), 14),
        Arrival(1, prompt_of(2, 5), 12, cancelled=4),
        Arrival(2, (5,), 10),
        Arrival(3, repeated(0, 17) + prompt_of(3, 4), 11),
    ),
    spare=30,
    max_tokens=64,
)
"""Prompts that share blocks, forks, a cancelled request and one of a single token."""
FULL = replace(FULL_POOL, max_tokens=36)
"""More requests than the pool has room for: some give way while others are verified."""


def knowing(alone: Any, workload: Workload, num_right: int) -> Callable[..., Any]:
    """Proposes tokens of which only every n-th is wrong; the wrong ones differ by position."""
    known = [(*x.prompt, *alone(x, 0)) for x in workload.arrivals if x.num_samples == 1]

    def propose(sequences: Sequence[Any], counts: Sequence[int]) -> list[list[int]]:
        found = []
        for tokens, count in zip(sequences, counts, strict=True):
            begin, draft = len(tokens), []
            follows = [x[begin:] for x in known if x[:begin] == tuple(tokens)]
            for number, token in enumerate(follows[0][:count] if follows else ()):
                is_wrong = (begin + number) % (num_right + 1) == num_right
                draft.append((token + 1) % 32 if is_wrong else token)
            found.append(draft)
        return found

    return propose


def assistant_of(kind: str, family: str, alone: Any, workload: Workload) -> Options:
    """Options of one way to propose tokens."""
    if kind == "lookup":
        return {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 2}
    if kind == "right or wrong":
        function = knowing(alone, workload, 2)
        return {"assistant_model": function, "num_assistant_tokens": 5}
    if kind == "longer and shorter":
        how = {"num_assistant_tokens": 2, "num_assistant_tokens_schedule": "heuristic"}
        return {"assistant_model": knowing(alone, workload, 9), **how}
    assistant = nearly(sharded(family) if kind == "planned" else stock("Llama"))
    how = {"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.0}
    return {"assistant_model": assistant, **how}


def nearly(model: Any) -> Any:
    """Weights that differ a little, so that some tokens do."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for x in model.parameters():
            x.mul_(1 + 0.3 * torch.randn(x.shape, generator=generator))
    return model


def check_drafts(family: str, kind: str, workloads: list[Workload], groups: Any) -> Counter[str]:
    model, alone, found = sharded(family), alone_on(stock(family)), Counter[str]()
    for workload in workloads:
        options = assistant_of(kind, family, alone, workload)
        with in_groups(*groups) if groups else nullcontext():
            counts = check_workload(model, alone, workload, **options).counts
        names = "proposed", "accepted", "preempted", "steps", "decoded"
        found += Counter({name: getattr(counts, name) for name in names})
    return found


def greedy(workload: Workload) -> Workload:
    """Without samples: an assistant that is sure of nothing gives them other tokens."""
    return replace(workload, arrivals=tuple(replace(x, num_samples=1) for x in workload.arrivals))


CASES: list[tuple[str, int, str, Any]] = [
    ("Llama", 1, "lookup", None),
    ("Llama", 2, "right or wrong", None),
    ("gpt-oss", 3, "longer and shorter", None),
    ("DeepSeek-V3", 2, "right or wrong", None),
    ("Qwen3-Next", 2, "right or wrong", None),
    ("Llama", 2, "stock", None),
    ("Gemma 3", 3, "planned", ((0,), (1, 2))),
]
REPEATED = [
    # Each family and each way to propose is above, and two groups are.
    ("Llama", 2, "longer and shorter", ((0,), (1,))),
    ("Gemma 3", 2, "right or wrong", None),
    ("Llama", 3, "lookup", None),
    ("Gemma 3", 2, "planned", None),
    ("Llama", 3, "lookup", ((0, 1), (2,))),
    ("Llama", 3, "stock", ((0,), (1, 2))),
    ("Llama", 2, "planned", ((0, 1), (0, 1))),
    ("Gemma 3", 4, "right or wrong", ((0, 1, 2, 3), (1, 2))),
    ("gpt-oss", 4, "longer and shorter", ((0, 1), (2, 3))),
    ("DeepSeek-V3", 4, "right or wrong", ((2, 3), (0, 1))),
    ("Qwen3-Next", 3, "right or wrong", ((0, 1), (2,))),
]


@pytest.mark.parametrize(
    ("family", "world_size", "kind", "groups"),
    [*CASES, *(pytest.param(*x, marks=pytest.mark.repeats) for x in REPEATED)],
)
def test_tokens_are_those_without_drafts(
    pool: Pool, family: str, world_size: int, kind: str, groups: Any
) -> None:
    """Samples, too, unless the assistant samples what it proposes."""
    workloads = [MIXED, FULL]
    if kind in ("stock", "planned"):
        workloads = [greedy(x) for x in workloads]
    found: Any = pool.run(world_size, check_drafts, family, kind, workloads, groups)
    assert all(counts == found[0] for counts in found)
    counts = found[0]
    assert counts["preempted"]
    assert counts["proposed"] > counts["accepted"] > 10


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@on_ranks(2)
def test_eight_bits_stay_as_they_are_without_drafts(kv_dtype: str) -> None:
    """Also where tokens of a draft end a block, or would: the tokens and their scores."""
    arrivals = tuple(Arrival(0, prompt_of(i, 13 + 5 * i), 20) for i in range(3))
    workload = Workload(arrivals, block=8, spare=30, max_tokens=64)
    model = sharded("Llama", cache_dtype=kv_dtype)
    plain, expected = served(model, workload)

    def alone(arrival: Arrival, seed: int) -> list[int]:
        found = (x for x in expected.values() if x.prompt_ids == [*arrival.prompt])
        return next(found).generated_tokens

    for num_right in (9, 2):
        how = {"assistant_model": knowing(alone, workload, num_right), "num_assistant_tokens": 7}
        batch, found = served(model, workload, **how)
        for name, output in expected.items():
            assert found[name].generated_tokens == output.generated_tokens
        assert batch.counts.steps < plain.counts.steps
        assert batch.counts.accepted > 10


@on_ranks(2)
def test_requests_of_many_kinds_in_one_batch() -> None:
    """In one batch, each has the tokens that the stock model gives to it alone."""
    model, alone = sharded("Llama"), stock("Llama")
    prompts = [prompt_of(i, 11) for i in range(len(CHOICES))]
    expected = []
    for prompt, how in zip(prompts, CHOICES.values(), strict=True):
        torch.manual_seed(9)
        ids = torch.tensor([prompt])
        found = alone.generate(ids, max_new_tokens=12, **GREEDY | how)[0, 11:].tolist()
        expected.append(found)
    known = [(*x, *y) for x, y in zip(prompts, expected, strict=True)]

    def propose(sequences: Sequence[Any], counts: Sequence[int]) -> list[list[int]]:
        """Two tokens that are right, and others, also after the end."""
        follows = [next(y for y in known if y[: len(x)] == tuple(x)) for x in sequences]
        pairs = zip(follows, sequences, strict=True)
        return [[*y[len(x) :][:2], 3, 4][:n] for (y, x), n in zip(pairs, counts, strict=True)]

    arrivals = tuple(Arrival(0, x, 12) for x in prompts)
    batch = Workload(arrivals, 4, 99, 400, 16).batch(model, return_logprobs=True)
    for number, how in enumerate(CHOICES.values()):
        options = {"assistant_model": propose, "num_assistant_tokens": 4, "seed": 9}
        asked = options | GREEDY | how
        batch.add_request(prompts[number], str(number), max_new_tokens=12, **asked)
    for output in batch:
        number = int(output.request_id)
        assert output.generated_tokens == expected[number], [*CHOICES][number]
        assert len(output.logprobs) == len(expected[number])
    assert batch.counts.accepted > 20


def sampled(groups: Any, seeds: tuple[int, ...]) -> dict[int, tuple[list[int], list[float]]]:
    """By seed, the tokens of a request whose assistant samples, and their log-probabilities."""
    model, assistant = sharded("Llama"), nearly(stock("Llama"))
    arrivals = tuple(Arrival(0, prompt_of(seed, 11), 16) for seed in seeds)
    # So few blocks that requests together give way.
    with in_groups(*groups) if groups else nullcontext():
        batch = Workload(arrivals, 4, 3, 40, 8).batch(model, return_logprobs=True)
    how = {"do_sample": True, "temperature": 2.0, "assistant_model": assistant, **GREEDY}
    how |= {"num_assistant_tokens": 4, "assistant_confidence_threshold": 0.05}
    for seed, arrival in zip(seeds, arrivals, strict=True):
        batch.add_request(arrival.prompt, str(seed), seed=seed, max_new_tokens=16, **how)
    found = {int(x.request_id): (x.generated_tokens, x.logprobs) for x in batch}
    are_many = len(seeds) > 1
    assert batch.counts.accepted > 0
    assert batch.counts.proposed - batch.counts.accepted >= are_many
    assert bool(batch.counts.preempted) == are_many
    return found


@pytest.mark.parametrize("groups", [None, pytest.param(((0,), (1,)), marks=pytest.mark.repeats)])
def test_sampled_drafts_do_not_depend_on_the_batch(pool: Pool, groups: Any) -> None:
    together = pool.run(2, sampled, groups, (1, 2, 3, 4))
    assert together[0] == together[1]
    alone, expected = pool.run(2, sampled, groups, (4,))[0][4], together[0][4]
    assert alone[0] == expected[0]
    assert alone[1] == pytest.approx(expected[1], abs=1e-6)


def test_lookups_are_those_of_transformers() -> None:
    generator, num_found = torch.Generator().manual_seed(0), 0
    for number in range(200):
        tokens = torch.randint(2 + number % 7, (1 + number % 23,), generator=generator).tolist()
        for ngram, count in ((1, 3), (2, 4), (3, 2)):
            stock_lookup = PromptLookupCandidateGenerator(None, count, ngram, max_length=100)
            candidates, _ = stock_lookup.get_candidates(torch.tensor([tokens]))
            found = looked_up(array("q", tokens), ngram, count)
            assert tokens + found == candidates[0].tolist()
            num_found += len(found)
    assert num_found > 500


NUM_DRAWS = 20_000


def check_chi_square(counts: Tensor, expected: Tensor) -> None:
    """The counts are those of a sample: what is less likely than one in 10,000 fails."""
    is_possible = expected > 0
    assert not counts[~is_possible].any()
    observed, expected = counts[is_possible].double(), expected[is_possible].double()
    expected = expected / expected.sum() * observed.sum()
    assert expected.min() > 5, "too few draws"
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    # The cube root of chi-square over its degrees of freedom is nearly normal (Wilson, Hilferty).
    spread = math.sqrt(2 / (9 * freedom))
    deviation = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / spread
    assert deviation < 3.72, f"chi-square {statistic:.1f} of {freedom} degrees of freedom"


def likely(seed: int, num_tokens: int, sharpness: float = 1.0, num_impossible: int = 0) -> Tensor:
    """Probabilities of which some are 0."""
    generator = torch.Generator().manual_seed(seed)
    scores = sharpness * torch.randn(num_tokens, generator=generator)
    scores[torch.randperm(num_tokens, generator=generator)[:num_impossible]] = -torch.inf
    return scores.softmax(0)


P = likely(0, 12, num_impossible=3)
PROPOSALS: dict[str, Tensor | None] = {
    "sure": None,
    "another model": likely(1, 12),
    "a sharp one": likely(2, 12, sharpness=2.0, num_impossible=5),
    "the same": P,
    "nearly the same": (P + 1e-7 * likely(3, 12)) / (1 + 1e-7),
}


@pytest.mark.parametrize("name", PROPOSALS)
def test_tokens_are_drawn_by_the_model(name: str) -> None:
    """Of 20,000 draws; and as many proposals are kept as the rule says."""
    q, counts, kept = PROPOSALS[name], torch.zeros(len(P), dtype=torch.int64), 0
    generator = torch.Generator().manual_seed(7)
    tokens = torch.full((NUM_DRAWS,), 4)
    if q is not None:
        tokens = torch.multinomial(q, NUM_DRAWS, replacement=True, generator=generator)
    for token, number in enumerate(tokens.bincount(minlength=len(P)).tolist()):
        draft = Draft([token], None if q is None else q.unsqueeze(0))
        found = drawn(P.expand(number, -1), generator, draft, 0) if number else tokens[:0, None]
        counts += found[:, 0].bincount(minlength=len(P))
        kept += int((found == token).sum())
    check_chi_square(counts, P)
    rate = float(P[4] if q is None else torch.minimum(P, q).sum())
    assert abs(kept / NUM_DRAWS - rate) < 4 * math.sqrt(rate * (1 - rate) / NUM_DRAWS) + 1e-4


def sampled_pairs(how: dict[str, Any], num_samples: int) -> tuple[list[tuple[int, int]], Any]:
    """The third and fourth token of samples of a prompt; drafts end before, in and after them."""
    prompt, workload = (
        prompt_of(0, 9),
        Workload((Arrival(0, prompt_of(0, 9), 5),), 4, 5000, 2048, 99),
    )
    batch = workload.batch(sharded("Llama"))
    if "assistant_model" in how:
        how = how | {"assistant_model": nearly(stock("Llama"))}
    options = {"do_sample": True, "top_k": 4, "max_new_tokens": 5, **GREEDY, **how}
    batch.add_request(prompt, num_return_sequences=num_samples, **options)
    found = [(x.generated_tokens[2], x.generated_tokens[3]) for x in batch]
    return found, (batch.counts.proposed, batch.counts.accepted)


def exact_pairs() -> dict[tuple[int, int], float]:
    """The probabilities of the third and fourth token, from the stock model."""
    model, found = stock("Llama"), dict[tuple[int, int], float]()

    @torch.no_grad()
    def follow(tokens: tuple[int, ...], probability: float) -> None:
        if len(tokens) == 9 + 4:
            pair = tokens[-2:]
            found[pair] = found.get(pair, 0.0) + probability
            return
        scores = model(torch.tensor([tokens])).logits[0, -1]
        best = scores.topk(4)
        for token, x in zip(best.indices.tolist(), best.values.softmax(0).tolist(), strict=True):
            follow((*tokens, token), probability * x)

    follow(prompt_of(0, 9), 1.0)
    return found


@pytest.mark.parametrize("how", [{"assistant_model": None}, {"prompt_lookup_num_tokens": 3}])
def test_a_batch_samples_what_the_model_does(pool: Pool, how: dict[str, Any]) -> None:
    how = how | {"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.0}
    (pairs, counts), other = pool.run(2, sampled_pairs, how, 600)
    assert (pairs, counts) == other
    assert counts[0] > counts[1] > 0
    exact = exact_pairs()
    often = [pair for pair, x in exact.items() if x * len(pairs) > 8]
    rest = sum(x for pair, x in exact.items() if pair not in often)
    places = {pair: number for number, pair in enumerate(often)}
    assert all(pair in exact for pair in pairs)
    found = torch.tensor([places.get(pair, len(often)) for pair in pairs])
    expected = torch.tensor([exact[x] for x in often] + [rest] * (rest * len(pairs) > 6))
    check_chi_square(found.bincount(minlength=len(often) + 1)[: len(expected)], expected)
