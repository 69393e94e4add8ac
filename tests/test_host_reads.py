"""What a CUDA graph captures reads nothing on the host: rings with backward, and a token of a pool.

Kernels that Triton launches are not reached: their launches read shapes and pointers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dtensor_ring import BlockPool, Mask, TransferPolicy, ZigZag
from dtensor_ring.compute.changing import ChangingSegments
from dtensor_ring.compute.kernels import KERNELS, Saved, Scores
from dtensor_ring.compute.memory import TOKEN_MAJOR, Numbers, empty
from dtensor_ring.paged import kernels as paged_kernels
from dtensor_ring.paged.api import PagedBatch, PagedCache
from dtensor_ring.planning.changing import ChangingDocuments
from dtensor_ring.planning.plan import Plan, plan
from dtensor_ring.quantised import block_scales
from dtensor_ring.ring import ring_backward, ring_forward
from parallel_plans.huggingface.core.layer_inputs import compared
from tests.host_reads import HostReads
from tests.rings import Ring
from tests.test_played import RINGS
from tests.traffic import Silent, Traffic, counted_passes

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None, reason="builds for CPUs make no fake CUDA tensors"
)

DTYPE, HEADS, HEAD_DIM = torch.bfloat16, (4, 2), 64


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Tensors are fake ones of CUDA; boundaries are there, as after a call before the capture."""

    def on(numbers: Numbers, device: torch.device) -> tuple[Tensor, ...]:
        shapes = [x.shape if isinstance(x, Tensor) else (len(x),) for x in numbers._lists]
        return tuple(torch.empty(x, dtype=numbers._dtype, device=device) for x in shapes)

    with (
        FakeTensorMode(),
        counted_passes(Traffic()),  # in place of Triton's launches
        patch.object(Numbers, "on", on),
        patch.object(block_scales, "has_triton", lambda: False),
        HostReads(),
    ):
        yield


def run_ring(ring: Ring, name: str, policy: TransferPolicy) -> None:
    for mine in (ring.plans()[0], ring.plans()[-1]):
        run_plan(mine, ring.mask, name, policy)


def run_plan(mine: Plan, mask: Mask, name: str, policy: TransferPolicy) -> None:
    with fake_gpu():
        like = torch.empty(0, dtype=DTYPE, device="cuda")
        rows, cols = mine.num_local
        sizes = (HEADS[0], rows), (HEADS[1], cols), (HEADS[1], cols), (HEADS[0], rows)
        query, key, value, grad_out = (
            empty(like, (2, heads, tokens, HEAD_DIM), TOKEN_MAJOR) for heads, tokens in sizes
        )
        how = mine, KERNELS[name], Scores(mask, 0.125), Silent(), policy
        out, lse = ring_forward(query, (key, value), *how)
        ring_backward(Saved(grad_out, out, lse), query, (key, value), *how)


@pytest.mark.parametrize(
    ("ring", "kv_dtype"),
    [
        *((ring, None) for ring in ("zigzag", "window", "documents", "all-gather")),
        *((ring, torch.int8) for ring in ("zigzag", "all-gather")),
    ],
)
def test_rings(ring: str, kv_dtype: torch.dtype | None) -> None:
    run_ring(RINGS[ring], "cuda_flash", TransferPolicy(kv_dtype=kv_dtype))


def test_documents_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of a GPU asks the host nothing that differs between packings, which raises here."""

    def boundaries(segments: ChangingSegments, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(torch.empty(len(x), dtype=torch.int32, device=device) for x in segments._now)

    monkeypatch.setattr(ChangingSegments, "boundaries", boundaries)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    documents = ChangingDocuments(4096, max_documents=20)
    for mask in (Mask.causal(), Mask.full()):
        mine = plan(ZigZag(), mask, 1, 4, 4096, documents)
        run_plan(mine, mask, "cuda_flash", TransferPolicy())
        with pytest.raises(RuntimeError, match="and the host reads documents"):
            run_plan(mine, mask, "reference", TransferPolicy())


def test_a_token_of_requests() -> None:
    with fake_gpu():
        pool = BlockPool(40, 16)
        cache = PagedCache(pool, HEADS[1], HEAD_DIM, 1, dtype=DTYPE, device="cuda")
        sequences = [pool.add([number] * length) for number, length in enumerate((30, 70, 16))]
        batch = PagedBatch(cache, sequences)
        key = torch.empty(3, HEADS[1], 1, HEAD_DIM, dtype=DTYPE, device="cuda")
        batch.write(0, key, key)
        query = torch.empty(3, HEADS[0], 1, HEAD_DIM, dtype=DTYPE, device="cuda")
        with patch.object(paged_kernels, "block_kernel", lambda *_: KERNELS["cuda_flash"]):
            out, _ = batch.attend(0, query, kernel="in_place")
        assert out.shape == query.shape


READERS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.amax().item(),
    "if": lambda x: 1 if (x > 0).any() else 0,
    "cpu": lambda x: x.cpu(),
    "tolist": lambda x: x[0, 0, 0, :2].tolist(),
    "copied back": lambda x: torch.empty(x.shape, device="cpu").copy_(x),
    "from the host": lambda x: x + torch.ones(x.shape, device="cpu").to(x.device),
    "non-blocking": lambda x: torch.ones(3, device="cpu").to("cuda", non_blocking=True),
    "by a mask": lambda x: x[x > 0],
    "repeated": lambda x: torch.arange(4, device="cuda").repeat_interleave(x[0, 0, :4, 0].long()),
}


@pytest.mark.parametrize("name", READERS)
def test_reads_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel of a ring."""
    attend = KERNELS["cuda_flash"].attend  # type: ignore[attr-defined]

    def reading(self: Any, q: Tensor, *rest: Any) -> Any:
        READERS[name](q)
        return attend(q, *rest)

    monkeypatch.setattr(KERNELS["cuda_flash"].__class__, "attend", reading)
    with pytest.raises(AssertionError, match=r"the host (reads|and) the device"):
        run_ring(RINGS["zigzag"], "cuda_flash", TransferPolicy())


def test_a_token_comes_to_the_host_once_for_all_layers() -> None:
    """Layers compare it, and bind one call for all of them: only where they need not read a GPU."""
    with FakeTensorMode():
        found: Any = compared(torch.zeros(1, 1, dtype=torch.int64, device="cuda"))
    assert found.device.type == "cpu"
