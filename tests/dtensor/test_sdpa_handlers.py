"""Handlers of other libraries beside ours, in the table that DTensor keeps by op."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtensor_ring import SequenceAxis, shard_sequence
from dtensor_ring.dtensor import sdpa
from tests.dtensor.test_sdpa import GPU_OPS
from tests.meshes import BATCH, HEADS, REPLICATE, SEQUENCE, annotated_mesh, place, random_inputs
from tests.pool import on_ranks

aten = torch.ops.aten
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
