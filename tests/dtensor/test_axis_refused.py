"""What an axis refuses: its configuration, policies and calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import (
    BlockCyclic,
    SequenceAxis,
    TransferPolicy,
    sequence_layout,
)
from tests.dtensor.test_axis import POLICY
from tests.pool import Pool


def test_configured_once(pool: Pool) -> None:
    pool.run(2, _check_once)


def _check_once() -> None:
    mesh = init_device_mesh("cpu", (2,))
    axis = SequenceAxis(mesh, BlockCyclic(4), kernel="reference", policy=POLICY)
    again = SequenceAxis(mesh, "block_cyclic:4")
    assert (again.kernel, again.policy, again.strategy) == ("reference", POLICY, "ring")
    assert repr(again) == repr(axis)
    assert sequence_layout(mesh) == BlockCyclic(4)
    for layout, options, match in (
        ("block_cyclic:2", {}, r"annotated block_cyclic:4, it cannot become block_cyclic:2: tens"),
        ("block_cyclic:4", {"kernel": "cpu_flash"}, "kernel='reference', it .* kernel='cpu_flash'"),
        ("block_cyclic:4", {"strategy": "direct"}, "strategy='ring', it .* get strategy='direct'"),
        (
            "block_cyclic:4",
            {"policy": TransferPolicy()},
            r"policy=.*=torch.bfloat16, .*\), it cannot get policy=.*=torch.float32, .*\)",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            SequenceAxis(mesh, layout, **options)
    assert (axis.layout, axis.kernel) == (BlockCyclic(4), "reference")


REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "layout": ({"layout": "spiral"}, ValueError, "unknown layout 'spiral'; known layouts: contig"),
    "strategy": ({"strategy": "tree"}, ValueError, "unknown strategy 'tree'; known .*ring"),
    "groups": (
        {"strategy": "ulysses:2"},
        ValueError,
        "do not divide the 1 of the axis; these.*ring",
    ),
    "kernel": ({"kernel": "fast"}, ValueError, "unknown kernel 'fast'; known kernels: flash_attn"),
    "policy": ({"policy": torch.bfloat16}, TypeError, "policy must be a TransferPolicy, such as"),
    "mesh": ({"mesh": "cp"}, TypeError, "mesh must be a DeviceMesh, got str"),
    "transport": ({"transport": 42}, TypeError, "a subclass of Transport, got 42"),
}


def test_refusals(pool: Pool) -> None:
    pool.run(1, _check_refusals)


def _check_refusals() -> None:
    mesh = init_device_mesh("cpu", (1,))
    for options, error, match in REFUSALS.values():
        with pytest.raises(error, match=match):
            SequenceAxis(**{"mesh": mesh, **options})
        assert "transport" in options or sequence_layout(mesh) is None, "nothing was recorded"


@pytest.mark.parametrize(
    ("name", "dtype", "error", "match"),
    [
        ("kv_dtype", torch.uint8, ValueError, "kv_dtype must be floating, 16 bits or more"),
        ("kv_dtype", torch.float8_e5m2, ValueError, '16 bits or more, "int8" or "fp8", got'),
        ("grad_dtype", torch.int32, ValueError, r"grad_dtype must be .* got torch\.int32"),
        ("grad_dtype", None, TypeError, r"grad_dtype must be a torch\.dtype, got None"),
        ("num_parts", 0, ValueError, r"num_parts must be from 1 to .*, got 0"),
        ("num_parts", 1.5, TypeError, r"num_parts must be an int, got 1\.5"),
        ("kv_dtype", "bfloat16", ValueError, 'torch.dtype, "int8" or "fp8", got \'bf'),
        ("kv_dtype", 8, TypeError, r"kv_dtype must be a torch\.dtype, got 8"),
    ],
)
def test_policies_that_are_none(name: str, dtype: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        TransferPolicy(**{name: dtype})


WRONG: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "a number": (5, {}, TypeError, "query must be a tensor or a DTensor, got int"),
    "two dims": (torch.zeros(2, 2), {}, ValueError, r"be \(B, N, L, H\), got shape \(2, 2\)"),
    "no mask": (torch.zeros(1, 1, 2, 2), {"mask": 3}, TypeError, r"must be a dtensor_ring\.M"),
}


def test_wrong_calls(pool: Pool) -> None:
    pool.run(1, _check_wrong_calls)


def _check_wrong_calls() -> None:
    axis = SequenceAxis(init_device_mesh("cpu", (1,)))
    for x, options, error, match in WRONG.values():
        with pytest.raises(error, match=match):
            axis.attention(x, x, x, **options)
    x = axis.shard(torch.zeros(1, 1, 2, 2), 2)
    with pytest.raises(ValueError, match="seq_len is for local shards"):
        axis.attention(x, x, x, seq_len=2)
