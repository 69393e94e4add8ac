"""Ring attention on local shards and a mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import Mask, SequenceAxis, TransferPolicy, ring_attention
from dtensor_ring.planning.run_table import as_layout
from tests.dense import dense_attention
from tests.meshes import eager_and_compiled, random_inputs
from tests.pool import Pool, on_ranks

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


@pytest.mark.parametrize(
    ("world_size", "name", "layout"),
    [
        (1, "every option", "zigzag"),
        (3, "defaults", None),
        (3, "defaults", "zigzag"),
        (3, "every option", "contiguous"),
        (3, "every option", "striped"),
    ],
)
def test_dense_result(pool: Pool, name: str, layout: str | None, world_size: int) -> None:
    pool.run(world_size, _check_case, layout, CASES[name])


def _check_case(layout: str | None, options: dict[str, Any]) -> None:
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    options = dict(options)
    policy = options.pop("policy", None)
    if layout:
        SequenceAxis(mesh, layout, policy=policy)
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


@on_ranks(1)
def test_float64_takes_larger_numbers() -> None:
    mesh = init_device_mesh("cpu", (1,))
    query, key, value = (x.double() for x in random_inputs()[:3])
    out = ring_attention(query * 1e-300, key, value, mesh=mesh, scale=1e300, softcap=1e200)
    expected = dense_attention(query, key, value, Mask.causal(), scale=1.0).out
    torch.testing.assert_close(out, expected)


@on_ranks(1)
def test_a_scale_that_float32_rounds_to_0() -> None:
    inputs = random_inputs()[:3]
    out = ring_attention(*inputs, mesh=init_device_mesh("cpu", (1,)), scale=1e-300)
    expected = dense_attention(*inputs, Mask.causal(), scale=0.0).out
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
