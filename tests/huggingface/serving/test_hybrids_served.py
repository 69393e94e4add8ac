"""Models whose layers carry states, as requests that come and go: the tokens of the stock model."""

from __future__ import annotations

import pytest

from tests.huggingface.generation.generating import sharded, stock
from tests.huggingface.serving.test_two_groups import MIXED
from tests.huggingface.serving.workloads import alone_on, check_workload
from tests.pool import Pool


def check_mixed(family: str) -> None:
    batch = check_workload(sharded(family), alone_on(stock(family)), MIXED)
    assert batch.counts.cached


@pytest.mark.parametrize(
    ("family", "world_size"), [("Qwen3-Next", 1), ("Qwen3-Next", 2), ("Qwen3-Next", 4)]
)
def test_tokens_are_those_of_requests_alone(pool: Pool, family: str, world_size: int) -> None:
    pool.run(world_size, check_mixed, family)
