"""Unmodified scaled_dot_product_attention on DTensors: a ring where annotated, else as before."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.torch_version import TorchVersion

from dtensor_ring import Mask, shard_sequence, unshard_sequence
from tests.dense import dense_attention
from tests.meshes import (
    BATCH,
    HEADS,
    REPLICATE,
    SEQUENCE,
    annotated_mesh,
    assert_same,
    eager_and_compiled,
    place,
    random_inputs,
)
from tests.pool import Pool

aten = torch.ops.aten

# Placements on a mesh of 2 x 2, layout, and options of scaled_dot_product_attention.
CASES: dict[str, tuple[tuple[Placement, ...], str, dict[str, Any]]] = {
    "dp, cp": ((BATCH, SEQUENCE), "zigzag", {"is_causal": True}),
    "dp, cp, full, scale": ((BATCH, SEQUENCE), "striped", {"scale": 0.2}),
    "dp, cp, grouped": ((BATCH, SEQUENCE), "striped", {"is_causal": True, "enable_gqa": True}),
    "cp, tp": ((SEQUENCE, HEADS), "contiguous", {"is_causal": True, "scale": 0.7}),
    "cp, tp, full, grouped": ((SEQUENCE, HEADS), "zigzag", {"enable_gqa": True}),
    "replicate, cp": ((REPLICATE, SEQUENCE), "zigzag", {"is_causal": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_dense_result(pool: Pool, name: str) -> None:
    pool.run(4, _check_case, *CASES[name])


def _check_case(placements: tuple[Placement, ...], layout: str, options: dict[str, Any]) -> None:
    mesh = annotated_mesh((2, 2), placements, layout)
    heads = (4, 2) if options.get("enable_gqa") else (4, 4)
    query, key, value, grad_out = random_inputs(2, 14 if layout != "striped" else 16, *heads)
    mask = Mask.causal() if options.get("is_causal") else Mask.full()
    dense = dense_attention(query, key, value, mask, scale=options.get("scale"))
    expected = [dense.out, *dense.backward(grad_out)]

    def run(query: Any, key: Any, value: Any) -> Any:
        return F.scaled_dot_product_attention(query, key, value, **options)

    inputs = [place(x, mesh, placements).requires_grad_() for x in (query, key, value)]
    placed_grad = place(grad_out, mesh, placements)
    for attention in eager_and_compiled(run):
        out = attention(*inputs)
        results = [out, *torch.autograd.grad(out, inputs, placed_grad)]
        for actual, dense_result in zip(results, expected, strict=True):
            assert_same(actual, dense_result, placements)
    with torch.inference_mode():
        assert_same(run(*inputs), dense.out, placements)

    ring_axis = placements.index(SEQUENCE)
    elsewhere = [(REPLICATE, REPLICATE), (SEQUENCE, REPLICATE)[:: -1 if ring_axis else 1]]
    for other in elsewhere:
        out = run(*inputs)
        grads = torch.autograd.grad(out, inputs, placed_grad.redistribute(placements=other))
        for actual, dense_result in zip(grads, expected[1:], strict=True):
            assert_same(actual, dense_result, placements)


def test_three_dims(pool: Pool) -> None:
    pool.run(2, _check_three_dims)


def _check_three_dims() -> None:
    """Not every torch has a fused kernel for them, but never is the result another one."""
    mesh = annotated_mesh((2,), (SEQUENCE,), "zigzag")
    x = torch.randn(3, 8, 4)
    expected = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    sharded = shard_sequence(x, mesh, 1)
    fused = TorchVersion(torch.__version__) >= (2, 15)
    for mode in (nullcontext, torch.inference_mode):
        with mode(), nullcontext() if fused else pytest.raises((RuntimeError, ValueError)):
            out = F.scaled_dot_product_attention(sharded, sharded, sharded, is_causal=True)
            assert out.placements == (Shard(1),)
            torch.testing.assert_close(unshard_sequence(out, 1), expected, atol=1e-5, rtol=1e-5)
        with mode(), pytest.raises((RuntimeError, ValueError)):
            F.scaled_dot_product_attention(sharded, sharded, sharded, x.new_zeros(8, 8))
    with torch.inference_mode(), pytest.raises(ValueError, match="dropout cannot be served"):
        F.scaled_dot_product_attention(sharded, sharded, sharded, dropout_p=0.5)


# The ops that GPUs choose between, called as `scaled_dot_product_attention` calls them.
GPU_OPS: dict[str, Callable[..., Any]] = {
    "flash": lambda q, k, v, **dropout: aten._scaled_dot_product_flash_attention(
        q, k, v, is_causal=True, scale=0.3, **dropout
    ),
    "efficient": lambda q, k, v, **dropout: aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, is_causal=True, scale=0.3, **dropout
    ),
    "cudnn": lambda q, k, v, **dropout: aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, is_causal=True, scale=0.3, **dropout
    ),
}


@pytest.mark.parametrize("name", GPU_OPS)
def test_ops_of_gpus(pool: Pool, name: str) -> None:
    pool.run(2, _check_gpu_op, name)


def _check_gpu_op(name: str) -> None:
    mesh = annotated_mesh((2,), (SEQUENCE,), "zigzag")
    *whole, grad_out = random_inputs(kv_heads=4)
    dense = dense_attention(*whole, Mask.causal(), scale=0.3)
    inputs = [place(x, mesh, (SEQUENCE,)).requires_grad_() for x in whole]
    out, lse, *_ = GPU_OPS[name](*inputs)
    grads = torch.autograd.grad(out, inputs, place(grad_out, mesh, (SEQUENCE,)))
    results = zip(
        [out, lse, *grads], [dense.out, dense.lse, *dense.backward(grad_out)], strict=True
    )
    for actual, expected in results:
        assert_same(actual, expected.detach(), (SEQUENCE,))
    with pytest.raises(ValueError, match=r"dropout cannot be served .* got dropout_p=0\.5"):
        GPU_OPS[name](*inputs, dropout_p=0.5)


# Placements of query, key and value over (annotated, not annotated), options, and the error.
REFUSALS: dict[str, tuple[list[tuple[Placement, ...]], dict[str, Any], str]] = {
    "attn_mask": ([(SEQUENCE, REPLICATE)] * 3, {"attn_mask": True}, r"attn_mask .*\(16, 16\)"),
    "dropout": ([(SEQUENCE, HEADS)] * 3, {"dropout_p": 0.5}, "dropout"),
    "dropout, causal": (
        [(SEQUENCE, REPLICATE)] * 3,
        {"dropout_p": 0.5, "is_causal": True},
        # Of DTensor, as PyTorch adds a causal mask that is a plain tensor; inference mode has ours.
        "mixed torch.Tensor and DTensor|dropout",
    ),
    "two axes": ([(SEQUENCE, SEQUENCE)] * 3, {}, "exactly one mesh axis, it is on 2 axes"),
    "query on one axis, key on the other": (
        [(SEQUENCE, REPLICATE), (REPLICATE, SEQUENCE), (REPLICATE, SEQUENCE)],
        {"is_causal": True},
        "must be sharded alike",
    ),
    "key and value replicated": (
        [(SEQUENCE, REPLICATE), (REPLICATE, REPLICATE), (REPLICATE, REPLICATE)],
        {},
        "must be sharded alike",
    ),
    # In inference it is decoding, see tests/inference/test_decode_dtensors.py.
    "query replicated, and of more tokens than are decoded": (
        [(REPLICATE, BATCH), (SEQUENCE, BATCH), (SEQUENCE, BATCH)],
        {"is_causal": True, "seq_len": 66},
        "must be sharded alike",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(pool: Pool, name: str, mode: Any) -> None:
    pool.run(4, _check_refusal, *REFUSALS[name], mode)


def _check_refusal(
    placements: list[tuple[Placement, ...]], options: dict[str, Any], message: str, mode: Any
) -> None:
    mesh = annotated_mesh((2, 2), (SEQUENCE, REPLICATE), "zigzag")
    options = dict(options)
    shape = (2, 4, options.pop("seq_len", 16), 8)
    inputs = [place(torch.randn(shape), mesh, where).requires_grad_() for where in placements]
    if "attn_mask" in options:
        placed = place(torch.zeros(16, 16), mesh, (REPLICATE, REPLICATE))
        for attn_mask in (placed, torch.zeros(16, 16)):
            with mode(), pytest.raises(ValueError, match=message):
                F.scaled_dot_product_attention(*inputs, attn_mask)
    else:
        with mode(), pytest.raises((ValueError, RuntimeError), match=message):
            F.scaled_dot_product_attention(*inputs, **options)


def test_unfused_is_refused(pool: Pool) -> None:
    pool.run(2, _check_unfused)


def _check_unfused() -> None:
    mesh = annotated_mesh((2,), (SEQUENCE,), "zigzag")
    query, key, value, _ = (place(x, mesh, (SEQUENCE,)) for x in random_inputs(kv_heads=4))
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(ValueError, match="needs one of the fused"):
        F.scaled_dot_product_attention(query, key, value)
    fewer = key[:, :2], value[:, :2]
    with torch.inference_mode(), pytest.raises(ValueError, match="heads without enable_gqa=True"):
        F.scaled_dot_product_attention(query, *fewer)
    integers = (x.to_local().int() for x in (query, key, value))
    integers = (DTensor.from_local(x, mesh, [SEQUENCE]) for x in integers)
    with pytest.raises(ValueError, match="a dtype that is not floating"):
        F.scaled_dot_product_attention(*integers)
    with pytest.raises(ValueError, match="head dims that differ"):
        F.scaled_dot_product_attention(query, key, value[..., :4])
