"""`flex_attention` on DTensors of an annotated axis: the ring, and slices of its masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
    or_masks,
)

from dtensor_ring import Mask, SequenceAxis
from dtensor_ring.dtensor.flex import block_mask
from dtensor_ring.dtensor.flex import flex_attention as ring_flex
from dtensor_ring.dtensor.flex.block_mask import slices_of_block_mask
from tests.dense import dense_attention
from tests.dtensor.flex.flex_calls import attend, cases, gradients_on_cpus, quiet
from tests.dtensor.flex.flex_masks import (
    BLOCK,
    BUILT,
    DOCUMENTS,
    FUNCTIONS,
    LENGTH,
    MaskMod,
    causal,
    mask_of,
)
from tests.graphs import capturing
from tests.meshes import BATCH, HEADS, SEQUENCE, assert_same, place, random_inputs
from tests.pool import Pool, on_ranks
from tests.slices import shown


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


# What `flex_attention` over a sharded sequence refuses.


@on_ranks(2)
def test_what_is_refused() -> None:
    axis = SequenceAxis(init_device_mesh("cpu", (2,)), "zigzag")
    *inputs, _ = random_inputs(2, LENGTH)
    placed: list[Any] = [axis.shard(x, 2) for x in inputs]
    other = [DTensor.from_local(x, axis.mesh, [Shard(1)]) for x in inputs]
    sizes = LENGTH, LENGTH
    sparse = create_block_mask(
        lambda b, h, q, k: (q // 2 + k // 2) % 2 == 0, None, None, *sizes, device="cpu"
    )
    by_head = create_block_mask(lambda b, h, q, k: q - k >= h, None, 4, *sizes, device="cpu")
    three_rows = create_block_mask(causal, 3, None, *sizes, device="cpu")
    replicated = DTensor.from_local(DOCUMENTS, axis.mesh, [Replicate()])
    of_dtensor = BlockMask.from_kv_blocks(
        *(sparse.kv_num_blocks, sparse.kv_indices),
        **{"mask_mod": lambda b, h, q, k: replicated[q] == replicated[k], "seq_lengths": sizes},
    )
    op: Any = torch.ops.higher_order.flex_attention
    short = create_block_mask(causal, None, None, 40, 40, device="cpu")
    of_op = flex_module._identity, short.as_tuple(), 1.0
    gqa = {"enable_gqa": True}
    calls: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: flex_attention(*placed, score_mod=lambda s, b, h, q, k: s * 2, **gqa),
            "score_mod cannot be served over a sharded sequence",
        ),
        (
            lambda: flex_attention(*placed, block_mask=sparse, **gqa),
            "at most 74 are possible with 42 queries: it is no union of a few bands",
        ),
        (
            lambda: flex_attention(*placed, block_mask=three_rows, **gqa),
            "block_mask must be one for all batch rows or have 2, as the query has, got 3",
        ),
        (
            lambda: flex_attention(*placed, block_mask=of_dtensor, **gqa),
            "must capture plain tensors, which each rank has whole, got a DTensor",
        ),
        (lambda: flex_attention(*placed, block_mask=by_head, **gqa), "was made for 4 heads"),
        (lambda: op(*placed, *of_op, {"OUTPUT_MAX": True}), "max_scores cannot be served"),
        (lambda: op(*placed, *of_op, {}), "of the whole sequence, 42 queries and 42 keys, got"),
    ]
    with quiet(), torch.no_grad():
        for call, message in calls:
            with pytest.raises(ValueError, match=message):
                call()
        # Nobody served it before, so Dynamo has the error.
        with pytest.raises(RuntimeError, match=r"in Shard\(2\) over an axis that has a layout"):
            flex_attention(*other, **gqa)
    # Only a compiler gets a plain index of a DTensor.
    made = DTensor(placed[0]._local_tensor, placed[0]._spec, requires_grad=False)
    assert isinstance(made.new_empty([]), DTensor)


# What is read of a block mask is kept while its content is the same.


@on_ranks(1)
def test_a_block_mask_is_read_once() -> None:
    axis = SequenceAxis(init_device_mesh("cpu", (1,)), "zigzag")
    documents, asked = DOCUMENTS.clone(), []
    *inputs, _ = random_inputs(2, LENGTH)
    placed = [axis.shard(x, 2) for x in inputs]

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return documents[q] == documents[k]

    # One partial block for each block of queries, so that only the function decides.
    mask = create_block_mask(
        lambda b, h, q, k: (q < 0) | (q >= 0), None, None, LENGTH, LENGTH, device="cpu"
    )
    ours = BlockMask.from_kv_blocks(
        *(torch.ones_like(mask.kv_num_blocks), torch.zeros_like(mask.kv_indices)),
        **{"BLOCK_SIZE": 128, "mask_mod": mask_mod, "seq_lengths": (LENGTH, LENGTH)},
    )
    read = ring_flex.slices_of_blocks
    ring_flex.slices_of_blocks = lambda blocks: asked.append(1) or read(blocks)
    try:
        with quiet(), torch.no_grad():
            for change in (None, None, 25, None):
                if change is not None:
                    # As a collective writes, which raises no version.
                    documents.numpy()[change:] = 7
                out, _ = attend(*placed, ours)
                seen = (documents[:, None] == documents).expand(2, -1, -1)
                dense = dense_attention(*inputs, Mask.full(), seen=seen, scale=0.3)
                assert_same(out, dense.out, (SEQUENCE,))
    finally:
        ring_flex.slices_of_blocks = read
    assert len(asked) == 2


# Slices of FlexAttention's masks show what their functions show.

LONG = 300
LONG_DOCUMENTS = torch.searchsorted(torch.tensor([40, 170, 171]), torch.arange(LONG), right=True)
BY_ROW = torch.stack([LONG_DOCUMENTS, LONG_DOCUMENTS.flip(0)])


def full(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= 0 * k


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k < 50)


def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return LONG_DOCUMENTS[q] == LONG_DOCUMENTS[k]


def by_row(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (BY_ROW[b, q] == BY_ROW[b, k]) & (q >= k)


def first(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k < 70


@pytest.mark.parametrize(
    ("mask_mod", "batch", "lengths", "num_slices"),
    [
        (causal, None, (LONG, LONG), 1),
        (full, None, (LONG, LONG), 1),
        (window, None, (LONG, LONG), 2),
        (and_masks(causal, documents), None, (LONG, LONG), 4),
        (or_masks(causal, first), None, (LONG, LONG), 2),
        (or_masks(window, first), None, (LONG, LONG), 4),
        (by_row, 2, (LONG, LONG), 4),
        (causal, None, (200, LONG), 1),
        (causal, None, (LONG, 130), 2),
    ],
    ids=[
        *("causal", "full", "window", "documents", "prefix", "first tokens", "by row"),
        *("more keys", "fewer keys"),
    ],
)
def test_shows_what_the_function_shows(
    mask_mod: MaskMod, batch: int | None, lengths: tuple[int, int], num_slices: int
) -> None:
    mask = create_block_mask(mask_mod, batch, None, *lengths, device="cpu")
    found = slices_of_block_mask(mask)
    expected = create_mask(mask_mod, batch, None, *lengths, device="cpu")[:, 0]
    for table, row in zip(found.tables, expected, strict=True):
        assert torch.equal(torch.from_numpy(shown(table, lengths)), row.long())
        assert len(table) <= num_slices


def two_ranges(begins: Tensor, ends: Tensor) -> MaskMod:
    """Of each query, `(B, Q)`; they may overlap."""
    return lambda b, h, q, k: (
        (k >= begins[b, q]) & (k < ends[b, q]) | (k >= 50 - begins[b, q]) & (k < 20)
    )


@pytest.mark.parametrize("chunk", [1, 200, block_mask.CHUNK])
def test_drawn_ranges(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of any size, some rows of ranges that overlap; read some blocks at a time."""
    monkeypatch.setattr(block_mask, "CHUNK", chunk)
    random = torch.Generator().manual_seed(chunk)

    def draw(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (), generator=random))]

    for _ in range(15):
        lengths = draw(1, 16, 37, 64), draw(1, 19, 32, 70)
        sides = torch.randint(lengths[1] + 1, (2, 2, lengths[0]), generator=random)
        begins, ends = sides.sort(-1).values if draw(0, 1) else sides

        function = two_ranges(begins, ends)
        size = draw(1, 4, 16, 128), draw(1, 8, 32)
        mask = create_block_mask(function, 2, None, *lengths, device="cpu", BLOCK_SIZE=size)
        expected = create_mask(function, 2, None, *lengths, device="cpu")[:, 0]
        for table, row in zip(slices_of_block_mask(mask).tables, expected, strict=True):
            assert torch.equal(torch.from_numpy(shown(table, lengths)), row.long())


def test_refusals() -> None:
    def by_head(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q - k >= 128 * h

    def sparse(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q // 4 + k // 4) % 2 == 0

    with pytest.raises(ValueError, match="was made for 2 heads"):
        slices_of_block_mask(create_block_mask(by_head, None, 2, LONG, LONG, device="cpu"))
    with pytest.raises(ValueError, match="shows a query 38 ranges of keys, at most 16"):
        slices_of_block_mask(create_block_mask(sparse, None, None, LONG, LONG, device="cpu"))
