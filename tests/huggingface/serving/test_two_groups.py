"""Prompts that some ranks prefill, and other ranks decode: the tokens of the stock model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import ContinuousBatchingConfig

from dtensor_ring import RingError
from parallel_plans.huggingface.serving.two_groups import RequestsHandedBack
from tests.handover.test_hand_over import sent_bytes
from tests.huggingface.generation.generating import sharded, stock
from tests.huggingface.serving.workloads import (
    GREEDY,
    Arrival,
    Workload,
    alone_on,
    check_workload,
    prompt_of,
    served,
)
from tests.pool import Pool

GROUPS = {
    "1 to 1": ((0,), (1,)),
    "2 to 1": ((0, 1), (2,)),
    "1 to 2": ((1,), (0, 2)),
    "some of both": ((0, 1, 2, 3), (1, 2)),
    "the same": ((0, 1), (0, 1)),
    "2 to 2": ((0, 1), (2, 3)),
}
FAMILIES = ("Llama", "Gemma 3", "DeepSeek-V3")
MIXED = Workload(
    tuple(
        Arrival(
            number % 3, prompt_of(number % 2, 4 + 9 * (number % 4)) + prompt_of(3 + number, 3), 5
        )
        for number in range(7)
    )
    + (
        Arrival(1, prompt_of(0, 21), 4, 3),
        Arrival(2, (5,), 3),
        Arrival(0, prompt_of(7, 30), 6, 1, 2),
    ),
    spare=1,
    max_tokens=14,
    max_requests=6,
)
"""Prompts that begin alike, samples of one, a prompt of one token, one that is cancelled, and more
requests than the pools have room for."""


@contextmanager
def in_groups(prefill: tuple[int, ...], decode: tuple[int, ...]) -> Iterator[None]:
    """Batches of workloads have these groups; all ranks must call it."""
    meshes = [DeviceMesh("cpu", [*ranks]) for ranks in (prefill, decode)]
    size = min(len(prefill), len(decode))

    def batch(self: Workload, model: Any, **options: Any) -> Any:
        longest = max(len(x.prompt) + x.num_new for x in self.arrivals) - 1
        config = ContinuousBatchingConfig(
            page_size=self.block,
            num_blocks=-(-longest // (self.block * size)) + self.spare,
            max_batch_tokens=self.max_tokens,
            max_requests_per_batch=self.max_requests,
            seed=7,
            **options,
        )
        groups = {"prefill": meshes[0], "decode": meshes[1]}
        return model.init_continuous_batching(None, config, **groups)

    with mock.patch.object(Workload, "batch", batch):
        yield


def check_groups(family: str, names: list[str]) -> None:
    model, alone = sharded(family), alone_on(stock(family))
    for name in names:
        with in_groups(*GROUPS[name]):
            batch = check_workload(model, alone, MIXED)
        usage = batch.prefill_pool.usage()
        assert not any(usage.held)
        assert batch.counts.cached


@pytest.mark.parametrize(
    ("family", "world_size", "names"),
    [
        ("Llama", 4, ["2 to 2", "some of both"]),
        ("Gemma 3", 3, ["2 to 1", "1 to 2"]),
        ("DeepSeek-V3", 2, ["1 to 1", "the same"]),
    ],
)
def test_tokens_are_those_of_requests_alone(
    pool: Pool, family: str, world_size: int, names: list[str]
) -> None:
    pool.run(world_size, check_groups, family, names)
