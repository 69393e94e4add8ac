"""Ranks that make different calls, or the same in another order: right, or all raise."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
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
from tests.faults.calls import WAYS, Call, Ending, make, plain, step
from tests.faults.decoding import CACHES, DECODED, Decoding, decode_as
from tests.faults.differences import BOTH, DIFFERENCES, LINE, Difference
from tests.faults.nccl_alone import await_agreement
from tests.faults.test_faults import live_on
from tests.faults.worlds import Failure, Fate, Log, Worlds, failure_of

COMPILED = ["mask: sliding 4, causal", "backward skipped", "other order, two shapes"]
"""The differences that are compiled, which takes its time: all are named in the same record."""


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("way", WAYS)
def test_equal_calls(worlds: Worlds, way: str, training: bool) -> None:
    check(worlds, Difference(None), (way, way), training, "zigzag", 2)


@pytest.mark.parametrize(
    ("way", "training"), [("plain", True), ("DTensors", False), ("SDPA", True)]
)
def test_one_rank_is_compiled(worlds: Worlds, way: str, training: bool) -> None:
    """As where the compiler of one rank gives up."""
    ways = "compiled", way
    check(worlds, Difference(None), ways, training, "contiguous", 2)


def cases(also: bool) -> Iterator[tuple[str, str, bool, str, int]]:
    """Each difference in training, where layouts and world sizes take turns.

    In inference those that are told otherwise there, and some; as DTensors, by SDPA and among ranks
    that are no neighbours only some, as all that differs is named in the same record. `also` is
    the rest.
    """
    settings = [*product(("contiguous", "zigzag"), (2, 3))]
    for (number, name), training in product(enumerate(DIFFERENCES), (True, False)):
        is_told = training or number % 2 or DIFFERENCES[name].reported_in_inference != ""
        for index, setting in enumerate(settings):
            if bool(is_told and index == (number + 2 * training) % 4) != also:
                yield name, "plain", training, *setting
        is_turn = training == (number % 2 == 0)
        if (is_turn and number % 3 == 1) != also:
            yield name, "DTensors", training, "zigzag", 2
        if DIFFERENCES[name].suits_sdpa and (is_turn and number % 3 == 0) != also:
            yield name, "SDPA", training, "zigzag", 2
        if training and (number % 4 == 0) != also:
            yield name, "plain", True, "contiguous", 4


@pytest.mark.parametrize(
    ("name", "way", "training", "layout", "world_size"),
    [*cases(False), *(pytest.param(*x, marks=pytest.mark.repeats) for x in cases(True))],
)
def test_different_calls(
    worlds: Worlds, name: str, way: str, training: bool, layout: str, world_size: int
) -> None:
    check(worlds, DIFFERENCES[name], (way,) * world_size, training, layout, world_size)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(worlds: Worlds, name: str) -> None:
    check(worlds, DIFFERENCES[name], ("compiled",) * 2, True, "contiguous", 2)


def check(
    worlds: Worlds,
    difference: Difference,
    ways: tuple[str, ...],
    training: bool,
    layout: str,
    world_size: int,
    *through: Callable[..., Any],
) -> None:
    """All ranks are right, or all raise what differs; `ways` by rank."""
    calls = difference.calls(layout, world_size)
    fates = worlds.run(world_size, *through, make, calls, ways, training)
    spared = [0] if difference.spares_rank_0 else []
    check_fates(fates, calls, difference.expected(training), spared)


def check_fates(
    fates: list[Fate],
    calls: Sequence[Any],
    pattern: str | None,
    spared: Sequence[int] = (),
) -> None:
    """All ranks but the spared ones are told that, or all are right if it is `None`."""
    assert [fate.ended for fate in fates] == ["returned"] * len(fates), fates
    for rank, (fate, call) in enumerate(zip(fates, calls, strict=True)):
        if pattern is None or rank in spared:
            assert fate.value.is_right(call), (rank, fate.value)
        else:
            check_reported(pattern, fate.value, rank)


def check_reported(pattern: str, ending: Ending, rank: int) -> None:
    assert ending.failure is not None, (rank, ending)
    kind, text, _ = ending.failure
    assert kind in ("RingError", "ValueError"), (rank, kind, text)
    assert re.search(pattern, text), (rank, text)


@pytest.mark.parametrize("how", CACHES)
def test_equal_decoding(worlds: Worlds, how: str) -> None:
    cases = (Decoding(how),) * 3
    check_fates(worlds.run(3, decode_as, cases), cases, None)


@pytest.mark.parametrize(
    ("name", "odd"),
    [
        pytest.param(name, odd, marks=[pytest.mark.repeats] * (odd != (number % 4 == 0)))
        for (number, name), odd in product(enumerate(DECODED), (0, 1))
    ],
)
def test_different_decoding(worlds: Worlds, name: str, odd: int) -> None:
    difference = DECODED[name]
    cases = difference.by_rank(Decoding(), 3, odd)
    spared = [odd] if difference.spares_rank_0 else []
    check_fates(worlds.run(3, decode_as, cases), cases, difference.reported, spared)


# Calls in another order on one rank, and calls of two threads at once.

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
