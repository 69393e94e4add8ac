"""One workload of many kinds of requests: each has the tokens of the stock model, alone.

Requests share prefixes, fork, are cancelled, are chosen by penalties and other processors, end by
strings, lengths or tokens, and draw from seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from tests.huggingface.generation.generating import sharded, stock
from tests.huggingface.serving.choices import CHOICES, Options
from tests.huggingface.serving.workloads import (
    Arrival,
    Workload,
    alone_on,
    check_workload,
    in_groups,
    prompt_of,
)
from tests.pool import Pool

FAMILIES = ("Llama", "Gemma 3", "gpt-oss", "DeepSeek-V3", "Qwen3-Next")
"""Grouped heads; a window and everything; sinks and windows; latents that are expanded; states."""
GROUPS = {
    f"{num_prefill} to {num_decode}": (
        tuple(range(num_prefill)),
        tuple(range(num_prefill, num_prefill + num_decode)),
    )
    for num_prefill in (1, 2, 4)
    for num_decode in (1, 2)
}


SEEDS = {12: 161, 100: 0}
"""By number of requests; the 12 have samples with a state, stop strings, a penalty, and one that is
cancelled."""


def mixed_workload(num_requests: int, seed: int) -> Workload:
    """Requests of all kinds, in steps that come close after one another, in small pools."""
    random, kinds = Random(seed), [*CHOICES]
    first = random.randrange(len(kinds))
    arrivals = []
    for number in range(num_requests):
        kind = kinds[(first + 7 * number) % len(kinds)]
        shared, own = random.choice((0, 8, 21, 40)), random.randint(1, 9)
        prompt = prompt_of(random.randrange(3), shared) + prompt_of(3 + number % 11, own)
        step = random.randrange(1 + num_requests // 2)
        is_cancelled = random.random() < 0.12
        arrivals.append(
            Arrival(
                step,
                prompt,
                random.randint(CHOICES[kind].get("min_new_tokens", 1), 14),
                random.choice((1, 2, 3)) if "sampled" in kind else 1,
                step + random.randint(1, 12) if is_cancelled else None,
                kind,
            )
        )
    return Workload(tuple(arrivals), block=4, spare=8, max_tokens=24, max_requests=8)


def expected_of(family: str, workload: Workload) -> dict[tuple[Arrival, int], list[int]]:
    """The tokens of the stock model, by request and seed."""
    alone, found = alone_on(stock(family)), {}
    for number, arrival in enumerate(workload.arrivals):
        for sample in range(arrival.num_samples):
            seed = 100 * number + sample
            found[arrival, seed] = alone(arrival, seed)
    return found


def check_mixed(
    family: str, groups: Any, workload: Workload, expected: Any, options: Options
) -> Any:
    with in_groups(*groups):
        batch = check_workload(sharded(family), lambda *x: expected[x], workload, **options)
    return batch.counts


@pytest.fixture(scope="module")
def expected_for(pool: Pool) -> Callable[[str, Workload], Any]:
    """What `expected_of` returns; it is computed once for all groups."""
    known: dict[Any, Any] = {}

    def expected(family: str, workload: Workload) -> Any:
        if (family, workload) not in known:
            known[family, workload] = pool.run(1, expected_of, family, workload)[0]
        return known[family, workload]

    return expected


LOOKUP = {"prompt_lookup_num_tokens": 2}
CASES: list[tuple[str, str, int, Options]] = [
    ("Llama", "2 to 1", 12, {}),
    *((family, groups, 100, {}) for family in FAMILIES for groups in GROUPS),
    *((family, "2 to 2", 100, LOOKUP) for family in FAMILIES),
]


@pytest.mark.parametrize(
    ("family", "name", "num_requests", "options"),
    [pytest.param(*x, marks=[pytest.mark.repeats] * (x[2] > 12)) for x in CASES],
)
def test_mixed_requests(
    pool: Pool, expected_for: Any, family: str, name: str, num_requests: int, options: Options
) -> None:
    groups, workload = GROUPS[name], mixed_workload(num_requests, SEEDS[num_requests])
    expected = expected_for(family, workload)
    given = family, groups, workload, expected, options
    counts: Any = pool.run(1 + max(map(max, groups)), check_mixed, *given)
    assert all(x == counts[0] for x in counts)
    assert counts[0].cached
    if num_requests == 100 and name != "1 to 2":  # where those that decode have twice the room
        assert counts[0].preempted
    if options:
        assert counts[0].proposed > counts[0].accepted > 0
