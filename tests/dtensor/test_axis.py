"""An axis configured once: all that runs over it does as it says."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtensor_ring import (
    Balanced,
    BlockCyclic,
    Mask,
    SequenceAxis,
    TransferPolicy,
    Transport,
    ring_attention,
    sequence_layout,
    sequence_runs,
    set_sequence_layout,
    shard_sequence,
    unshard_sequence,
)
from dtensor_ring.planning.masks.slices import Slices
from dtensor_ring.planning.plan import plan
from dtensor_ring.transport.process_group import ProcessGroupTransport
from dtensor_ring.transport.protocol import P2P, Work
from tests.dense import dense_attention
from tests.meshes import random_inputs
from tests.pool import Pool
from tests.transport.test_rotation import recorded

SEQ_LEN = 24
POLICY = TransferPolicy(kv_dtype=torch.bfloat16, grad_dtype=torch.bfloat16)


@pytest.mark.parametrize("strategy", ["ring", "around", "direct", "all_gather"])
@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag", "block_cyclic:3"])
def test_dense_result(pool: Pool, layout: str, strategy: str) -> None:
    pool.run(3, _check_dense, layout, strategy)


def _check_dense(layout: str, strategy: str) -> None:
    """The same on plain shards, on DTensors, and by the functions."""
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
    axis = SequenceAxis(mesh["cp"], layout, strategy=strategy)
    inputs = random_inputs(seq_len=SEQ_LEN)
    mask, cu_seqlens = Mask.local(5, 1), torch.tensor([0, 7, 9, 22], dtype=torch.int32)
    options: dict[str, Any] = {"mask": mask, "cu_seqlens": cu_seqlens, "scale": 0.3}
    dense = dense_attention(*inputs[:3], **options)
    expected = dense.out, *dense.backward(inputs[3])
    mine = axis.positions(SEQ_LEN)
    assert mine.tolist() == axis.layout.positions(dist.get_rank(), 3, SEQ_LEN)
    sharded = [axis.shard(x, 2).requires_grad_() for x in inputs[:3]]
    local = [x[:, :, mine].clone().requires_grad_() for x in inputs[:3]]
    for given, attend in (
        (sharded, axis.attention),
        (local, axis.attention),
        (sharded, ring_attention),
        (local, lambda *x, **more: ring_attention(*x, mesh=mesh["cp"], **more)),
    ):
        out = attend(*given, **options)
        grad = inputs[3][:, :, mine]
        if isinstance(out, DTensor):
            out = out.to_local()
        grads = torch.autograd.grad(out, given, grad)
        for actual, whole in zip((out, *grads), expected, strict=True):
            actual = actual.to_local() if isinstance(actual, DTensor) else actual
            torch.testing.assert_close(actual.double(), whole[:, :, mine], atol=2e-5, rtol=0)
    whole = axis.unshard(axis.attention(*sharded, **options), 2)
    torch.testing.assert_close(whole.double(), dense.out, atol=2e-5, rtol=0)


def test_uneven_shards(pool: Pool) -> None:
    pool.run(3, _check_uneven)


def _check_uneven() -> None:
    axis = SequenceAxis(init_device_mesh("cpu", (3,)), "zigzag")
    query, key, value, _ = random_inputs(seq_len=SEQ_LEN + 1)
    mine = axis.positions(SEQ_LEN + 1)
    out = axis.attention(*(x[:, :, mine] for x in (query, key, value)), seq_len=SEQ_LEN + 1)
    dense = dense_attention(query, key, value, Mask.causal()).out
    torch.testing.assert_close(out.double(), dense[:, :, mine], atol=1e-5, rtol=0)


def test_policy_and_kernel_reach_every_road(pool: Pool) -> None:
    pool.run(2, _check_roads)


def _check_roads() -> None:
    """`ring_attention`, SDPA on DTensors, and the axis itself send the same dtypes."""
    axis = SequenceAxis(init_device_mesh("cpu", (2,)), "zigzag", kernel="reference", policy=POLICY)
    inputs = random_inputs(seq_len=SEQ_LEN, kv_heads=4)
    dense = dense_attention(*inputs[:3], Mask.causal()).out
    mine = axis.positions(SEQ_LEN)
    for attend in (
        axis.attention,
        ring_attention,
        lambda *x: F.scaled_dot_product_attention(*x, is_causal=True),
    ):
        sharded = [axis.shard(x, 2).requires_grad_() for x in inputs[:3]]
        with recorded() as hops:
            out = attend(*sharded).to_local()
            out.backward(inputs[3][:, :, mine])
        assert {message.dtype for hop in hops for message in hop} == {torch.bfloat16}
        error = (out.double() - dense[:, :, mine]).abs().max()
        assert 1e-6 < error < 2e-2, "keys and values were rounded, and nothing else"


class Loud(ProcessGroupTransport):
    """Counts hops."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.num_hops = 0

    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        self.num_hops += bool(receives or sends)
        return super().start(receives, sends)


def test_a_transport_of_the_users(pool: Pool) -> None:
    pool.run(3, _check_transport)


def _check_transport() -> None:
    mesh = init_device_mesh("cpu", (3,))
    transport: Transport = Loud(mesh.get_group())
    axis = SequenceAxis(mesh, "contiguous", transport=transport)
    inputs = [axis.shard(x, 2) for x in random_inputs(seq_len=SEQ_LEN)[:3]]
    axis.attention(*inputs, mask=Mask.full())
    assert transport.num_hops == 2
    F.scaled_dot_product_attention(inputs[0], *(x.repeat_interleave(2, 1) for x in inputs[1:]))
    assert transport.num_hops == 4
    assert SequenceAxis(mesh, "contiguous", transport=transport).layout == axis.layout
    with pytest.raises(ValueError, match=r"has the transport .*, it cannot get .*configured once"):
        SequenceAxis(mesh, "contiguous", transport=Loud(mesh.get_group()))


def test_configured_once(pool: Pool) -> None:
    pool.run(2, _check_once)


def _check_once() -> None:
    mesh = init_device_mesh("cpu", (2,))
    axis = SequenceAxis(mesh, BlockCyclic(4), kernel="reference", policy=POLICY)
    again = set_sequence_layout(mesh, "block_cyclic:4")
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


def test_strategies_of_one_spelling(pool: Pool) -> None:
    pool.run(2, _check_spellings)


def _check_spellings() -> None:
    """However they are spelled, equal strategies configure an axis alike."""
    mesh = init_device_mesh("cpu", (2,))
    for spelling in ("ulysses", "ulysses:2", "ulysses:2+direct"):
        assert SequenceAxis(mesh, strategy=spelling).strategy == "ulysses:2"


def test_strategies_of_calls(pool: Pool) -> None:
    pool.run(3, _check_calls)


def _check_calls() -> None:
    """A call may have another strategy than its axis."""
    mesh = init_device_mesh("cpu", (3,))
    transport = Loud(mesh.get_group())
    axis = SequenceAxis(mesh, "zigzag", strategy="around", transport=transport)
    sharded = [axis.shard(x, 2) for x in random_inputs(seq_len=SEQ_LEN)[:3]]
    shards = [x.to_local() for x in sharded]
    expected = axis.attention(*shards)
    for attend, given in (
        (axis.attention, shards),
        (axis.attention, sharded),
        (partial(ring_attention, mesh=mesh), shards),
        (ring_attention, sharded),
    ):
        # All at once is one hop with messages, and a ring of three has two.
        for strategy, num_hops in ((None, 2), ("all_gather", 1)):
            before = transport.num_hops
            out = attend(*given, strategy=strategy)
            assert transport.num_hops == before + num_hops
            out = out.to_local() if isinstance(out, DTensor) else out
            torch.testing.assert_close(out, expected)
        for wrong, match in (("tree", "unknown strategy 'tree'"), ("ulysses:2", "do not divide")):
            with pytest.raises(ValueError, match=match):
                attend(*given, strategy=wrong)


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
        ("kv_dtype", torch.int8, ValueError, "kv_dtype must be floating, 16 bits or more"),
        ("grad_dtype", torch.int32, ValueError, r"grad_dtype must be .* got torch\.int32"),
        ("grad_dtype", None, TypeError, r"grad_dtype must be a torch\.dtype, got None"),
        ("num_parts", 0, ValueError, r"num_parts must be from 1 to .*, got 0"),
        ("num_parts", 1.5, TypeError, r"num_parts must be an int, got 1\.5"),
        ("kv_dtype", "bfloat16", TypeError, "kv_dtype must be a torch.dtype, got 'bfloat16'"),
    ],
)
def test_policies_that_are_none(name: str, dtype: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        TransferPolicy(**{name: dtype})


def test_a_layout_of_each_batch(pool: Pool) -> None:
    pool.run(2, _check_per_batch)


def _check_per_batch() -> None:
    """By name it is accepted as by value; each batch then brings its runs."""
    mesh = init_device_mesh("cpu", (2,))
    axis = SequenceAxis(mesh, "balanced")
    query, key, value, _ = random_inputs(seq_len=SEQ_LEN)
    for end in (5, 17):
        bounds = torch.tensor([0, end, SEQ_LEN], dtype=torch.int32)
        layout = Balanced(Mask.causal(), SEQ_LEN, 2, bounds, block=2)
        inputs = [shard_sequence(x, mesh, 2, layout) for x in (query, key, value)]
        out = axis.attention(*inputs, cu_seqlens=bounds, runs=sequence_runs(layout))
        dense = dense_attention(query, key, value, Mask.causal(), cu_seqlens=bounds).out
        whole: Tensor = unshard_sequence(out, 2, layout)
        torch.testing.assert_close(whole.double(), dense, atol=1e-5, rtol=0)
    for given in (inputs, [x.to_local() for x in inputs]):
        with pytest.raises(ValueError, match=r"is annotated balanced, .* runs=sequence_runs"):
            axis.attention(*given)
    for call in (lambda: axis.shard(query, 2), lambda: axis.unshard(inputs[0], 2)):
        with pytest.raises(ValueError, match="belongs to a batch: pass the Balanced layout"):
            call()
    for over in (axis, SequenceAxis(mesh, layout)):
        with pytest.raises(ValueError, match="belongs to one batch"):
            over.positions(SEQ_LEN)
        again = over.unshard(over.shard(query, 2, layout), 2, layout)
        assert torch.equal(again, query)


def test_prepared_calls_plan_nothing(pool: Pool) -> None:
    pool.run(2, _check_prepared)


def _check_prepared() -> None:
    """Not of the same tensors, and not in the same thread."""
    mesh = init_device_mesh("cpu", (2,))
    inputs = random_inputs(seq_len=SEQ_LEN)[:3]
    bounds = torch.tensor([0, 5, SEQ_LEN], dtype=torch.int32)
    layout = Balanced(Mask.sliding(7), SEQ_LEN, 2, bounds)
    rows = torch.stack([bounds] * len(inputs[0])) - torch.tensor([0, 0, 1], dtype=torch.int32)
    cases: list[dict[str, Any]] = [
        {"mask": Mask.sliding(7), "cu_seqlens": bounds, "runs": sequence_runs(layout)},
        {"cu_seqlens": rows, "runs": sequence_runs(layout)},
        {"slices": Slices([(0, SEQ_LEN)], [(0, 9)], [(None, None)]), "runs": sequence_runs(layout)},
    ]
    axis, sharded = SequenceAxis(mesh, layout), [shard_sequence(x, mesh, 2, layout) for x in inputs]
    failing = patch.object(plan, "_function", side_effect=AssertionError("planned"))
    for case in cases:
        plan.clear()
        with failing, pytest.raises(AssertionError, match="planned"):
            axis.attention(*sharded, **case)
        with ThreadPoolExecutor(1) as executor:
            executor.submit(axis.prepare, SEQ_LEN, **case).result()
        copies = {name: x.clone() if isinstance(x, Tensor) else x for name, x in case.items()}
        with failing:
            axis.attention(*sharded, **copies)
    for wrong, message in (
        ({"seq_len": -1, "runs": case["runs"]}, "seq_len must be from 0"),
        ({"seq_len": SEQ_LEN + 1, "runs": case["runs"]}, "these runs deal 24 tokens"),
        ({"seq_len": SEQ_LEN}, r"runs=sequence_runs"),
        ({"seq_len": SEQ_LEN, "runs": case["runs"], "cu_seqlens": bounds + 1}, "must start at 0"),
    ):
        with pytest.raises(ValueError, match=message):
            axis.prepare(**wrong)
    with pytest.raises(TypeError, match="cu_seqlens must be a plain tensor"):
        axis.prepare(SEQ_LEN, cu_seqlens=[0, 24])  # pyrefly: ignore[bad-argument-type]


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


def test_a_mesh_of_a_world_that_is_gone(pool: Pool) -> None:
    pool.run(1, _check_two_worlds)


def _check_two_worlds() -> None:
    """Meshes of two worlds compare equal; what comes out has the mesh that went in."""
    for num_groups in (0, 3):
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        for _ in range(num_groups):
            dist.new_group([0, 1, 2])
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        axis = SequenceAxis(mesh["cp"])
        x = axis.shard(torch.zeros(1, 2, 8, 4), 2)
        out = axis.attention(x, x, x)
        assert dist.get_process_group_ranks(out.device_mesh.get_group()) == [0, 1]
        assert out.device_mesh is x.device_mesh
