"""What an axis refuses: its configuration, policies and calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import (
    BlockCyclic,
    SequenceAxis,
    Striped,
    TransferPolicy,
    ring_attention,
    sequence_layout,
    unshard_sequence,
)
from tests.dtensor.test_axis import POLICY
from tests.pool import on_ranks
from tests.refusals import Refused, check_refused


@on_ranks(2)
def test_objects_of_one_axis() -> None:
    """What a new object leaves out is taken from the last one; each keeps its own."""
    mesh = init_device_mesh("cpu", (2,))
    axis = SequenceAxis(mesh, BlockCyclic(4), kernel="reference", policy=POLICY)
    again = SequenceAxis(mesh, "block_cyclic:4")
    assert (again.kernel, again.policy, again.strategy) == ("reference", POLICY, "ring")
    assert repr(again) == repr(axis)
    assert sequence_layout(mesh) == BlockCyclic(4)
    for name, value in (
        ("layout", Striped()),
        ("kernel", "cpu_flash"),
        ("strategy", "direct"),
        ("policy", TransferPolicy()),
    ):
        other = SequenceAxis(mesh, **({"layout": "block_cyclic:4"} | {name: value}))
        assert getattr(other, name) == value
    assert sequence_layout(mesh) == BlockCyclic(4)
    assert (axis.layout, axis.kernel, axis.strategy) == (BlockCyclic(4), "reference", "ring")
    assert axis.policy == POLICY


@on_ranks(2)
def test_tensors_of_two_objects() -> None:
    """Each goes by its own, in any order of the calls; mixed, both are named."""
    mesh, whole = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), torch.randn(1, 2, 24, 8)
    how: list[dict[str, Any]] = [{"layout": "zigzag"}, {"layout": "striped", "policy": POLICY}]
    axes = [SequenceAxis(mesh, **options) for options in how]
    inputs = [axis.shard(whole, 2) for axis in axes]
    for x in inputs[::-1]:
        out = unshard_sequence(ring_attention(x, x, x), 2)
        dense = F.scaled_dot_product_attention(whole, whole, whole, is_causal=True)
        torch.testing.assert_close(out, dense, atol=1e-2, rtol=0)  # keys in bfloat16
        assert torch.equal(unshard_sequence(x, 2), whole)
    zigzag, striped = inputs
    for mix in (lambda: zigzag + striped, lambda: ring_attention(zigzag, striped, striped)):
        with pytest.raises((ValueError, RuntimeError), match=r"(?s)in zigzag order.*in striped"):
            mix()


REFUSALS: Refused = {
    ValueError: {
        "unknown layout 'spiral'; known layouts: contig": {"layout": "spiral"},
        "unknown strategy 'tree'; known .*ring": {"strategy": "tree"},
        "do not divide the 1 of the axis; these.*ring": {"strategy": "ulysses:2"},
        "unknown kernel 'fast'; known kernels: flash_attn": {"kernel": "fast"},
    },
    TypeError: {
        "policy must be a TransferPolicy, such as": {"policy": torch.bfloat16},
        "mesh must be a DeviceMesh, got str": {"mesh": "cp"},
        "a subclass of Transport, got 42": {"transport": 42},
    },
}


@on_ranks(1)
def test_refusals() -> None:
    mesh = init_device_mesh("cpu", (1,))

    def run(options: dict[str, Any]) -> None:
        assert "transport" in options or sequence_layout(mesh) is None, "nothing was recorded"
        SequenceAxis(**{"mesh": mesh, **options})

    check_refused(REFUSALS, run)


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


WRONG: Refused = {
    TypeError: {
        "query must be a tensor or a DTensor, got int": (5, {}),
        r"must be a dtensor_ring\.M": (torch.zeros(1, 1, 2, 2), {"mask": 3}),
    },
    ValueError: {r"be \(B, N, L, H\), got shape \(2, 2\)": (torch.zeros(2, 2), {})},
}


@on_ranks(1)
def test_wrong_calls() -> None:
    axis = SequenceAxis(init_device_mesh("cpu", (1,)))
    check_refused(WRONG, lambda x: axis.attention(*[x[0]] * 3, **x[1]))
    x = axis.shard(torch.zeros(1, 1, 2, 2), 2)
    with pytest.raises(ValueError, match="seq_len is for local shards"):
        axis.attention(x, x, x, seq_len=2)
