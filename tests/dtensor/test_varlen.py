"""Packed sequences: `varlen_attn` on DTensors, and one CUDA graph for all packings."""

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

from dtensor_ring import (
    DocumentRoom,
    Mask,
    RingError,
    SequenceAxis,
    Slices,
    TransferPolicy,
    register_kernel,
    unshard_sequence,
)
from dtensor_ring.compute.kernels import KERNELS, Launch, Saved, Scores
from dtensor_ring.compute.kernels.kernel import Gradients, Kernel, Result
from dtensor_ring.compute.kernels.registry import unregister_kernel
from tests.compute.test_whole_step import HEAD_DIM, HEADS, KV_HEADS, ROOM, TOKENS, packing
from tests.dense import dense_attention, largest
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


# One CUDA graph for all packings: what is launched and sent stays, only numbers change.

CAUSAL, FULL = Mask.causal(), Mask.full()
CASES = {
    "zigzag": ("recorded", 2, "zigzag", "ring", CAUSAL),
    "contiguous, full": ("recorded", 3, "contiguous", "ring", FULL),
    "for heads": ("recorded", 2, "zigzag", "ulysses", CAUSAL),
    "by tiles": ("cpu_flash", 2, "zigzag", "all_gather", CAUSAL),
}


class Recorded(Kernel):
    """The reference by the numbers that a device would read, and all else that a launch has."""

    name, has_segments = "recorded", True

    def __init__(self) -> None:
        self.launches: list[Any] = []

    def missing(self) -> None:
        return None

    def supports(self, problem: Any) -> None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores) -> Result:
        return KERNELS["reference"].forward(q, k, v, self._noted(launch, q, k), scores)

    def backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores
    ) -> Gradients:
        return KERNELS["reference"].backward(saved, q, k, v, self._noted(launch, q, k), scores)

    def _noted(self, launch: Launch, q: Tensor, k: Tensor) -> Launch:
        x = launch.segments
        assert x is not None
        tensors = x.boundaries(torch.device("cpu"))
        fixed = x.max_rows, x.max_cols, x.has_empty_rows, x.has_empty_cols
        memory = [(t.data_ptr(), t.shape, t.stride()) for t in tensors]
        place = launch.rows, launch.cols, launch.mask, launch.in_flight
        self.launches.append((fixed, memory, place, q.shape, q.stride(), k.shape, k.stride()))
        assert [tuple(t.tolist()) for t in tensors] == [x.rows, x.cols], "they are refilled"
        return launch


@pytest.mark.parametrize("name", CASES)
def test_packings_change_numbers_only(pool: Pool, name: str) -> None:
    kernel, world_size, *how = CASES[name]
    for errors, num_lists in pool.run(world_size, _packings, kernel, *how):
        assert num_lists == 1, "what is launched differs between packings"
        assert largest(errors) < 1e-5, errors


def _packings(kernel: str, layout: str, strategy: str, mask: Mask) -> tuple[list[float], int]:
    """Errors of some packings, and how many lists of launches there were."""
    recorded = Recorded()
    register_kernel(recorded)
    try:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        axis = SequenceAxis(mesh, layout, strategy=strategy, kernel=kernel)
        room, errors, lists = DocumentRoom(mesh, TOKENS, ROOM), [], set()
        for seed in range(6):
            recorded.launches = []
            cuts = torch.tensor(packing(seed))
            room.fill(cuts)
            errors += _errors(axis, room.cu_seqlens, cuts, mask)
            lists.add(str(recorded.launches))
    finally:
        unregister_kernel("recorded")
    return errors, len(lists)


def _errors(axis: SequenceAxis, given: Tensor, cuts: Tensor, mask: Mask) -> list[float]:
    """Of output and gradients, against dense attention."""
    generator = torch.Generator().manual_seed(1)
    query, key, value, grad_out = (
        torch.randn(2, heads, TOKENS, HEAD_DIM, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    document = torch.searchsorted(cuts, torch.arange(TOKENS), right=True)
    seen = (document[:, None] == document) & (torch.arange(TOKENS) < cuts[-1])
    seen = seen.tril() if mask == CAUSAL else seen
    dense = dense_attention(query, key, value, FULL, seen=seen.expand(2, -1, -1))
    expected = [dense.out, *dense.backward(grad_out)]
    local = [axis.shard(x, 2).detach().requires_grad_() for x in (query, key, value)]
    out = axis.attention(*local, mask=mask, cu_seqlens=given)
    found = [out, *torch.autograd.grad(out, local, axis.shard(grad_out, 2))]
    pairs = zip(found, (axis.shard(x, 2) for x in expected), strict=True)
    return [(x - y).abs().max().item() for x, y in pairs]


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "striped": ("a layout whose runs have adjacent tokens", {"layout": "striped"}, {}),
    "a window": ("needs a full or causal mask", {}, {"mask": Mask.sliding(3)}),
    "other keys": ("pass cu_seqlens alone", {}, {"key_cu_seqlens": torch.tensor([0, TOKENS])}),
    "ordered": ("leave order= out", {"policy": TransferPolicy(order="fixed", block=6)}, {}),
}


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_what_has_no_room_for_documents(name: str) -> None:
    message, of_axis, of_call = REFUSED[name]
    mesh = init_device_mesh("cpu", (2,))
    axis = SequenceAxis(mesh, **{"layout": "zigzag", "kernel": "reference"} | of_axis)
    room = DocumentRoom(mesh, TOKENS, ROOM)
    x = torch.zeros(1, 2, TOKENS // 2, HEAD_DIM)
    given = {"mask": CAUSAL, "cu_seqlens": room.cu_seqlens} | of_call
    with pytest.raises((ValueError, RingError), match=message):
        axis.attention(x, x, x, **given)


@on_ranks(2)
def test_ranks_fill_alike() -> None:
    mesh = init_device_mesh("cpu", (2,))
    room = DocumentRoom(mesh, TOKENS, ROOM)
    with pytest.raises((ValueError, RingError), match="there is room for 6 documents"):
        room.fill(torch.arange(8))
    with pytest.raises((ValueError, RingError), match="cu_seqlens"):
        room.fill(torch.tensor([0, 5 + torch.distributed.get_rank(), TOKENS]))
    assert room.cu_seqlens.tolist() == [0] + [TOKENS] * ROOM, "nothing was taken"
