"""One CUDA graph for all packings: what is launched and sent stays, only numbers change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import (
    DocumentRoom,
    Mask,
    RingError,
    SequenceAxis,
    TransferPolicy,
    register_kernel,
)
from dtensor_ring.compute.kernels import KERNELS, Launch, Saved, Scores
from dtensor_ring.compute.kernels.kernel import Gradients, Kernel, Result
from dtensor_ring.compute.kernels.registry import unregister_kernel
from tests.compute.test_changing import HEAD_DIM, HEADS, KV_HEADS, ROOM, TOKENS, packing
from tests.dense import dense_attention, largest
from tests.pool import Pool

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
def test_what_has_no_room_for_documents(pool: Pool, name: str) -> None:
    message, of_axis, of_call = REFUSED[name]
    pool.run(2, _refused, message, {"layout": "zigzag", "kernel": "reference"} | of_axis, of_call)


def _refused(message: str, of_axis: dict[str, Any], of_call: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (2,))
    axis, room = SequenceAxis(mesh, **of_axis), DocumentRoom(mesh, TOKENS, ROOM)
    x = torch.zeros(1, 2, TOKENS // 2, HEAD_DIM)
    given = {"mask": CAUSAL, "cu_seqlens": room.cu_seqlens} | of_call
    with pytest.raises((ValueError, RingError), match=message):
        axis.attention(x, x, x, **given)


def test_ranks_fill_alike(pool: Pool) -> None:
    pool.run(2, _differing)


def _differing() -> None:
    mesh = init_device_mesh("cpu", (2,))
    room = DocumentRoom(mesh, TOKENS, ROOM)
    with pytest.raises((ValueError, RingError), match="there is room for 6 documents"):
        room.fill(torch.arange(8))
    with pytest.raises((ValueError, RingError), match="cu_seqlens"):
        room.fill(torch.tensor([0, 5 + torch.distributed.get_rank(), TOKENS]))
    assert room.cu_seqlens.tolist() == [0] + [TOKENS] * ROOM, "nothing was taken"
