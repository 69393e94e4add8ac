"""What a rank of a ring does beside its kernels on a GPU: bytes and launches, on fake tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtensor_ring.compute import merge
from dtensor_ring.compute.kernels import Saved, Scores
from dtensor_ring.compute.kernels.kernel import Kernel
from dtensor_ring.compute.memory import Accumulation, empty, order_of
from dtensor_ring.ring import ring_backward, ring_forward
from dtensor_ring.transport.transport import TransferPolicy, Transport
from tests.rings import Ring

FREE = "empty", "new_empty", "prim::", "promote_types"
"""Ops that touch no memory of the GPU."""

HEADS, KV_HEADS, HEAD_DIM, DTYPE = 32, 8, 128, torch.bfloat16


class Traffic(TorchDispatchMode):
    """Bytes that ops read and write, and how many ops do."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self._counts = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if self._counts and not func.is_view and not name.startswith(FREE):
            written = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            # What copy_, fill_ and zero_ overwrite, they do not read.
            overwrites = name in ("copy_", "fill_", "zero_")
            read = [x for x in tree_leaves((args[overwrites:], kwargs)) if isinstance(x, Tensor)]
            self.count(name, read, written)
        return result

    def count(self, name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        self.launches[name] += 1
        self.bytes[name] += sum(prod(x.shape) * x.itemsize for x in (*read, *written))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What a block kernel does is not counted."""
        self._counts, before = False, self._counts
        yield
        self._counts = before


class Fresh(Kernel):
    """Returns fresh memory, as kernels of GPUs do."""

    name = "fresh"

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def missing(self) -> None:
        return None

    def supports(self, problem: object) -> None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        with self._traffic.paused():
            wide = torch.promote_types(q.dtype, torch.float32)
            out = empty(q, (*q.shape[:3], v.shape[3]), order_of(q))
            return out, q.new_empty(q.shape[:3], dtype=wide)

    def backward(self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Any:
        if not saved.lse.is_contiguous():
            # Flash attention's adapters read a dense lse.
            saved.lse.contiguous()
        with self._traffic.paused():
            return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class Silent(Transport):
    """Sends nothing, and what it receives is there already."""

    def start(self, receives: Any, sends: Any) -> list[Any]:
        return []


def of_rank(ring: Ring, rank: int, **policy: Any) -> tuple[Traffic, Traffic]:
    """Forward and backward of a rank of a ring, batch 1."""
    plan = ring.plans()[rank]
    rows = plan.num_local[0]
    forward, backward = Traffic(), Traffic()
    with FakeTensorMode(), torch.device("cuda"):
        shapes = [(1, rows, num, HEAD_DIM) for num in (HEADS, HEADS, KV_HEADS, KV_HEADS)]
        tensors = [torch.empty(shape, dtype=DTYPE).transpose(1, 2) for shape in shapes]
        grad_out, query, key, value = tensors
        scores, how, kernel = Scores(ring.mask, 1.0), TransferPolicy(**policy), Fresh(forward)
        with counted_passes(forward), forward:
            out, lse = ring_forward(query, (key, value), plan, kernel, scores, Silent(), how)
        saved = Saved(grad_out, out, lse)
        with counted_passes(backward), backward:
            kernel = Fresh(backward)
            ring_backward(saved, query, (key, value), plan, kernel, scores, Silent(), how)
    return forward, backward


@contextmanager
def counted_passes(traffic: Traffic) -> Iterator[None]:
    """What Triton's kernel would read and write, and that it is one launch."""

    def fused(*sums: Accumulation) -> None:
        read, written = [], []
        for one in sums:
            read += [x for part in one.partials for x in (part.x, part.lse) if x is not None]
            written += [x for x in (one.target, one.lse) if x is not None]
        traffic.count("accumulate_sums", read, written)

    with merging_by(fused):
        yield


@contextmanager
def merging_by(fused: Callable[..., None]) -> Iterator[None]:
    """Merges on a GPU go to this function; Triton itself need not be there."""
    module = SimpleNamespace(accumulate_sums=fused)
    with (
        patch.dict("sys.modules", {"dtensor_ring.compute.merge_triton": module}),
        patch.object(merge, "has_triton", lambda: True),
    ):
        yield
