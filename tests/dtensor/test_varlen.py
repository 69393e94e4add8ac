"""`varlen_attn` on DTensors sharded over tokens: the ring, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import varlen
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from dtensor_ring import Mask, SequenceAxis, Slices, unshard_sequence
from tests.dense import dense_attention
from tests.dtensor.flex.flex_calls import OFTEN, cases
from tests.graphs import capturing
from tests.pool import Pool, on_ranks
from tests.slices import shown

LENGTH = 42
QUERIES = torch.tensor([0, 13, 13, 31, LENGTH], dtype=torch.int32)
KEYS = torch.tensor([0, 20, 22, 31, LENGTH], dtype=torch.int32)
ENDS_EARLY = torch.tensor([0, 13, 30], dtype=torch.int32)  # later tokens see nothing
WINDOWS = (-1, -1), (-1, 0), (5, 0), (3, 2)
DOCUMENTS = (QUERIES, QUERIES), (QUERIES, KEYS), (ENDS_EARLY, ENDS_EARLY)
CALLS = list(product(DOCUMENTS, WINDOWS))
# What torch 2.11 does not have is not asked for; grouped heads need no option there.
KNOWN = signature(varlen_attn).parameters


def attend(query: Any, key: Any, value: Any, bounds: Tensor, others: Tensor, window: Any) -> Any:
    options = {"scale": 0.3, "window_size": window}
    if "enable_gqa" in KNOWN:
        options["enable_gqa"] = True
    out, lse = varlen_attn(
        *(query, key, value, bounds, others, LENGTH, LENGTH),
        **{"return_aux": AuxRequest(lse=True)},
        **options,
    )
    return out, lse.detach()  # which has no gradient in PyTorch


def seen_by(bounds: Tensor, others: Tensor, window: tuple[int, int]) -> Tensor:
    """`(1, T, T)`: windows end at the last query and the last key of each document."""
    left, right = (None if x < 0 else x for x in window)
    slices = Slices.bottom_right(bounds, others, Mask(left, right))
    return torch.from_numpy(shown(slices.tables[0], (LENGTH, LENGTH))).bool()[None]


@pytest.mark.parametrize(("world_size", "layout"), cases(*OFTEN))
def test_every_window(pool: Pool, world_size: int, layout: str) -> None:
    pool.run(world_size, _check_windows, layout, "ring")


def test_exchange(pool: Pool) -> None:
    pool.run(2, _check_windows, "zigzag", "ulysses")
    pool.run(2, _check_compiled, "zigzag", "ulysses", CALLS[4:6])


def test_compiled(pool: Pool) -> None:
    pool.run(2, _check_compiled, "zigzag", "ring", CALLS[1:8:2])


def _check_windows(layout: str, strategy: str) -> None:
    axis = SequenceAxis(
        init_device_mesh("cpu", (dist.get_world_size(),)), layout, strategy=strategy
    )
    for documents, window in CALLS:
        _check(attend, axis, *documents, window)


def _check_compiled(layout: str, strategy: str, calls: Sequence[Any]) -> None:
    axis = SequenceAxis(
        init_device_mesh("cpu", (dist.get_world_size(),)), layout, strategy=strategy
    )
    graphs: list[list[str]] = []
    with torch._dynamo.config.patch(recompile_limit=64):
        compiled = torch.compile(attend, backend=capturing(graphs), fullgraph=True)
        for documents, window in calls:
            _check(compiled, axis, *documents, window)
    around = ["exchange"] if strategy == "ulysses" else []
    for graph in graphs:
        op = "ring_attention_backward" if "ring_attention_backward" in graph else "ring_attention"
        assert graph == [*around, op, *around]


def _check(
    run: Callable[..., Any],
    axis: SequenceAxis,
    bounds: Tensor,
    others: Tensor,
    window: tuple[int, int],
) -> None:
    torch.manual_seed(0)
    whole = [torch.randn(LENGTH, heads, 8, dtype=torch.float64) for heads in (4, 2, 2, 4)]
    *inputs, grad_out = (x.transpose(0, 1)[None] for x in whole)
    seen = seen_by(bounds, others, window)
    dense = dense_attention(*inputs, Mask.full(), seen=seen, scale=0.3)
    placed = [axis.shard(x, 0).requires_grad_() for x in whole[:3]]
    out, lse = run(*placed, bounds, others, window)
    grads = torch.autograd.grad(out, placed, axis.shard(whole[3], 0))
    torch.testing.assert_close(unshard_sequence(lse, 1), dense.lse[0])
    expected = dense.out, *dense.backward(grad_out)
    for actual, wanted in zip((out, *grads), expected, strict=True):
        assert actual.placements == (Shard(0),)
        torch.testing.assert_close(unshard_sequence(actual, 0), wanted[0].transpose(0, 1))


@on_ranks(4)
def test_heads_on_another_axis() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    axis = SequenceAxis(mesh["cp"], "zigzag")
    torch.manual_seed(0)
    whole = [torch.randn(LENGTH, heads, 8) for heads in (4, 2, 2)]
    dense = dense_attention(
        *(x.transpose(0, 1)[None] for x in whole), Mask.causal(), cu_seqlens=QUERIES, scale=0.3
    )
    placed = []
    for x in whole:
        heads = x.chunk(2, 1)[mesh["tp"].get_local_rank()]
        local = axis.shard(heads, 0).to_local()
        how = {"run_check": False, "shape": x.shape, "stride": x.stride()}
        placed.append(DTensor.from_local(local, mesh, [Shard(0), Shard(1)], **how))
    out, lse = attend(*placed, QUERIES, QUERIES, (-1, 0))
    assert (out.placements, lse.placements) == ((Shard(0), Shard(1)), (Shard(1), Shard(0)))
    found = unshard_sequence(out, 0)
    torch.testing.assert_close(found.double(), dense.out[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


@on_ranks(2)
def test_what_is_refused() -> None:
    axis = SequenceAxis(init_device_mesh("cpu", (2,)), "zigzag")
    whole = [torch.randn(LENGTH, 2, 8) for _ in range(3)]
    placed: Any = [axis.shard(x, 0) for x in whole]
    bounds: Any = (QUERIES, QUERIES, LENGTH, LENGTH)
    sharded = axis.shard(QUERIES[:4], 0)
    calls: dict[str, Callable[[], Any]] = {
        r"cu_seq_k must be a tensor \(D\+1,\) that each rank has whole": lambda: varlen_attn(
            *(*placed, QUERIES, sharded, LENGTH, LENGTH)
        ),
        r"got torch.Size\(\[1, 5\]\)": lambda: varlen_attn(
            *(*placed, QUERIES[None], KEYS[None], LENGTH, LENGTH)
        ),
        r"query, key and value must all be DTensors": lambda: varlen_attn(
            *(placed[0], *whole[1:], *bounds)
        ),
        "end at or before the sequence length 42": lambda: varlen_attn(
            *placed, *[torch.tensor([0, 50], dtype=torch.int32)] * 2, 50, 50
        ),
    }
    if "seqused_k" in KNOWN:
        calls["seqused_k cannot be served"] = lambda: varlen_attn(
            *(*placed, *bounds), **{"seqused_k": torch.tensor([3])}
        )
        calls["varlen_attn_out cannot be served"] = lambda: varlen.varlen_attn_out(
            placed[0], *placed, *bounds
        )
    for message, call in calls.items():
        with torch.no_grad(), pytest.raises((TypeError, ValueError), match=message):
            call()
