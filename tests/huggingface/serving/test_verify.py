"""What is drawn where tokens were proposed: the distribution of the model, for any proposal."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_plans.huggingface.serving.verify import Draft, drawn
from tests.huggingface.generation.generating import sharded, stock
from tests.huggingface.serving.test_drafts import nearly
from tests.huggingface.serving.workloads import GREEDY, Arrival, Workload, prompt_of
from tests.pool import Pool

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
