"""A rank of two groups dies while requests are served: the others are told, and none waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.faults.breaking import at_call, kill, stop
from tests.faults.worlds import LIMITED, USUAL, Log, Worlds
from tests.huggingface.generation.generating import sharded
from tests.huggingface.serving.workloads import GREEDY, prompt_of

PREFILL, DECODE = (0, 1), (2, 3)


def suffer(log: Log, victim: int, fault: Callable[[], object]) -> Any:
    """Serve requests until a rank is struck before a forward; what this rank is told."""
    from transformers import ContinuousBatchingConfig

    from parallel_plans.huggingface.serving.pooled_forward import PooledForward
    from parallel_plans.huggingface.serving.two_groups import RequestsHandedBack

    meshes = [DeviceMesh("cpu", [*ranks]) for ranks in (PREFILL, DECODE)]
    model = sharded("Llama")
    config = ContinuousBatchingConfig(page_size=4, num_blocks=30, max_requests_per_batch=1)
    batch = model.init_continuous_batching(None, config, prefill=meshes[0], decode=meshes[1])
    batch.add_requests([prompt_of(i, 9 + i) for i in range(3)], max_new_tokens=4, **GREEDY)

    def strike() -> None:
        log("fault")
        fault()

    try:
        if dist.get_rank() == victim:
            with at_call((PooledForward, "run"), 1, strike):
                list(batch)
        else:
            list(batch)
    except RequestsHandedBack as error:
        log("told")
        return [*error.not_started], str(error)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_is_killed(worlds: Worlds, victim: int) -> None:
    fates = worlds.run(4, suffer, victim, kill, terms=USUAL)
    assert fates[victim].ended == "SIGKILL"
    for rank, fate in enumerate(fates):
        if rank != victim:
            assert fate.ended == "returned", fate.value
            waiting, text = fate.value
            assert waiting in (["req_1", "req_2"], ["req_2"])
            assert "Requests that have not started: req_" in text


def test_a_rank_is_stopped(worlds: Worlds) -> None:
    """Longer than the groups wait."""
    victim = 3
    fates = worlds.run(4, suffer, victim, stop, terms=LIMITED)
    for rank, fate in enumerate(fates):
        if rank != victim:
            assert fate.ended == "returned", fate.value
            assert fate.value is not None
