"""Random workloads: each request gets the tokens that the stock model gives to it alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.huggingface.generation.generating import sharded, stock
from tests.huggingface.serving.workloads import (
    Arrival,
    Workload,
    alone_on,
    check_workload,
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
