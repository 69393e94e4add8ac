"""Unmodified scaled_dot_product_attention on DTensors: a ring where annotated, else as before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtensor_ring import Mask, SequenceAxis, shard_sequence, unshard_sequence
from dtensor_ring.compute.dropout import draw_seed
from dtensor_ring.dtensor import sdpa
from tests.dense import dense_attention, dropout_factors
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
from tests.pool import on_ranks

aten = torch.ops.aten

# Placements on a mesh of 2 x 2, layout, and options of scaled_dot_product_attention.
CASES: dict[str, tuple[tuple[Placement, ...], str, dict[str, Any]]] = {
    "dp, cp": ((BATCH, SEQUENCE), "zigzag", {"is_causal": True}),
    "dp, cp, full, scale": ((BATCH, SEQUENCE), "striped", {"scale": 0.2}),
    "dp, cp, grouped": ((BATCH, SEQUENCE), "striped", {"is_causal": True, "enable_gqa": True}),
    "cp, tp": ((SEQUENCE, HEADS), "contiguous", {"is_causal": True, "scale": 0.7}),
}


@pytest.mark.parametrize("name", CASES)
@on_ranks(4)
def test_dense_result(name: str) -> None:
    placements, layout, options = CASES[name]
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


@pytest.mark.parametrize("shape", [(8, 4), (3, 8, 4), (2, 1, 3, 8, 4)])
@on_ranks(2)
def test_other_numbers_of_dims(shape: tuple[int, ...]) -> None:
    """PyTorch has fused kernels for some of them."""
    mesh = annotated_mesh((2,), (SEQUENCE,), "zigzag")
    x, dim = torch.randn(shape), len(shape) - 2
    expected = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    sharded = shard_sequence(x, mesh, dim)
    for mode in (nullcontext, torch.inference_mode):
        with mode():
            out = F.scaled_dot_product_attention(sharded, sharded, sharded, is_causal=True)
            assert out.placements == (Shard(dim),)
            torch.testing.assert_close(unshard_sequence(out, dim), expected, atol=1e-5, rtol=1e-5)
        with mode(), pytest.raises(ValueError, match="attn_mask cannot be served"):
            F.scaled_dot_product_attention(sharded, sharded, sharded, x.new_zeros(8, 8))
        torch.manual_seed(3)
        factors = dropout_factors(0.5, int(draw_seed(x.device)), (*_four(x).shape[:3], 8))
        dense = dense_attention(*[_four(x)] * 3, Mask.full(), factors=factors)
        torch.manual_seed(3)
        with mode():
            out = F.scaled_dot_product_attention(sharded, sharded, sharded, dropout_p=0.5)
        expected_out = dense.out.view(shape).detach().float()
        torch.testing.assert_close(unshard_sequence(out, dim), expected_out, atol=1e-5, rtol=1e-5)


def _four(x: Tensor) -> Tensor:
    """With as many dims as an attention has."""
    return x.reshape(-1, *(1, *x.shape)[-3:])


@pytest.mark.parametrize("shape", [(0, 3, 8, 4), (2, 0, 8, 4), (2, 3, 0, 4), (0, 8, 4)])
@on_ranks(2)
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    """PyTorch computes these before DTensor's dispatcher sees them."""
    mesh, dim = annotated_mesh((2,), (SEQUENCE,), "zigzag"), len(shape) - 2
    whole = [torch.randn(shape), torch.randn(shape), torch.randn(*shape[:-1], 5)]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True)
    inputs = [shard_sequence(x.requires_grad_(), mesh, dim) for x in whole]
    out = F.scaled_dot_product_attention(*inputs, is_causal=True)
    assert out.placements == (Shard(dim),)
    assert out.shape == expected.shape
    assert torch.equal(unshard_sequence(out, dim), expected)
    grads = torch.autograd.grad(unshard_sequence(out, dim).sum(), whole)
    assert all(torch.equal(x, torch.zeros_like(x)) for x in grads)


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
@on_ranks(2)
def test_ops_of_gpus(name: str) -> None:
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
    with pytest.raises(ValueError, match=r"_attention cannot; call it under .*MATH"):
        GPU_OPS[name](*inputs, dropout_p=0.5)


# Placements of query, key and value over (annotated, not annotated), options, and the error.
REFUSALS: dict[str, tuple[list[tuple[Placement, ...]], dict[str, Any], str]] = {
    "attn_mask": ([(SEQUENCE, REPLICATE)] * 3, {"attn_mask": True}, r"attn_mask .*\(16, 16\)"),
    "dropout of all": ([(SEQUENCE, HEADS)] * 3, {"dropout_p": 1.0}, "less than 1, got 1.0"),
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
    # In inference it is decoding, see tests/decode/test_decode_op.py.
    "query replicated, and of more tokens than are decoded": (
        [(REPLICATE, BATCH), (SEQUENCE, BATCH), (SEQUENCE, BATCH)],
        {"is_causal": True, "seq_len": 66},
        "must be sharded alike",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
@on_ranks(4)
def test_refusals(mode: Any) -> None:
    mesh = annotated_mesh((2, 2), (SEQUENCE, REPLICATE), "zigzag")
    for refusal in REFUSALS.values():
        _check_refusal(mesh, mode, *refusal)


def _check_refusal(
    mesh: DeviceMesh,
    mode: Any,
    placements: list[tuple[Placement, ...]],
    options: dict[str, Any],
    message: str,
) -> None:
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


# What PyTorch would compute op by op: key/value heads and head dim of the values, and options.
UNFUSED: dict[str, tuple[int, int, dict[str, Any]]] = {
    "causal": (4, 8, {"is_causal": True}),
    "full, grouped, scaled": (2, 8, {"enable_gqa": True, "scale": 0.3}),
    "head dims that differ": (4, 6, {"is_causal": True}),
}


@pytest.mark.parametrize("name", UNFUSED)
@on_ranks(2)
def test_unfused(name: str) -> None:
    """In a context without fused kernels, with and without gradients, in float64."""
    kv_heads, value_head_dim, options = UNFUSED[name]
    mesh = annotated_mesh((2,), (SEQUENCE,), "zigzag")
    whole = random_inputs(kv_heads=kv_heads, value_head_dim=value_head_dim)
    *whole, grad_out = (x.double() for x in whole)
    mask = Mask.causal() if options.get("is_causal") else Mask.full()
    dense = dense_attention(*whole, mask, scale=options.get("scale"))
    inputs = [place(x, mesh, (SEQUENCE,)).requires_grad_() for x in whole]

    def run(*inputs: Any) -> Any:
        return F.scaled_dot_product_attention(*inputs, **options)

    def same(actual: DTensor, expected: Any) -> None:
        assert actual.placements == (SEQUENCE,)
        whole = unshard_sequence(actual.detach(), 2)
        torch.testing.assert_close(whole, expected.detach(), atol=1e-12, rtol=1e-10)

    with sdpa_kernel(SDPBackend.MATH):
        torch.testing.assert_close(run(*whole), dense.out.detach())  # plain tensors, as ever
        for attention in eager_and_compiled(run):
            out = attention(*inputs)
            grads = torch.autograd.grad(out, inputs, place(grad_out, mesh, (SEQUENCE,)))
            for actual, expected in zip(
                [out, *grads], [dense.out, *dense.backward(grad_out)], strict=True
            ):
                same(actual, expected)
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    same(attention(*inputs), dense.out)


@on_ranks(2)
def test_unfused_is_refused() -> None:
    """What a ring cannot do is refused alike in every context, and before a graph runs."""
    mesh = annotated_mesh((2,), (SEQUENCE,), "zigzag")
    query, key, value, _ = (place(x, mesh, (SEQUENCE,)) for x in random_inputs(kv_heads=4))
    fewer = key[:, :2], value[:, :2]
    for context in (nullcontext, torch.inference_mode, lambda: sdpa_kernel(SDPBackend.MATH)):
        with context(), pytest.raises(ValueError, match="heads without enable_gqa=True"):
            F.scaled_dot_product_attention(query, *fewer)
    integers = (x.to_local().int() for x in (query, key, value))
    integers = (DTensor.from_local(x, mesh, [SEQUENCE]) for x in integers)
    with pytest.raises(ValueError, match="float"):
        F.scaled_dot_product_attention(*integers)
    compiled = torch.compile(F.scaled_dot_product_attention, fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match="attn_mask cannot be served"):
        compiled(query, key, value, key.new_zeros(16, 16))


# Handlers of other libraries beside ours, in the table that DTensor keeps by op.

HANDLERS = DTensor._op_dispatcher._custom_op_handlers
OURS = (*sdpa.FORWARD_OPS, *sdpa.BACKWARD_OPS, aten.new_empty.default)


@contextmanager
def handlers_of_others() -> Iterator[None]:
    """Without what dtensor_ring has registered for the aten ops."""
    saved = dict(HANDLERS)
    for op in OURS:
        HANDLERS.pop(op, None)
    try:
        yield
    finally:
        HANDLERS.clear()
        HANDLERS.update(saved)


@on_ranks(2)
def test_as_before() -> None:
    """On an axis that is not annotated, once another one is."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "cp"))
    query, key, value, _ = random_inputs(4, 8, 4, 4)
    with handlers_of_others():
        before = list(_outcomes(mesh["dp"], query, key, value))
        SequenceAxis(mesh["cp"], "zigzag")
        _clear_sharding_prop_cache()  # what the first half has left would be looked up
        assert all(getattr(HANDLERS[op], "is_ours", False) for op in sdpa.FORWARD_OPS)
        after = list(_outcomes(mesh["dp"], query, key, value))
    assert len(before) == len(after)
    for (name, *expected), (_, *actual) in zip(before, after, strict=True):
        assert actual[0] == expected[0], name
        for ours, theirs in zip(actual[1:], expected[1:], strict=True):
            assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride()), name
            assert theirs.is_meta or torch.equal(ours, theirs), name


def _outcomes(mesh: DeviceMesh, *whole: Tensor) -> Iterator[tuple[Any, ...]]:
    """A name, the placements of output and gradients, and their local values."""
    for where in [(BATCH,), (HEADS,), (SEQUENCE,), (REPLICATE,)]:
        inputs = [place(x, mesh, where).requires_grad_() for x in whole]
        try:
            with sdpa_kernel(SDPBackend.MATH):
                out = F.scaled_dot_product_attention(*inputs)
        except RuntimeError as refusal:  # torch 2.11 cannot with sharded heads
            yield ("math", where), str(refusal.__cause__ or refusal)
        else:
            yield _outcome(("math", where), out, inputs)
        # GPUs' ops have rules, but no kernel on a CPU: without data, placements are what is left.
        meta = [
            DTensor.from_local(x.to_local().to("meta"), mesh, where, run_check=False)
            for x in inputs
        ]
        for name, op in GPU_OPS.items():
            inputs = [x.detach().requires_grad_() for x in meta]
            yield _outcome((name, where), op(*inputs)[0], inputs)
    inputs = [place(x, mesh, (BATCH,)) for x in whole]
    with torch.inference_mode(), pytest.raises(NotImplementedError) as failure:
        F.scaled_dot_product_attention(*inputs, is_causal=True)
    yield "no rule on CPUs", str(failure.value.__cause__ or failure.value)


@on_ranks(2)
def test_attention_over_another_dim_says_which_it_should_be() -> None:
    mesh = annotated_mesh((2,), (SEQUENCE,), "zigzag")
    whole = random_inputs(kv_heads=4)[:3]
    for ndim, inputs in ((4, whole), (3, [x[0] for x in whole]), (5, [x[None] for x in whole])):
        sharded = [place(x, mesh, (Shard(ndim - 3),)) for x in inputs]
        dims = (3, 4) if ndim == 3 else (ndim,)  # newer versions of torch add a dim to three
        reported = "|".join(
            rf"Shard\({x - 2}\) of {x} dims, and these are in \[\(Shard\(dim={x - 3}\)"
            for x in dims
        )
        with pytest.raises(NotImplementedError, match=reported):
            F.scaled_dot_product_attention(*sharded, is_causal=True)
    sequences = [shard_sequence(x, mesh, 1) for x in whole]
    with pytest.raises(NotImplementedError, match=r"transpose\(1, 2\)") as failure:
        F.scaled_dot_product_attention(*sequences, is_causal=True)
    assert not hasattr(failure.value, "__notes__")  # it says what to write


def _outcome(name: Any, out: DTensor, inputs: list[DTensor]) -> tuple[Any, ...]:
    results = [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]
    return name, [x.placements for x in results], *(x.to_local() for x in results)


@on_ranks(2)
def test_other_handlers_are_called() -> None:
    mesh = annotated_mesh((2,), (SEQUENCE,), "zigzag")
    query, key, value, _ = random_inputs(kv_heads=4)
    ours, other = (
        [place(x, mesh, (where,)) for x in (query, key, value)] for where in (SEQUENCE, BATCH)
    )
    called = []

    def theirs(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        called.append(op)
        tensors = [args[0] if "Tensor" in str(x.type) else 0 for x in op._schema.returns]
        return tuple(tensors) if len(tensors) > 1 else args[0]

    with handlers_of_others():
        ops = sdpa.FORWARD_OPS
        HANDLERS.update(dict.fromkeys(ops, theirs))
        SequenceAxis(mesh, "zigzag")
        SequenceAxis(mesh, "zigzag")
        for op in ops[:4]:
            options = (None, True) if "attn_bias" in str(op._schema) else ()
            assert op(*other, *options)[1] is other[0]
        with torch.inference_mode():
            assert F.scaled_dot_product_attention(*other) is other[0]
        assert called == list(ops)
        F.scaled_dot_product_attention(*ours)
        assert called == list(ops)


@on_ranks(1)
def test_other_ops_of_dtensors_are_not_ours() -> None:
    """The table holds attention, what replaces it, and the one op that its tracing asks for."""
    with handlers_of_others():
        before = set(HANDLERS)
        annotated_mesh((1,), (SEQUENCE,), "zigzag")
        assert set(HANDLERS) - before == set(OURS)
