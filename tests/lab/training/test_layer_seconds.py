"""Seconds of launches and collectives, one by one and together, next to what a hand computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dtensor_ring.lab.machine import Curve
from dtensor_ring.lab.training.collectives import (
    COLLECTIVE,
    COMPUTE,
    RankGroup,
    Task,
    UnitSeconds,
    all_reduce_seconds,
    collective_seconds,
    fsdp_tasks,
    rank_group,
    run_streams,
    strided,
)
from dtensor_ring.lab.training.launches import ATTENTION, STATE, LaunchRecorder, OpLaunch, fused
from dtensor_ring.lab.training.layer_seconds import (
    LayerClock,
    PartSeconds,
    Shard,
    gemm_rate,
    itemsize,
)
from tests.lab.machines import round_machine

# A million FLOPs and bytes per second; TP's links take 1 s, and then 100 B/s.
MACHINE = round_machine()


def _clock(tp: int = 1, dtype: str = "bfloat16", **fields: Any) -> LayerClock:
    return LayerClock(round_machine(**fields), Shard(100, tp, 2, dtype), 8)


def _launch(op: str = "add", flops: int = 0, size: int = 1000, **more: Any) -> OpLaunch:
    return OpLaunch(op, flops, ((1, size),), (), **more)


SMALLEST = Curve((0.0, 1.0), (2.0, 2.0))


@pytest.mark.parametrize(
    ("clock", "launch", "expected"),
    [
        (_clock(), _launch("mm", 10**6), PartSeconds(gemm=1.0)),
        (_clock(memory_rate=100.0), _launch("mm", 10**6), PartSeconds(gemm=10.0)),
        (
            _clock(dtype="float8_e4m3fn", memory_rate=100.0, gemm={"float8_e4m3fn": 1e6}),
            _launch("mm", 10**6),
            PartSeconds(gemm=5.0),  # half of the bytes
        ),
        (_clock(), _launch(), PartSeconds(others=1e-3)),
        (_clock(), _launch(times=4), PartSeconds(others=4e-3)),
        (_clock(pack=SMALLEST), _launch(), PartSeconds(others=2 + 1e-3)),
        (_clock(element_rate=10.0), _launch(elements=20), PartSeconds(others=2.0)),
        (_clock(element_rate=1e6), _launch(elements=20), PartSeconds(others=1e-3)),
        (_clock(), _launch(STATE, 2 * 10**6), PartSeconds(states=2.0)),
        (_clock(), _launch(ATTENTION), PartSeconds()),
    ],
)
def test_a_launch_takes_what_is_most(
    clock: LayerClock, launch: OpLaunch, expected: PartSeconds
) -> None:
    forward, backward = clock.parts([launch], [launch, launch])
    assert forward == pytest.approx(expected)
    assert backward == pytest.approx(expected + expected)


def test_compiled_chains_write_what_others_read() -> None:
    chain = [OpLaunch("mul", 0, ((i, 1000),), ((i + 1, 1000),), 5, True) for i in range(3)]
    clock = _clock(element_rate=1.0)
    assert clock.parts(chain, [])[0].others == pytest.approx(15.0)
    forward, _ = clock._replace(is_compiled=True).parts(chain, [])
    assert forward.others == pytest.approx(2e-3)


def test_tensor_parallelism_gathers_and_reduces() -> None:
    # 3 of 4 parts of 100 tokens of 8 numbers of 2 bytes, at 100 B/s after 1 s.
    assert _clock(tp=4).tp_collectives() == pytest.approx(2 * (1 + 1600 * 3 / 4 / 100))


def test_dtypes() -> None:
    assert itemsize("float8_e4m3fn") == 1
    assert Shard(1, 1, 2, "float8_e5m2").dtype == "bfloat16"
    assert gemm_rate(MACHINE, "float16") == 1e6  # as bfloat16
    with pytest.raises(ValueError, match="round has no speed of matrix products for dtype float64"):
        gemm_rate(MACHINE, "float64")
    with pytest.raises(ValueError, match=r"dtype must be one of float8_e4m3fn, .*, got 'int8'"):
        itemsize("int8")


# What ops launch: bytes, numbers looked up one by one, and what a compiler makes of chains.


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("run", "num_bytes", "elements"),
    [
        (lambda x: x + x, 3 * 64, 0),
        (lambda x: x + x.t(), 3 * 64 * 2, 0),
        (lambda x: x.add_(x), 3 * 64, 0),
        # A row is broadcast, and read once.
        (lambda x: x * _empty(8), 2 * 64 + 16, 32),
        (lambda x: x * _empty(1, 8).expand(4, 8), 2 * 64 + 16, 32),
        (lambda x: x.float(), 64 + 128, 32),
        (lambda x: x[:, :4] * x[:, 4:], 3 * 32, 16),
        (lambda x: torch.cat([x, x], -1), 4 * 64, 64),
        (lambda x: x.copy_(_empty(4, 8)), 2 * 64, 0),
        (lambda x: x.sum(0), 64 + 16, 0),
        (lambda x: x.view(8, 4).t()[1:], 0, 0),
    ],
)
def test_a_launch(run: Callable[[Tensor], object], num_bytes: int, elements: int) -> None:
    given = _empty(4, 8) if num_bytes != 3 * 64 * 2 else _empty(8, 8)
    with LaunchRecorder() as recorder:
        run(given)
    found = [x for x in recorder.launches if x.num_bytes]
    assert sum(x.num_bytes for x in found) == num_bytes
    assert max((x.elements for x in found), default=0) == (elements or 64 * (num_bytes == 384))


def test_products_and_views() -> None:
    x, weight = _empty(4, 8), _empty(16, 8)
    with LaunchRecorder() as recorder, recorder.times(3):
        torch.mm(x, weight.t(), out=_empty(4, 16))
    (found,) = recorder.launches
    assert (found.flops, found.times, found.fuses) == (2 * 4 * 8 * 16, 3, False)
    assert found.num_bytes == 2 * (4 * 8 + 8 * 16 + 4 * 16)


def test_chains_are_one_kernel() -> None:
    x, weight = _empty(4, 8).requires_grad_(), _empty(8, 8)
    with LaunchRecorder() as recorder:
        gate = (x.float() * 2).to(x.dtype)
        out = gate @ weight
        number = len(recorder.launches)
        torch.autograd.backward((out * gate).sum())
    sides = recorder.launches[:number], recorder.launches[number:]
    first, product = fused(*sides)
    # It reads 32 numbers and writes as many: what is float32 stays inside.
    assert (first.num_bytes, product.flops) == (2 * 32 * 2, 2 * 4 * 8 * 8)
    assert sum(x.num_bytes for x in fused(sides[1])) < sum(x.num_bytes for x in sides[1])


def test_what_is_paused_is_not_there() -> None:
    with LaunchRecorder() as recorder:
        with recorder.paused():
            weight = _empty(4)
        assert (recorder.alive, recorder.launches) == (0, [])
        kept = weight + 1
        recorder.need(100)
    assert (recorder.alive, recorder.peak) == (kept.nbytes, kept.nbytes + 100)
    (launch,) = recorder.launches
    assert (launch.op, launch.times, launch.num_bytes) == ("add", 1, 2 * kept.nbytes)


# Seconds of collectives by hand, on a machine of round numbers.

# 4 ranks on a host; inside 100 B/s and 1 s, between 10 B/s and 2 s.
HOSTS_OF_FOUR = round_machine(ranks_per_host=4)


@pytest.mark.parametrize(
    ("ranks", "stride", "group"),
    [
        (4, 1, RankGroup(4, 4)),
        (8, 1, RankGroup(8, 4)),
        (8, 2, RankGroup(8, 2)),
        (2, 4, RankGroup(2, 1)),
        (3, 8, RankGroup(3, 1)),
    ],
)
def test_ranks_of_a_host(ranks: int, stride: int, group: RankGroup) -> None:
    assert rank_group(HOSTS_OF_FOUR, ranks, stride) == group
    assert strided(HOSTS_OF_FOUR, stride).ranks_per_host >= group.per_host


@pytest.mark.parametrize(
    ("group", "seconds"),
    [
        (RankGroup(1, 1), 0),
        # 300 of 400 bytes at 100 B/s.
        (RankGroup(4, 4), 1 + 3),
        # Half of 400 bytes leaves the host, a quarter of that by each of the four ports.
        (RankGroup(8, 4), 2 + 5),
        # With one rank on a host, 200 bytes go by one port.
        (RankGroup(2, 1), 2 + 20),
        # Two more hosts add the latency of two messages.
        (RankGroup(4, 1), 2 + 30 + 2 * 2),
    ],
)
def test_seconds(group: RankGroup, seconds: float) -> None:
    for kind in ("all_gather", "reduce_scatter"):
        assert collective_seconds(HOSTS_OF_FOUR, group, kind, 400) == pytest.approx(seconds)
    assert all_reduce_seconds(HOSTS_OF_FOUR, group, 400) == pytest.approx(2 * seconds)
    assert collective_seconds(HOSTS_OF_FOUR, group, "all_gather", 0) == 0


def test_slow_links_inside_decide() -> None:
    machine = round_machine(ranks_per_host=4, inside=1.0)
    # 350 of 400 bytes pass through each rank, at 1 B/s.
    assert collective_seconds(machine, RankGroup(8, 4), "all_gather", 400) == 1 + 350


# When kernels and collectives run, next to what a hand computes.


def _ends(units: list[UnitSeconds], *factors: float) -> dict[str, float]:
    spans = run_streams(fsdp_tasks(units), *factors)
    found: dict[str, float] = {}
    for span in spans:
        # A layer is gathered twice: forward, then for its backward.
        name = span.label if span.label not in found else f"{span.label} again"
        found[name] = span.end
    return found


def _units(number: int, *seconds: float) -> list[UnitSeconds]:
    return [UnitSeconds(str(i), *seconds) for i in range(number)]


def test_collectives_hide_under_longer_kernels() -> None:
    """The first gather and the last reduction are exposed: 1 + 3 * 3 + 3 * 6 + 2."""
    found = _ends(_units(3, 3.0, 6.0, 1.0, 2.0))
    assert found["gather 1"] == 2  # with the kernels of layer 0, which begin at 1
    assert found["forward 2"] == 10
    assert found["gather 1 again"] == 11  # with the backward of layer 2
    assert found["reduce 2"] == 18
    assert found["gather 0 again"] == 19  # after the reduction: one communicator
    assert found["backward 0"] == 28
    assert found["reduce 0"] == 30


def test_kernels_wait_for_longer_collectives() -> None:
    """Forward: gathers follow one another. Backward: each layer waits for two collectives."""
    found = _ends(_units(3, 1.0, 2.0, 4.0, 5.0))
    assert [found[f"forward {i}"] for i in range(3)] == [5, 9, 13]
    assert found["backward 2"] == 15
    assert found["gather 1 again"] == 17
    assert found["reduce 2"] == 22
    assert found["gather 0 again"] == 26
    assert found["backward 1"] == 19
    assert found["reduce 1"] == 31
    assert found["backward 0"] == 28
    assert found["reduce 0"] == 36


def test_without_gathers_only_reductions_are_left() -> None:
    """As with replicas alone: kernels never wait, reductions of 5 follow one another."""
    found = _ends(_units(3, 1.0, 2.0, 0.0, 5.0))
    assert "gather 0" not in found
    assert found["backward 0"] == 3 + 6
    assert found["reduce 0"] == 5 + 15


def test_a_single_rank_only_computes() -> None:
    spans = run_streams(fsdp_tasks(_units(2, 1.0, 2.0, 0.0, 0.0)))
    assert [span.end for span in spans] == [1, 2, 4, 6]


@pytest.mark.parametrize(
    ("factors", "ends"),
    [
        # Kernels of 4 and a transfer of 3 that begin together.
        ((1.0, 1.0), (4.0, 3.0)),
        # Kernels advance by half for 3 seconds, so 2.5 are left.
        ((2.0, 1.0), (5.5, 3.0)),
        # The transfer advances by two thirds for 4 seconds, and has a third of a second left.
        ((1.0, 1.5), (4.0, 4 + 1 / 3)),
        # Kernels at half of their speed for 4.5 seconds, in which the transfer ends.
        ((2.0, 1.5), (4.5 + 1.75, 4.5)),
    ],
)
def test_streams_slow_each_other(factors: tuple[float, float], ends: tuple[float, float]) -> None:
    tasks = [Task("kernels", COMPUTE, 4.0), Task("transfer", COLLECTIVE, 3.0)]
    assert [span.end for span in run_streams(tasks, *factors)] == pytest.approx(ends)


def test_tasks_that_wait_for_one_another() -> None:
    tasks = [Task("a", COMPUTE, 1.0, (1,)), Task("b", COLLECTIVE, 1.0, (0,))]
    with pytest.raises(ValueError, match="none can begin"):
        run_streams(tasks)
