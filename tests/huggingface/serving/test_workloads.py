"""Random workloads: each request gets the tokens that the stock model gives to it alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.huggingface.generation.generating import sharded, stock
from tests.huggingface.serving.workloads import (
    CHOICES,
    Arrival,
    Options,
    Workload,
    alone_on,
    check_workload,
    in_groups,
    prompt_of,
    workloads,
)
from tests.pool import Pool

FAMILIES = ("Llama", "Gemma 3", "gpt-oss", "DeepSeek-V3", "Qwen3-Next")
"""Grouped heads; a window and everything; sinks and windows; latents that are expanded; states."""


def check_workloads(family: str, given: list[Workload]) -> Counter[str]:
    """How often a request gave way, and tokens that were taken from the pool."""
    model, alone, found = sharded(family), alone_on(stock(family)), Counter()
    for workload in given:
        counts = check_workload(model, alone, workload).counts
        found += Counter({"preempted": counts.preempted, "cached": counts.cached})
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A few, or 270 of them: 18 of each family over 1, 2 and 3 ranks."""
    cases = [(family, 1 + number % 3, 1) for number, family in enumerate(FAMILIES)]
    if metafunc.config.getoption("--all-cases"):
        cases = [(family, world_size, 18) for family in FAMILIES for world_size in (1, 2, 3)]
    if "num_workloads" in metafunc.fixturenames:
        metafunc.parametrize(("family", "world_size", "num_workloads"), cases)


def test_tokens_are_those_of_requests_alone(
    pool: Pool, family: str, world_size: int, num_workloads: int
) -> None:
    asked = settings(
        max_examples=1 + num_workloads,  # the first one is the smallest there is
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )

    @asked
    @given(workloads())
    def check(drawn: Workload) -> None:
        pool.run(world_size, check_workloads, family, [drawn])

    check()


SHARED = prompt_of(0, 21)
FULL_POOL = Workload(
    tuple(
        Arrival(number % 3, SHARED[: 9 + 4 * (number % 4)] + prompt_of(3 + number, 3), 6, samples)
        for number, samples in enumerate((1, 3, 1, 1, 2, 1))
    ),
    spare=0,
    max_tokens=8,
    max_requests=6,
)
"""Prompts that share blocks, and more requests than the pool has room for."""


@pytest.mark.parametrize(("family", "world_size"), [("Llama", 2), ("DeepSeek-V3", 3)])
def test_requests_give_way_and_lose_nothing(pool: Pool, family: str, world_size: int) -> None:
    found: Any = pool.run(world_size, check_workloads, family, [FULL_POOL])
    assert all(counts == found[0] for counts in found)
    assert found[0]["preempted"]
    assert found[0]["cached"]


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
