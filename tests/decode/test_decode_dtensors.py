"""A query that every rank holds, against keys that are sharded: placements say it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from dtensor_ring import Mask, decode_attention
from dtensor_ring.dtensor.placement import without
from tests.dense import dense_attention
from tests.meshes import BATCH, HEADS, REPLICATE, SEQUENCE, annotated_mesh, place
from tests.pool import on_ranks

CASES: dict[str, tuple[tuple[Placement, ...], str, int]] = {
    "dp, cp": ((BATCH, SEQUENCE), "zigzag", 1),
    "cp, tp": ((SEQUENCE, HEADS), "contiguous", 3),
    "replicate, cp": ((REPLICATE, SEQUENCE), "striped", 2),
}


@pytest.mark.parametrize("name", CASES)
@on_ranks(4)
def test_by_placements(name: str) -> None:
    """Of scaled_dot_product_attention and of decode_attention, eager and compiled."""
    placements, layout, num_queries = CASES[name]
    mesh = annotated_mesh((2, 2), placements, layout)
    inputs = whole_inputs(num_queries)
    tensors, seq_len = placed(inputs, mesh, placements), inputs[1].shape[2]
    seen = torch.ones(2, num_queries, seq_len, dtype=torch.bool)
    last = seen.tril(seq_len - num_queries)
    window = last & ~seen.tril(seq_len - num_queries - 5)
    sdpa, sliding = F.scaled_dot_product_attention, Mask.sliding(4)
    attentions: list[tuple[Callable[..., Any], Tensor]] = [
        (lambda *x: sdpa(*x, enable_gqa=True), seen),
        (lambda *x: sdpa(*x, enable_gqa=True, is_causal=True), seen.tril()),
        (decode_attention, last),
        (lambda *x: decode_attention(*x, mask=sliding, merge="two_shot"), window),
    ]

    def all_of_them(*inputs: Any) -> list[Any]:
        return [attend(*inputs) for attend, _ in attentions]

    compiled = torch.compile(all_of_them, fullgraph=True, backend="aot_eager")
    expected = [dense_attention(*inputs, Mask.full(), seen=sees).out for _, sees in attentions]
    for run, mode in (
        (all_of_them, torch.no_grad),
        (all_of_them, torch.inference_mode),
        (compiled, torch.no_grad),
    ):
        with mode():
            outs = run(*tensors)
        for out, wanted in zip(outs, expected, strict=True):
            assert tuple(out.placements) == without(placements)
            torch.testing.assert_close(out.full_tensor().double(), wanted, atol=1e-5, rtol=1e-5)


def whole_inputs(num_queries: int, seq_len: int = 14) -> list[Tensor]:
    shapes = (4, num_queries, 8), (2, seq_len, 8), (2, seq_len, 8)
    return [torch.randn(2, *shape) for shape in shapes]


def placed(
    inputs: list[Tensor], mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> list[DTensor]:
    query, key, value = inputs
    return [
        place(query, mesh, without(placements)),
        *(place(x, mesh, placements) for x in (key, value)),
    ]


@on_ranks(4)
def test_options_by_batch_row() -> None:
    """Boundaries and starts of the whole batch, whose rows are sharded; sinks of sharded heads."""
    placements = (BATCH, SEQUENCE)
    mesh = annotated_mesh((2, 2), placements, "zigzag")
    inputs, sinks = whole_inputs(1), torch.randn(4)
    starts = torch.tensor([13, 6])
    bounds = torch.tensor([[0, 3, 14], [0, 5, 14]])
    seen = torch.zeros(2, 1, 14, dtype=torch.bool)
    seen[0, 0, 3:14] = seen[1, 0, 5:7] = True
    dense = dense_attention(*inputs, Mask.full(), seen=seen, sinks=sinks)
    replicated = DTensor.from_local(sinks, mesh, [REPLICATE] * 2)
    tensors = placed(inputs, mesh, placements)
    out, lse = decode_attention(
        *tensors, query_starts=starts, cu_seqlens=bounds, sinks=replicated, return_lse=True
    )
    torch.testing.assert_close(out.full_tensor().double(), dense.out, atol=1e-5, rtol=1e-5)  # type: ignore[attr-defined]
    torch.testing.assert_close(lse.full_tensor().double(), dense.lse, atol=1e-5, rtol=1e-5)  # type: ignore[attr-defined]


@on_ranks(2)
def test_refused() -> None:
    mesh = annotated_mesh((2,), (SEQUENCE,), "zigzag")
    tensors = placed(whole_inputs(1), mesh, (SEQUENCE,))
    for run in (F.scaled_dot_product_attention, decode_attention):
        options: dict[str, Any] = {} if run is decode_attention else {"enable_gqa": True}
        with pytest.raises(NotImplementedError, match=r"no gradient.* torch\.no_grad\(\)"):
            run(tensors[0].clone().requires_grad_(), *tensors[1:], **options)
    query, key, value = tensors
    cases: list[tuple[list[Any], type[Exception], str]] = [
        ([query, key.to_local(), value], TypeError, "must all be DTensors or none"),
        ([key, key, value], ValueError, "query as they are, but Replicate over the axis"),
        ([query, query, query], ValueError, "exactly one mesh axis, it is on no axis"),
    ]
    for given, kind, reported in cases:
        with pytest.raises(kind, match=reported):
            decode_attention(*given)
    with pytest.raises(ValueError, match="mesh is for plain tensors"):
        decode_attention(query, key, value, mesh=mesh)
    many = place(torch.randn(2, 4, 65, 8), mesh, (REPLICATE,))
    with torch.no_grad(), pytest.raises(ValueError, match="must be sharded alike"):
        F.scaled_dot_product_attention(many, key, value, enable_gqa=True)
