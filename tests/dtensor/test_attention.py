"""Ring attention on local shards and a mesh, and what the public function refuses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from dtensor_ring import (
    Mask,
    TransferPolicy,
    ZigZag,
    ring_attention,
    set_sequence_layout,
    shard_sequence,
)
from dtensor_ring.planning.spelling import as_layout
from tests.dense import dense_attention
from tests.meshes import eager_and_compiled, random_inputs
from tests.pool import Pool
from tests.transport.test_rotation import recorded

SEQ_LEN = 12

CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "every option": {
        "mask": Mask.local(4, 1),
        "cu_seqlens": torch.tensor([[0, 5, 11], [0, 7, 12]], dtype=torch.int32),
        "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]),
        "scale": 0.4,
        "softcap": 3.0,
        "kernel": "reference",
        "policy": TransferPolicy(grad_dtype=torch.float64),
    },
}
HOW = ("kernel",)
"""Options that change no result."""


@pytest.mark.parametrize("layout", [None, "contiguous", "striped", "zigzag"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_dense_result(pool: Pool, name: str, layout: str | None, world_size: int) -> None:
    pool.run(world_size, _check_case, layout, CASES[name])


def _check_case(layout: str | None, options: dict[str, Any]) -> None:
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    options = dict(options)
    policy = options.pop("policy", None)
    if layout:
        set_sequence_layout(mesh, layout, policy=policy)
    mine = as_layout(layout or "contiguous").positions(dist.get_rank(), world_size, SEQ_LEN)
    *inputs, grad_out = random_inputs(seq_len=SEQ_LEN)
    grad_lse = torch.randn(grad_out.shape[:3])
    scoring = {name: value for name, value in options.items() if name not in HOW}
    dense = dense_attention(*inputs, **{"mask": Mask.causal(), **scoring})
    expected = dense.out, dense.lse, *dense.backward(grad_out, grad_lse)[:3]

    def run(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return ring_attention(query, key, value, mesh=mesh, return_lse=True, **options)

    for attention in eager_and_compiled(run):
        local = [x[:, :, mine].clone().requires_grad_() for x in inputs]
        outputs = attention(*local)
        grads = grad_out[:, :, mine], grad_lse[:, :, mine]
        results = *outputs, *torch.autograd.grad(outputs, local, grads)
        for actual, whole in zip(results, expected, strict=True):
            assert actual.dtype == torch.float32
            torch.testing.assert_close(actual.double(), whole[:, :, mine], atol=1e-5, rtol=1e-5)
    assert torch.equal(ring_attention(*local, mesh=mesh, **options), outputs[0])


@pytest.mark.parametrize("grad_dtype", [None, torch.bfloat16, torch.float64])
def test_sums_of_gradients_travel_in_a_dtype(pool: Pool, grad_dtype: torch.dtype | None) -> None:
    for dtypes, error in pool.run(3, _sums_of_gradients, grad_dtype):
        assert dtypes == {torch.float32, grad_dtype or torch.float32}
        least, most = (1e-5, 1e-2) if grad_dtype == torch.bfloat16 else (0.0, 1e-5)
        assert least <= error <= most


def _sums_of_gradients(grad_dtype: torch.dtype | None) -> tuple[set[torch.dtype], float]:
    """Dtypes of the messages of backward, and the error of the gradient of the key."""
    mesh = init_device_mesh("cpu", (3,))
    policy = None if grad_dtype is None else TransferPolicy(grad_dtype=grad_dtype)
    set_sequence_layout(mesh, "contiguous", policy=policy)
    *inputs, grad_out = random_inputs(seq_len=SEQ_LEN)
    mine = as_layout("contiguous").positions(dist.get_rank(), 3, SEQ_LEN)
    local = [x[:, :, mine].clone().requires_grad_() for x in inputs]
    out = ring_attention(*local, mesh=mesh, mask=Mask.full())
    with recorded() as hops:
        out.backward(grad_out[:, :, mine])
    expected = dense_attention(*inputs, Mask.full()).backward(grad_out)[1][:, :, mine]
    error = (local[1].grad - expected).abs().max() / expected.abs().max()
    return {message.dtype for hop in hops for message in hop}, error.item()


def _as_dtensors(x: Tensor, mesh: DeviceMesh) -> dict[str, Any]:
    return dict.fromkeys(("query", "key", "value"), shard_sequence(x, mesh["cp"], 2))


# What is passed instead of three local shards and the mesh, and the error.
REFUSALS: dict[str, tuple[Callable[[Tensor, DeviceMesh], dict[str, Any]], Any, str]] = {
    "no mesh": (lambda x, mesh: {"mesh": None}, ValueError, "needs mesh=.* see shard_sequence"),
    "mesh of two axes": (lambda x, mesh: {"mesh": mesh}, ValueError, "a ring runs over one axis"),
    "mesh and DTensors": (_as_dtensors, ValueError, "DTensors carry theirs; leave it out"),
    "only the query a DTensor": (
        lambda x, mesh: {"query": shard_sequence(x, mesh["cp"], 2), "mesh": None},
        TypeError,
        "all be DTensors or none, got query DTensor, key Tensor, value Tensor",
    ),
    "only the key a DTensor": (
        lambda x, mesh: {"key": shard_sequence(x, mesh["cp"], 2)},
        TypeError,
        "all be DTensors or none, got query Tensor, key DTensor, value Tensor",
    ),
    "mask a tensor": (lambda x, mesh: {"mask": x}, TypeError, r"must be a dtensor_ring\.Mask"),
    "mask None": (lambda x, mesh: {"mask": None}, TypeError, r"Mask\.causal\(\), got None"),
    "softcap": (lambda x, mesh: {"softcap": -0.1}, ValueError, "must be 0 .none. or positive"),
    "infinite softcap": (lambda x, mesh: {"softcap": torch.inf}, ValueError, "finite, got inf"),
    "infinite scale": (lambda x, mesh: {"scale": torch.inf}, ValueError, "be finite, got inf"),
    "list for a tensor": (lambda x, mesh: {"key": [1.0]}, TypeError, "key must be a .* got list"),
    "name for a mesh": (lambda x, mesh: {"mesh": "cp"}, TypeError, "a DeviceMesh, got str"),
    "sinks of integers": (
        lambda x, mesh: {"sinks": torch.zeros(4).int()},
        ValueError,
        "sinks must have a floating dtype, got torch.int32",
    ),
    "sinks elsewhere": (
        lambda x, mesh: {"sinks": torch.zeros(4, device="meta")},
        ValueError,
        "sinks must be on cpu, got meta",
    ),
    "boundaries in a list": (
        lambda x, mesh: {"cu_seqlens": [0, 4, 8]},
        TypeError,
        r"cu_seqlens must be a plain tensor, as torch.tensor\(x, dtype=torch.int32\), got list",
    ),
    "a layout for its runs": (
        lambda x, mesh: {"runs": ZigZag()},
        TypeError,
        r"runs must be a plain tensor, as sequence_runs\(layout\), got ZigZag",
    ),
    "no softcap": (lambda x, mesh: {"softcap": None}, ValueError, "0 .none. or .* got None"),
    "sinks a DTensor": (
        lambda x, mesh: {"sinks": DTensor.from_local(torch.zeros(4), mesh["cp"], run_check=False)},
        TypeError,
        "sinks beside plain query, key and value must be plain, too, got a DTensor",
    ),
    "three dims": (
        lambda x, mesh: {"query": x[0]},
        ValueError,
        r"query must be \(B, N, L, H\), got",
    ),
    "heads": (
        lambda x, mesh: {"query": x[:, :3], "key": x[:, :2], "value": x[:, :2]},
        ValueError,
        "query heads must be a multiple of the key heads",
    ),
    "length of the key": (
        lambda x, mesh: {"query": x[:, :, :3]},
        ValueError,
        "6 query and 8 key tokens, .*cross attention, which has no diagonal: it takes Mask.full",
    ),
    "cu_seqlens of int64": (
        lambda x, mesh: {"cu_seqlens": torch.tensor([0, 8])},
        ValueError,
        r"cu_seqlens must be int32, got torch.int64; use \.int\(\)",
    ),
    "cu_seqlens too long": (
        lambda x, mesh: {"cu_seqlens": torch.tensor([0, 9]).int()},
        ValueError,
        r"length 8, got \[0, 9\]",
    ),
    "key_cu_seqlens under a causal mask": (
        lambda x, mesh: {"key_cu_seqlens": torch.tensor([0, 8]).int()},
        ValueError,
        "documents of their own, are cross attention, which has no diagonal: it takes Mask.full",
    ),
    "key_cu_seqlens alone": (
        lambda x, mesh: {"key_cu_seqlens": torch.tensor([0, 8]).int(), "mask": Mask.full()},
        ValueError,
        "as many boundaries in cu_seqlens as in key_cu_seqlens, got none and 2",
    ),
    "runs of int64": (
        lambda x, mesh: {"runs": torch.tensor([[[0, 4]], [[4, 4]]])},
        ValueError,
        r"runs must be int32, got torch.int64; use \.int\(\)",
    ),
    "runs of another batch": (
        lambda x, mesh: {"runs": torch.tensor([[[0, 3]], [[3, 3]]]).int()},
        ValueError,
        "these runs deal 6 tokens to 2 ranks, not 8 tokens to 2; make a layout for each batch",
    ),
    "sinks": (
        lambda x, mesh: {"sinks": torch.zeros(1)},
        ValueError,
        r"one logit per query head, shape \(4,\), got \(1,\)",
    ),
    "kernel": (
        lambda x, mesh: {"kernel": "magic"},
        ValueError,
        "unknown kernel 'magic'; known kernels: .*reference",
    ),
    "kernel without softcap": (
        lambda x, mesh: {"kernel": "cpu_flash", "softcap": 1.0},
        ValueError,
        "kernel 'cpu_flash' cannot serve .*softcap",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(pool: Pool, name: str) -> None:
    pool.run(2, _check_refusal, name)


def _check_refusal(name: str) -> None:
    changes, error, message = REFUSALS[name]
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    x = torch.randn(2, 4, 4, 8)
    given = {"query": x, "key": x, "value": x, "mesh": mesh["cp"], **changes(x, mesh)}
    with pytest.raises(error, match=message):
        ring_attention(**given)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "scaled": lambda out: out.mul_(2),
    "moved": lambda out: out.add_(1),
    "in part": lambda out: out.select(2, 0).zero_(),
    "through a view": lambda out: out.transpose(1, 2).mul_(2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_outputs_change_in_place(pool: Pool, change: str) -> None:
    pool.run(2, _check_change, change)


def _check_change(change: str) -> None:
    """As those of PyTorch's attention in one process: the next backward sees that they did."""
    mesh = init_device_mesh("cpu", (2,))
    set_sequence_layout(mesh, "zigzag")
    whole = [x.requires_grad_() for x in random_inputs(kv_heads=4)[:3]]
    shards = [shard_sequence(x.detach(), mesh, 2) for x in whole]
    placed = [x.requires_grad_() for x in shards]
    local = [x.to_local().detach().requires_grad_() for x in shards]
    for attend in (
        partial(F.scaled_dot_product_attention, *whole),
        partial(ring_attention, *local, mesh=mesh),
        partial(ring_attention, *placed),
        partial(F.scaled_dot_product_attention, *placed),
    ):
        out, same = attend(), attend().detach()
        CHANGES[change](out)
        CHANGES[change](same)
        assert torch.equal(_shard(out), _shard(same))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def _shard(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def test_outputs_of_no_grad_change_in_place(pool: Pool) -> None:
    pool.run(1, _check_change_after_no_grad)


def _check_change_after_no_grad() -> None:
    mesh, factor = init_device_mesh("cpu", (1,)), torch.ones((), requires_grad=True)
    with torch.no_grad():
        out = ring_attention(*random_inputs()[:3], mesh=mesh)
    expected = out.sum()
    out.mul_(factor).sum().backward()
    torch.testing.assert_close(factor.grad, expected)
