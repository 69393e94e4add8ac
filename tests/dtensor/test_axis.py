"""An axis of a sequence: all that runs over it does as it says, and what it refuses."""

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
    Striped,
    TransferPolicy,
    Transport,
    ring_attention,
    sequence_layout,
    sequence_runs,
    shard_sequence,
    unshard_sequence,
)
from dtensor_ring.dtensor.annotation import group_of
from dtensor_ring.planning.plan import plan
from dtensor_ring.planning.route import ROUTES
from dtensor_ring.planning.slices import Slices
from dtensor_ring.transport.transport import P2P, ProcessGroupTransport, Work
from tests.dense import dense_attention
from tests.meshes import random_inputs
from tests.pool import on_ranks
from tests.refusals import Refused, check_refused
from tests.transport.test_rotation import recorded

SEQ_LEN = 24
EAGER = "aot_eager"
POLICY = TransferPolicy(kv_dtype=torch.bfloat16, grad_dtype=torch.bfloat16)


@pytest.mark.parametrize("strategy", ROUTES)
@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag", "block_cyclic:3"])
@on_ranks(3)
def test_dense_result(layout: str, strategy: str) -> None:
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


@on_ranks(3)
def test_uneven_shards() -> None:
    axis = SequenceAxis(init_device_mesh("cpu", (3,)), "zigzag")
    query, key, value, _ = random_inputs(seq_len=SEQ_LEN + 1)
    mine = axis.positions(SEQ_LEN + 1)
    out = axis.attention(*(x[:, :, mine] for x in (query, key, value)), seq_len=SEQ_LEN + 1)
    dense = dense_attention(query, key, value, Mask.causal()).out
    torch.testing.assert_close(out.double(), dense[:, :, mine], atol=1e-5, rtol=0)


@on_ranks(2)
def test_policy_and_kernel_reach_every_road() -> None:
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


@on_ranks(2)
def test_eight_bits_in_one_graph() -> None:
    """Compiled as eager, on shards and on DTensors; keys and values travel as bytes."""
    axis = SequenceAxis(init_device_mesh("cpu", (2,)), policy=TransferPolicy(kv_dtype="int8"))
    inputs = random_inputs(seq_len=SEQ_LEN, kv_heads=4)
    mine = axis.positions(SEQ_LEN)
    results = []
    for attend in (axis.attention, torch.compile(axis.attention, fullgraph=True, backend=EAGER)):
        for on_mesh in (False, True):
            own = [axis.shard(x, 2) if on_mesh else x[:, :, mine] for x in inputs[:3]]
            own = [x.detach().requires_grad_() for x in own]
            with recorded() as hops:
                out = attend(*own)
                (out.to_local() if on_mesh else out).backward(inputs[3][:, :, mine])
            assert {x.dtype for hop in hops for x in hop} == {torch.uint8, torch.float32}
            tensors = [out, *(x.grad for x in own)]
            results.append([x.to_local() if on_mesh else x for x in tensors])
    for others in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], others, strict=True))


@on_ranks(2)
def test_strategies_of_one_spec() -> None:
    """However they are spelled, equal strategies configure an axis alike."""
    mesh = init_device_mesh("cpu", (2,))
    for spec in ("ulysses", "ulysses:2", "ulysses:2+direct"):
        assert SequenceAxis(mesh, strategy=spec).strategy == "ulysses:2"


@on_ranks(2)
def test_a_layout_of_each_batch() -> None:
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
    with pytest.raises(ValueError, match="belongs to a batch: pass the Balanced layout"):
        axis.shard(query, 2)
    assert torch.equal(axis.unshard(inputs[0], 2), query)  # it knows its batch
    for over in (axis, SequenceAxis(mesh, layout)):
        with pytest.raises(ValueError, match="belongs to one batch"):
            over.positions(SEQ_LEN)
        again = over.unshard(over.shard(query, 2, layout), 2, layout)
        assert torch.equal(again, query)


@on_ranks(2)
def test_prepared_calls_plan_nothing() -> None:
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
        ({"seq_len": SEQ_LEN + 1, "runs": case["runs"]}, "these runs shard 24 tokens"),
        ({"seq_len": SEQ_LEN}, r"runs=sequence_runs"),
        ({"seq_len": SEQ_LEN, "runs": case["runs"], "cu_seqlens": bounds + 1}, "must start at 0"),
    ):
        with pytest.raises(ValueError, match=message):
            axis.prepare(**wrong)
    with pytest.raises(TypeError, match="cu_seqlens must be a plain tensor"):
        axis.prepare(SEQ_LEN, cu_seqlens=[0, 24])  # pyrefly: ignore[bad-argument-type]


@on_ranks(1)
def test_a_mesh_of_a_world_that_is_gone() -> None:
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
        assert dist.get_process_group_ranks(group_of(out.device_mesh, 0)) == [0, 1]
        assert out.device_mesh is x.device_mesh


# What an axis refuses: its configuration, policies and calls.


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


# An axis whose transport the user brings.


class Loud(ProcessGroupTransport):
    """Counts hops."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.num_hops = 0

    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        self.num_hops += bool(receives or sends)
        return super().start(receives, sends)


@on_ranks(3)
def test_a_transport_of_the_users() -> None:
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


@on_ranks(3)
def test_strategies_of_calls() -> None:
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
