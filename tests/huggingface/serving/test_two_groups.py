"""Prompts that some ranks prefill, and other ranks decode: the tokens of the stock model."""

from __future__ import annotations

import re
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import ContinuousBatchingConfig

from dtensor_ring import SequenceAxis
from parallel_plans.huggingface.serving.two_groups import RequestsHandedBack
from tests.handover.test_hand_over import sent_bytes
from tests.huggingface.generation.generating import sharded, stock
from tests.huggingface.planned import under_plan
from tests.huggingface.serving.workloads import (
    GREEDY,
    Arrival,
    Workload,
    alone_on,
    check_workload,
    in_groups,
    prompt_of,
    served,
)
from tests.pool import on_ranks

GROUPS = {
    "1 to 1": ((0,), (1,)),
    "2 to 1": ((0, 1), (2,)),
    "1 to 2": ((1,), (0, 2)),
    "some of both": ((0, 1, 2, 3), (1, 2)),
    "the same": ((0, 1), (0, 1)),
    "2 to 2": ((0, 1), (2, 3)),
}


def mixed(number: int) -> tuple[int, ...]:
    return prompt_of(number % 2, 4 + 9 * (number % 4)) + prompt_of(3 + number, 3)


MIXED = Workload(
    (
        *(Arrival(number % 3, mixed(number), 5) for number in range(7)),
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


@pytest.mark.parametrize(
    ("family", "world_size", "names"),
    [
        ("Llama", 4, ["2 to 2", "some of both"]),
        ("Gemma 3", 3, ["2 to 1", "1 to 2"]),
        ("DeepSeek-V3", 2, ["1 to 1", "the same"]),
        ("Qwen3-Next", 3, ["2 to 1"]),
    ],
)
@on_ranks()
def test_tokens_are_those_of_requests_alone(family: str, names: list[str]) -> None:
    model, alone = sharded(family), alone_on(stock(family))
    for name in names:
        with in_groups(*GROUPS[name]):
            batch = check_workload(model, alone, MIXED)
        usage = batch.prefill_pool.usage()
        assert not any(usage.held)
        assert batch.counts.cached


@on_ranks(3)
def test_eight_bits() -> None:
    """Blocks that are rounded where they are prefilled are those that one group would keep."""
    prompts = tuple(Arrival(0, prompt_of(i, 70 + 9 * i), 6) for i in range(3))
    workload = Workload(prompts, block=32, spare=20, max_tokens=400)
    model = sharded("Llama", cache_dtype="int8")
    _, expected = served(model, workload)
    with in_groups((0, 1), (2,)):
        _, found = served(model, workload)
    assert {x: y.generated_tokens for x, y in found.items()} == {
        x: y.generated_tokens for x, y in expected.items()
    }


NUM_NEW, SHARED = 5, 12
BYTES_OF_TOKEN = 2 * 2 * (4 + 4) * 8
"""Two layers of two heads of keys and values in float64."""


@on_ranks(2)
def test_each_block_travels_once() -> None:
    """Blocks go over the wire once, also those that prompts share; and three numbers of a token."""
    prompts = [prompt_of(0, SHARED) + prompt_of(i, 5 + i) for i in range(2, 5)]
    arrivals = tuple(Arrival(i, prompt, NUM_NEW) for i, prompt in enumerate(prompts))
    model, rank = sharded("Llama"), dist.get_rank()
    workload = Workload(arrivals, spare=30, max_tokens=9)
    with in_groups((0,), (1,)), sent_bytes() as sent:
        _, outputs = served(model, workload)
    assert all(x.error is None for x in outputs.values())
    num_tokens = SHARED + sum(len(x) - 1 - SHARED for x in prompts)
    num_chosen = NUM_NEW * len(prompts)
    assert sum(sent) == (3 * 8 * num_chosen if rank else BYTES_OF_TOKEN * num_tokens)


@on_ranks(3)
def test_layers_travel_while_later_ones_are_computed() -> None:
    """A layer is sent before its attention; the rank that prefills waits after the last layer."""
    model, rank = sharded("Llama"), dist.get_rank()
    prompts = tuple(Arrival(i, prompt_of(i, 17), 2) for i in range(2))
    with in_groups((0, 1), (2,)):
        batch = Workload(prompts, spare=30, max_tokens=64).batch(model)
    batch.add_request(prompt_of(0, 17), max_new_tokens=2, **GREEDY)
    batch.step()  # the first one tells what layers keep
    batch.add_request(prompt_of(1, 17), max_new_tokens=2, **GREEDY)
    numbers, attend = iter(range(9)), SequenceAxis.attention

    def labelled(*args: Any, **kwargs: Any) -> Any:
        with record_function(f"attention {next(numbers)}"):
            return attend(*args, **kwargs)

    with (
        mock.patch.object(SequenceAxis, "attention", labelled),
        profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace,
    ):
        batch.step()
    if rank == 2:
        return
    events = sorted(trace.events(), key=lambda x: x.time_range.start)
    names = [x.name.removeprefix("ring hand over, ") for x in events]
    order = [x for x in names if re.match(r"attention|step \d, source \d: (send|wait)", x)]
    sends = [f"step {layer}, source {rank}: send" for layer in (0, 1)]
    assert order[:4] == [sends[0], "attention 0", sends[1], "attention 1"]
    assert all(x.endswith("wait") for x in order[4:])
    assert len(order) > 4


class Planted(Exception):
    """Of a layer on one rank."""


@pytest.mark.parametrize("role", [1, 2])
@on_ranks(3)
def test_a_rank_raises(role: int) -> None:
    """A rank of a group raises in a step; all are told, and what has not begun is handed back."""
    model, rank = sharded("Llama"), dist.get_rank()
    prompts = [list(prompt_of(i, 12)) for i in range(5)]
    arrivals = tuple(Arrival(0, tuple(prompt), 4) for prompt in prompts)
    with in_groups((0, 1), (2,)):
        batch = Workload(arrivals, spare=30, max_tokens=64, max_requests=2).batch(model)
    ids = batch.add_requests(prompts, max_new_tokens=4, **GREEDY)
    batch.step()
    batch.step()
    plain = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if rank == role:
            raise Planted
        return plain(*args, **kwargs)

    batch.cancel_request(ids[0])  # so that another one is prefilled in this step
    model.forward = forward
    begin = time.monotonic()
    with pytest.raises(Planted if rank == role else RequestsHandedBack) as caught:
        list(batch)
    assert time.monotonic() - begin < 30, "a deadline against hangs"
    if rank != role:
        # The third one would begin in the step that fails.
        assert caught.value.not_started == dict(zip(ids[2:], prompts[2:], strict=True))
        assert "have not started: req_2, req_3, req_4" in str(caught.value)
    assert not any(batch.pool.usage().held)
    assert not any(batch.prefill_pool.usage().held)


@on_ranks(2)
def test_what_is_refused() -> None:
    model, rank = sharded("Llama"), dist.get_rank()
    one, other = (DeviceMesh("cpu", [x]) for x in (0, 1))
    for groups, error, match in (
        ({"prefill": one}, TypeError, "decode must be a 1-D DeviceMesh, got None; give both"),
        ({"prefill": one, "decode": 3}, TypeError, "decode must be a 1-D DeviceMesh, got 3"),
        ({"prefill": one, "decode": [one, other][rank]}, ValueError, "they differ in decode"),
        (
            {"prefill": one, "decode": [one, 3][rank]},
            ValueError,
            "differ in decode: .* int on",
        ),
    ):
        with pytest.raises(error, match=match):
            model.generate_batch([[3]], max_new_tokens=2, **groups)
    found = model.generate_batch([[3, 4, 5]], prefill=one, decode=other, max_new_tokens=2, **GREEDY)
    assert [len(x.generated_tokens) for x in found.values()] == [2]
    batch = model.init_continuous_batching(
        None, ContinuousBatchingConfig(page_size=4, num_blocks=2), prefill=one, decode=other
    )
    batch.add_request(prompt_of(0, 30), "long", max_new_tokens=2, **GREEDY)
    assert "need 8 blocks of 4 tokens on a rank, and the pool has 2" in batch.step()[0].error
    with pytest.raises(ValueError, match="differ in tokens"):
        batch.add_request(prompt_of(rank, 5), max_new_tokens=2)
    config = ContinuousBatchingConfig(return_logprobs=True)
    alone = model.generate_batch([[3, 4, 5]], None, config, max_new_tokens=3, **GREEDY)
    found = model.generate_batch(
        [[3, 4, 5]], None, config, max_new_tokens=3, prefill=one, decode=other, **GREEDY
    )
    (expected,), (output,) = alone.values(), found.values()
    assert output.generated_tokens == expected.generated_tokens
    torch.testing.assert_close(
        torch.tensor(output.logprobs), torch.tensor(expected.logprobs), atol=1e-6, rtol=1e-6
    )


@on_ranks(2)
def test_sharded_weights() -> None:
    """Weights that are sharded over ranks of both groups."""
    model = sharded("Llama")
    mesh = model.context_parallel_sharding.axis.mesh
    fully_shard(model, mesh=mesh)
    meshes = [DeviceMesh("cpu", [x]) for x in (0, 1)]
    with pytest.raises(ValueError, match=r"is sharded over ranks \(FSDP2, tensor parallelism\)"):
        model.init_continuous_batching(prefill=meshes[0], decode=meshes[1])


@on_ranks(3)
def test_ranks_that_the_plan_does_not_have() -> None:
    meshes = [DeviceMesh("cpu", [*x]) for x in ((0, 1), (2,))]
    if dist.get_rank() == 2:
        return
    model = under_plan(stock("Llama"), mesh=meshes[0])
    with pytest.raises(
        ValueError, match=r"decode has the ranks \[2\], which the plan of the model"
    ):
        model.init_continuous_batching(prefill=meshes[0], decode=meshes[1])
