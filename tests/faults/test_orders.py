"""Calls in another order on one rank, and calls of two threads at once."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from dtensor_ring import ContextParallel, Mask
from tests.faults.breaking import at_launch
from tests.faults.calls import Call, plain, step
from tests.faults.differences import BOTH, LINE, Difference
from tests.faults.nccl_alone import await_agreement
from tests.faults.test_differences import check
from tests.faults.test_faults import live_on
from tests.faults.worlds import Failure, Log, Worlds, failure_of

CALL = Call(mask=Mask.full(), kernel="reference")
SWAPPED = tuple(reversed(BOTH))
BACKWARD = "backward of call"
"""What names the forward call that a backward call belongs to."""
ORDERS = {
    "one backward after the other": Difference(
        None, {"lines": BOTH, "backward": (0, 1)}, {"lines": BOTH, "backward": (0, 1)}
    ),
    "another order of backward": Difference(
        BACKWARD, {"lines": BOTH, "backward": (1, 0)}, {"lines": BOTH, "backward": (0, 1)}
    ),
    "backward of one alone": Difference(
        BACKWARD, {"lines": BOTH, "backward": (1,)}, {"lines": BOTH, "backward": (0, 1)}
    ),
    "another order of rings": Difference(LINE, {"lines": SWAPPED}, {"lines": BOTH}),
    "another order of both": Difference(
        f"{LINE}|{BACKWARD}",
        {"lines": SWAPPED, "backward": (1, 0)},
        {"lines": BOTH, "backward": (0, 1)},
    ),
}


@pytest.mark.pairs
@pytest.mark.parametrize("world_size", [2, 3], ids="{} ranks".format)
@pytest.mark.parametrize("way", ["plain", "DTensors", "SDPA"])
@pytest.mark.parametrize("name", ORDERS)
def test_order(worlds: Worlds, name: str, way: str, world_size: int) -> None:
    check(worlds, ORDERS[name], (way,) * world_size, True, "zigzag", world_size)


LAYERS = {
    "Llama": ("model.layers.0.self_attn", "model.layers.1.self_attn"),
    "Nemotron-H": ("model.layers.0.mixer", "model.layers.3.mixer"),  # they hand over states
    "": ("Attention 0", "Attention 1"),
}
"""Layers of one shape, which one line of code calls, by family; "" is `ContextParallel`."""


@pytest.mark.parametrize("family", LAYERS)
def test_another_order_of_layers(worlds: Worlds, family: str) -> None:
    """Both are named on both ranks, and a call before in the same order is right."""
    one, other = LAYERS[family]
    for fate in worlds.run(2, swap_layers, family):
        assert fate.ended == "returned", fate
        assert fate.value is not None, "silently wrong"
        assert fate.value.kind == "RingError", fate.value
        reported = re.findall(
            rf"layer: ({one}|{other}) on rank ., ({one}|{other}) on", fate.value.text
        )
        assert [*map(set, reported)] == [{one, other}], fate.value.text


def swap_layers(log: Log, family: str) -> Failure | None:
    """What a model raises, of which rank 0 calls two layers in another order."""
    run, swap = from_hugging_face(family) if family else from_styles()
    run()
    if dist.get_rank() == 0:
        swap()
    try:
        run()
        await_agreement()
    except RuntimeError as error:
        return failure_of(error)
    return None


Action = Callable[[], object]


def from_hugging_face(family: str) -> tuple[Action, Action]:
    from tests.huggingface.states.hybrids import planned

    model, tokens = planned(family), torch.arange(2, 14).view(1, -1)
    names = dict(model.named_modules())
    one, other = (names[name] for name in LAYERS[family])

    def swap() -> None:
        one.forward, other.forward = other.forward, one.forward

    # At the first two calls the ranks compare their weights, too.
    return lambda: [model(tokens) for _ in range(2)], swap


class Attention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def from_styles() -> tuple[Action, Action]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = [parallelize_module(Attention(), mesh, ContextParallel()) for _ in range(2)]
    x = torch.randn(1, 2, 6, 4)
    return lambda: [layer(x, x, x) for layer in layers], layers.reverse


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_two_threads_on_one_group(worlds: Worlds, direction: str) -> None:
    check_two_threads(worlds, direction)


def check_two_threads(worlds: Worlds, direction: str, *through: Callable[..., Any]) -> None:
    """The second is told so; the first is right, or told that its group is shut down."""
    for fate in worlds.run(2, *through, call_within_a_call, direction):
        assert fate.ended == "returned", fate
        first, second = fate.value
        assert second is not None
        assert second.kind == "RingError"
        assert "thread" in second.text
        assert first is None or (first.kind == "RingError" and "thread" in first.text), first


def call_within_a_call(log: Log, direction: str) -> tuple[Failure | None, Failure | None]:
    """What the call of a thread raises, and that of another one, which begins in the middle."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    reported: list[Failure | None] = []

    def call_once() -> None:
        if not reported:
            reported.append(None)
            live_on(dist.get_world_size())  # both are within their calls
            with ThreadPoolExecutor(1) as thread:
                reported[0] = thread.submit(failure_in_step, mesh).result()

    with at_launch(direction, 1, call_once):
        first = failure_in_step(mesh)
    assert reported, first  # else the first call did not get as far
    return first, reported[0]


def failure_in_step(mesh: DeviceMesh) -> Failure | None:
    try:
        error = step(CALL, plain, mesh, training=True)
    except RuntimeError as error:
        return failure_of(error)
    assert error <= CALL.tolerance
    return None


def test_two_threads_with_a_group_each(worlds: Worlds) -> None:
    for fate in worlds.run(2, call_in_two_threads):
        assert fate.ended == "returned", fate
        assert all(error <= CALL.tolerance for error in fate.value), fate.value


def call_in_two_threads(log: Log) -> list[float]:
    """The largest error of each thread's steps; each has other calls."""
    ranks = list(range(dist.get_world_size()))
    groups = [dist.new_group(ranks) for _ in range(2)]
    meshes = [DeviceMesh.from_group(group, "cpu") for group in groups]
    calls = [CALL, replace(CALL, mask=Mask.causal(), head_dim=16)]
    begin = threading.Barrier(2)

    def work(call: Call, mesh: DeviceMesh) -> float:
        begin.wait()
        return max(step(call, plain, mesh, training=True) for _ in range(20))

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(work, calls, meshes))
