"""`flex_attention` on DTensors of an annotated axis: the ring, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dtensor_ring import Mask, SequenceAxis
from tests.dense import dense_attention
from tests.dtensor.flex.flex_calls import attend, cases, gradients_on_cpus, quiet
from tests.dtensor.flex.flex_masks import BLOCK, BUILT, FUNCTIONS, LENGTH, mask_of
from tests.graphs import capturing
from tests.meshes import BATCH, HEADS, SEQUENCE, assert_same, place, random_inputs
from tests.pool import Pool, on_ranks


def test_functions(pool: Pool) -> None:
    pool.run(2, _check_masks, ("full", "rows"), "zigzag")


@pytest.mark.repeats
@pytest.mark.parametrize(("world_size", "layout"), cases())
def test_all_functions(pool: Pool, world_size: int, layout: str) -> None:
    pool.run(world_size, _check_masks, tuple(FUNCTIONS), layout)


@pytest.mark.parametrize(("world_size", "layout"), cases((2, "zigzag")))
def test_built(pool: Pool, world_size: int, layout: str) -> None:
    pool.run(world_size, _check_masks, tuple(BUILT), layout)


def _check_masks(names: Sequence[str], layout: str) -> None:
    """Eager and compiled, one node each."""
    axis = SequenceAxis(init_device_mesh("cpu", (dist.get_world_size(),)), layout)
    whole, graphs = random_inputs(2, LENGTH), []
    compiled = torch.compile(attend, backend=capturing(graphs), fullgraph=True)
    with torch._dynamo.config.patch(recompile_limit=64), quiet():
        for name in names:
            block_mask, seen = mask_of(name)
            for run in (attend, compiled):
                _check(run, axis, whole, block_mask, seen)
    known = ["block_mask_slices", "ring_attention"], ["ring_attention"], ["ring_attention_backward"]
    assert graphs
    assert all(graph in known for graph in graphs), graphs


def _check(
    run: Callable[..., Any],
    axis: SequenceAxis,
    whole: Sequence[Tensor],
    block_mask: BlockMask | None,
    seen: Tensor,
) -> None:
    *inputs, grad_out = whole
    grad_lse = grad_out[..., 0]
    dense = dense_attention(*inputs, Mask.full(), seen=seen, scale=0.3)
    placed = [axis.shard(x, 2) for x in inputs]
    with torch.no_grad():
        # Through the front, as it is on CPUs.
        for actual, expected in zip(run(*placed, block_mask), (dense.out, dense.lse), strict=True):
            assert_same(actual, expected, (SEQUENCE,))
    placed = [x.detach().requires_grad_() for x in placed]
    with gradients_on_cpus():
        results = run(*placed, block_mask)
    # Rows that see nothing have an lse of -inf, which has no gradient.
    finite = torch.where(dense.lse.isfinite(), grad_lse, 0)
    given = [axis.shard(x, 2) for x in (grad_out, finite)]
    found = torch.autograd.grad(results, placed, given)
    for actual, expected in zip(found, dense.backward(grad_out, finite), strict=True):
        assert_same(actual, expected, (SEQUENCE,))


MESHES: dict[str, tuple[tuple[Placement, ...], str, str]] = {
    "batch": ((BATCH, SEQUENCE), "zigzag", "around"),
    "heads": ((SEQUENCE, HEADS), "contiguous", "all_gather"),
    "exchange": ((BATCH, SEQUENCE), "zigzag", "ulysses"),
}


@pytest.mark.parametrize(
    # "exchange" has the placements of "batch".
    "name",
    [pytest.param("batch", marks=pytest.mark.repeats), "heads", "exchange"],
)
@on_ranks(4)
def test_two_axes_and_strategies(name: str) -> None:
    placements, layout, strategy = MESHES[name]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("first", "second"))
    SequenceAxis(mesh[("first", "second")[placements.index(SEQUENCE)]], layout, strategy=strategy)
    *inputs, grad_out = random_inputs(2, LENGTH)
    grad_lse = grad_out[..., 0].contiguous()
    block_mask, seen = mask_of("rows")
    dense = dense_attention(*inputs, Mask.full(), seen=seen, scale=0.3)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    with quiet(), gradients_on_cpus():
        for run in (attend, compiled):
            placed = [place(x, mesh, placements).requires_grad_() for x in inputs]
            out, lse = run(*placed, block_mask)
            assert_same(lse, dense.lse, placements)
            # Of a compiled function, both: it wants a gradient for each output that is a DTensor.
            given = [place(x, mesh, placements) for x in (grad_out, grad_lse)]
            grads = torch.autograd.grad((out, lse), placed, given)
            expected = dense.out, *dense.backward(grad_out, grad_lse)
            for actual, wanted in zip((out, *grads), expected, strict=True):
                assert_same(actual, wanted, placements)


@on_ranks(2)
def test_five_batches_compile_once() -> None:
    axis = SequenceAxis(init_device_mesh("cpu", (2,)), "zigzag")
    whole, graphs = random_inputs(2, LENGTH), []

    def documents_of(end: int) -> Tensor:
        return (torch.arange(LENGTH) >= end).int()

    def step(query: Any, key: Any, value: Any, block_mask: Any) -> Any:
        for _ in range(3):  # layers
            query = attend(query, key, value, block_mask)[0]
        return query

    compiled = torch.compile(step, backend=capturing(graphs), fullgraph=True)
    for end in (3, 8, 17, 24, 40):
        documents = documents_of(end)

        def mask_mod(b: Any, h: Any, q: Any, k: Any, documents: Tensor = documents) -> Tensor:
            return (documents[q] == documents[k]) & (q >= k)

        block_mask = create_block_mask(
            mask_mod, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK
        )
        placed = [axis.shard(x, 2) for x in whole[:3]]
        seen = (documents[:, None] == documents).tril().expand(2, -1, -1)
        expected: Any = whole[0]
        for _ in range(3):
            dense = dense_attention(expected, *whole[1:3], Mask.full(), seen=seen, scale=0.3)
            expected = dense.out
        with torch.no_grad():
            assert_same(compiled(*placed, block_mask), expected, (SEQUENCE,))
    assert graphs == [["block_mask_slices", "ring_attention"] * 3]


@on_ranks(2)
def test_the_higher_order_op() -> None:
    """What the front calls, with plain functions, and where autograd is off altogether."""
    axis = SequenceAxis(init_device_mesh("cpu", (2,)), "zigzag")
    *inputs, grad_out = random_inputs(2, LENGTH)
    block_mask, seen = mask_of("packed")
    assert block_mask is not None
    dense = dense_attention(*inputs, Mask.full(), seen=seen)
    placed = [axis.shard(x, 2).detach().requires_grad_() for x in inputs]
    op: Any = torch.ops.higher_order.flex_attention
    out, lse, largest = op(*placed, flex_module._identity, block_mask.as_tuple(), 8**-0.5, {})
    assert_same(out, dense.out, (SEQUENCE,))
    assert_same(lse * torch.tensor(2.0).log(), dense.lse, (SEQUENCE,))
    assert not largest.numel()
    grads = torch.autograd.grad(out, placed, axis.shard(grad_out, 2))
    for actual, expected in zip(grads, dense.backward(grad_out), strict=True):
        assert_same(actual, expected, (SEQUENCE,))
    placed = [x.detach() for x in placed]
    with torch.inference_mode(), quiet():
        block_mask, _ = mask_of("packed")  # whose tensors tell of no writes
        for _ in range(2):
            out = flex_attention(*placed, block_mask=block_mask, enable_gqa=True)
            assert_same(out, dense.out, (SEQUENCE,))
