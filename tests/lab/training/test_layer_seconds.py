"""Seconds of launches and of tensor parallelism in a layer, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from dtensor_ring.lab.machine import Curve
from dtensor_ring.lab.training.launches import ATTENTION, STATE, OpLaunch
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
