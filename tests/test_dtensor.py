"""Ring attention on DTensors over meshes of one to three axes, against the dense result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from dtensor_ring import Contiguous, Mask, ring_attention, set_sequence_layout, unshard_sequence
from dtensor_ring.annotation import group_layout
from tests.dense import dense_attention
from tests.pool import Pool

BATCH, HEADS, SEQUENCE = Shard(0), Shard(1), Shard(2)
REPLICATE = Replicate()


@dataclass(frozen=True)
class Case:
    """The mesh by sizes and placements, the shapes, and what is asked of ring_attention."""

    sizes: tuple[int, ...]
    placements: tuple[Placement, ...]
    layout: str = "zigzag"
    seq_len: int = 16
    batch: int = 2
    heads: tuple[int, int] = (4, 2)
    value_head_dim: int = 8
    cu_seqlens: list[Any] | None = None
    sinks: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    lse: bool = False

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)


DP_CP = (2, 2), (BATCH, SEQUENCE)
CP_TP = (2, 2), (SEQUENCE, HEADS)
CP = (4,), (SEQUENCE,)

CASES = {
    "cp": Case(*CP, layout="striped", lse=True),
    "cp of three": Case((3,), (SEQUENCE,), seq_len=12),
    "cp of one": Case((1,), (SEQUENCE,)),
    "dp, cp": Case(*DP_CP, options={"scale": 0.3}, lse=True),
    "cp, tp": Case(*CP_TP, layout="striped", options={"mask": Mask.full()}, lse=True),
    "replicate, cp": Case((2, 2), (REPLICATE, SEQUENCE), layout="contiguous"),
    "dp, cp, tp of one": Case((2, 2, 1), (BATCH, SEQUENCE, HEADS)),
    "dp of one, cp, tp": Case((1, 2, 2), (BATCH, SEQUENCE, HEADS), lse=True),
    "multi-query": Case(*DP_CP, heads=(3, 1), options={"mask": Mask.local(3, 2)}),
    "value head dim": Case(*CP_TP, value_head_dim=4, options={"softcap": 2.0}),
    "uneven contiguous": Case(*CP, layout="contiguous", seq_len=13, lse=True),
    "uneven zigzag": Case(*CP, seq_len=13, options={"mask": Mask.sliding(4)}),
    "uneven dp, cp": Case(*DP_CP, batch=3, seq_len=15),
    "empty sequence shard": Case(*CP, seq_len=5, sinks="tensor", lse=True),
    "empty batch shard": Case(*DP_CP, batch=1, cu_seqlens=[[0, 7, 12]], sinks="dtensor"),
    "documents": Case(*CP_TP, cu_seqlens=[0, 3, 9, 16], lse=True),
    "documents and a tail": Case(*DP_CP, cu_seqlens=[0, 5, 11], lse=True),
    "documents by row": Case(
        *DP_CP, batch=3, cu_seqlens=[[0, 2, 16, 16], [0, 9, 11, 16], [0, 4, 6, 13]], lse=True
    ),
    "documents by row, replicated": Case(
        (2, 2), (SEQUENCE, REPLICATE), cu_seqlens=[[0, 2, 16], [0, 9, 16]]
    ),
    "sinks, batch": Case(*DP_CP, sinks="tensor"),
    "sinks, heads": Case(*CP_TP, sinks="tensor", lse=True),
    "sinks, replicated": Case((2, 2), (REPLICATE, SEQUENCE), sinks="tensor"),
    "DTensor sinks, batch": Case(*DP_CP, sinks="dtensor", lse=True),
    "DTensor sinks, heads": Case(*CP_TP, sinks="dtensor", cu_seqlens=[0, 6, 14]),
    "DTensor sinks, replicated": Case((2, 2), (REPLICATE, SEQUENCE), sinks="dtensor"),
}


@pytest.mark.parametrize("name", CASES)
def test_dense_result(pool: Pool, name: str) -> None:
    pool.run(CASES[name].world_size, _check_case, CASES[name])


def _check_case(case: Case) -> None:
    mesh = annotated_mesh(case.sizes, case.placements, case.layout)
    query, key, value, grad_out = random_inputs(
        case.batch, case.seq_len, *case.heads, case.value_head_dim
    )
    sinks = torch.randn(case.heads[0]) if case.sinks else None
    grad_lse = torch.randn(grad_out.shape[:3]) if case.lse else None
    cu_seqlens = None if case.cu_seqlens is None else torch.tensor(case.cu_seqlens).int()
    options = {"mask": Mask.causal(), "cu_seqlens": cu_seqlens, **case.options}
    dense = dense_attention(query, key, value, sinks=sinks, **options)
    expected = [dense.out, dense.lse][: 1 + case.lse] + dense.backward(grad_out, grad_lse)

    def run(query: Any, key: Any, value: Any, sinks: Any = None) -> tuple[Any, ...]:
        out, lse = ring_attention(query, key, value, sinks=sinks, return_lse=True, **options)
        return (out, lse) if case.lse else (out,)

    placed = [place(x, mesh, case.placements) for x in (query, key, value)]
    placed += [] if sinks is None else [place_sinks(sinks, mesh, case)]
    grads = [place(x, mesh, case.placements) for x in (grad_out, grad_lse) if x is not None]
    for attention in eager_and_compiled(run):
        inputs = [x.detach().requires_grad_() for x in placed]
        outputs = attention(*inputs)
        results = [*outputs, *torch.autograd.grad(outputs, inputs, grads)]
        if sinks is not None:
            results.append(summed_over_ranks(results.pop(), mesh, case))
        for actual, dense_result in zip(results, expected, strict=True):
            assert_same(actual, dense_result, case.placements)


def eager_and_compiled(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The function itself, then compiled to one graph; without what earlier runs left on disk."""
    yield function
    with fresh_cache():
        yield torch.compile(function, fullgraph=True)


def annotated_mesh(
    sizes: tuple[int, ...], placements: Sequence[Placement], layout: str
) -> DeviceMesh:
    """A mesh whose axis of the sequence has that layout."""
    # DTensor remembers equal meshes of earlier tests, whose groups are gone.
    _clear_sharding_prop_cache()
    names = tuple(f"axis{axis}" for axis in range(len(sizes)))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    set_sequence_layout(mesh[names[list(placements).index(SEQUENCE)]], layout)
    return mesh


def random_inputs(
    batch: int = 2, seq_len: int = 16, heads: int = 4, kv_heads: int = 2, value_head_dim: int = 8
) -> list[Tensor]:
    """Query, key, value and the gradient of the output."""
    shapes = (heads, 8), (kv_heads, 8), (kv_heads, value_head_dim), (heads, value_head_dim)
    return [torch.randn(batch, n, seq_len, head_dim) for n, head_dim in shapes]


def place(x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A tensor that every rank holds whole as a DTensor, its tokens in layout order."""
    local = x
    for axis, where in enumerate(placements):
        rank, size, group = mesh.get_local_rank(axis), mesh.size(axis), mesh.get_group(axis)
        if where == SEQUENCE:
            layout = group_layout(group) or Contiguous()
            local = local[:, :, layout.positions(rank, size, local.shape[2])]
        elif isinstance(where, Shard):
            chunks = local.chunk(size, where.dim)
            local = chunks[rank] if rank < len(chunks) else local.narrow(where.dim, 0, 0)
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def place_sinks(sinks: Tensor, mesh: DeviceMesh, case: Case) -> Any:
    """This rank's heads, as a DTensor where the case says so."""
    placements = [Shard(0) if where == HEADS else REPLICATE for where in case.placements]
    placed = place(sinks, mesh, placements)
    return placed if case.sinks == "dtensor" else placed.to_local()


def summed_over_ranks(grad_sinks: Any, mesh: DeviceMesh, case: Case) -> Tensor:
    """The gradient of the sinks, of which each rank has the share of its own tokens."""
    share = {HEADS: Shard(0), REPLICATE: REPLICATE}
    placements = tuple(share.get(where, Partial()) for where in case.placements)
    if case.sinks == "tensor":
        return DTensor.from_local(grad_sinks, mesh, placements, run_check=False).full_tensor()
    assert grad_sinks.placements == placements
    return grad_sinks.full_tensor()


def assert_same(actual: Any, expected: Tensor, placements: Sequence[Placement]) -> None:
    """A float32 result equals the dense one; a DTensor is placed like the query."""
    assert actual.dtype == torch.float32
    if isinstance(actual, DTensor):
        assert actual.placements == tuple(placements)
        actual = unshard_sequence(actual, 2)
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)


@dataclass(frozen=True)
class Refusal:
    """Placements of query, key and value, and what the error says."""

    message: str
    query: tuple[Placement, ...]
    key: tuple[Placement, ...] | None = None
    value: tuple[Placement, ...] | None = None
    error: type[Exception] = ValueError
    heads: tuple[int, int] = (4, 2)
    sinks: tuple[Placement, ...] | None = None
    cu_seqlens: Any = None
    key_mesh: tuple[int, int] = (2, 2)


REFUSALS = {
    "key on another mesh": Refusal("alike on one mesh, got", (BATCH, SEQUENCE), key_mesh=(4, 1)),
    "no sequence": Refusal("on exactly one mesh axis, it is on no axis", (BATCH, REPLICATE)),
    "two sequence axes": Refusal("exactly one mesh axis, it is on 2 axes", (SEQUENCE, SEQUENCE)),
    "sharded head dim": Refusal(r"got (S|Shard)\((dim=)?3\) on mesh axis 1", (SEQUENCE, Shard(3))),
    "partial": Refusal(r"got P(artial)?\(sum\) on mesh axis 0", (Partial(), SEQUENCE)),
    "key replicated": Refusal("sharded alike", (REPLICATE, SEQUENCE), key=(REPLICATE, REPLICATE)),
    "value on the other axis": Refusal(
        "sharded alike", (REPLICATE, SEQUENCE), value=(SEQUENCE, REPLICATE)
    ),
    "key a tensor": Refusal("or none, got .* key Tensor", (BATCH, SEQUENCE), (), error=TypeError),
    "query heads": Refusal("2 ways only if that divides", (SEQUENCE, HEADS), heads=(3, 1)),
    "key heads": Refusal("'key': 1, 'value': 1}", (SEQUENCE, HEADS), heads=(4, 1)),
    "sinks of all heads": Refusal(
        "sinks must be .*as the query's heads are", (SEQUENCE, HEADS), sinks=(REPLICATE, REPLICATE)
    ),
    "sinks over the batch": Refusal(
        "sinks must be", (BATCH, SEQUENCE), sinks=(Shard(0), REPLICATE)
    ),
    "rows of cu_seqlens": Refusal(
        r"must have shape \(D\+1,\) or \(1, D\+1\), got \(3, 2\)",
        (BATCH, SEQUENCE),
        cu_seqlens=[[0, 16]] * 3,
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(pool: Pool, name: str) -> None:
    pool.run(4, _check_refusal, REFUSALS[name])


def _check_refusal(case: Refusal) -> None:
    mesh = annotated_mesh((2, 2), (SEQUENCE, REPLICATE), "zigzag")
    query, key, value, _ = random_inputs(2, 16, *case.heads)
    other_mesh = init_device_mesh("cpu", case.key_mesh, mesh_dim_names=mesh.mesh_dim_names)
    placed: list[Any] = [place(query, mesh, case.query)]
    for x, placements, where in ((key, case.key, other_mesh), (value, case.value, mesh)):
        here = case.query if placements is None else placements
        placed.append(place(x, where, here) if here else x)
    sinks = None if case.sinks is None else place(torch.zeros(4), mesh, case.sinks)
    cu_seqlens = None if case.cu_seqlens is None else torch.tensor(case.cu_seqlens).int()
    with pytest.raises(case.error, match=case.message):
        ring_attention(*placed, sinks=sinks, cu_seqlens=cu_seqlens)
