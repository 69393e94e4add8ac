"""Views that kernels of GPUs cannot load are copied, in the same order of memory."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import register_kernel, ring_attention
from dtensor_ring.compute.kernels import Saved
from dtensor_ring.compute.kernels.reference import Reference
from dtensor_ring.compute.kernels.registry import unregister_kernel
from dtensor_ring.compute.memory import HEAD_MAJOR, TOKEN_MAJOR, order_of
from dtensor_ring.ops import checks, ring_op
from dtensor_ring.ops.checks import ALIGNMENT, is_aligned, loadable
from tests.pool import on_ranks

SHAPE = 2, 4, 6, 8


def wide(offset: int = 0, step: int = 8) -> Tensor:
    """Token-major, as a part of wider memory: heads are `step` numbers apart."""
    memory = torch.arange(4096.0).to(torch.bfloat16)
    return memory.as_strided(SHAPE, (6 * 4 * step, step, 4 * step, 1), offset)


VIEWS = {
    "dense": (wide(), True),
    "a part": (wide(16), True),
    "heads further apart": (wide(step=24), True),
    "an odd begin": (wide(4), False),
    "an odd step of heads": (wide(step=12), False),
    "head-major": (wide().contiguous(), True),
    "expanded": (wide()[:1].expand(SHAPE), True),
    "one head of an odd step": (wide(step=12)[:, :1], True),
    "a head dim of no multiple": (wide(step=12)[..., :6], True),
}


@pytest.mark.parametrize(("x", "expected"), VIEWS.values(), ids=list(VIEWS))
def test_what_is_aligned(x: Tensor, expected: bool) -> None:
    assert is_aligned(x) == expected
    if not expected:
        moved = checks._moved(x)
        assert is_aligned(moved)
        assert torch.equal(moved, x)


@pytest.mark.parametrize("order", [TOKEN_MAJOR, HEAD_MAJOR])
def test_copies_keep_the_order(order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake op, which sees no addresses, promises an output in the query's order."""
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    dense = torch.empty([SHAPE[dim] for dim in order], dtype=torch.bfloat16)
    (aligned,) = loadable(view := dense.permute(order))
    assert aligned is view
    shifted = torch.zeros(dense.numel() + 1, dtype=torch.bfloat16)[1:].view(dense.shape)
    (copied,) = loadable(view := shifted.permute(order))
    assert copied is not view
    assert copied.data_ptr() % ALIGNMENT == 0
    assert order_of(copied) == order_of(view) == order


def test_cpus_take_them_as_they_are() -> None:
    x = wide(4)
    assert loadable(x)[0] is x


class Picky(Reference):
    """Refuses what kernels of GPUs would misread."""

    name = "picky"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        assert all(map(is_aligned, (q, k, v)))
        return super().forward(q, k, v, *rest)

    def backward(self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        assert all(map(is_aligned, (saved.out, saved.grad_out, q, k, v)))
        return super().backward(saved, q, k, v, *rest)


@on_ranks(1)
def test_kernels_get_what_they_can_load() -> None:
    """Query, key, value and gradient begin between the multiples; the outcome is the same."""
    results, mesh = [], init_device_mesh("cpu", (1,))
    register_kernel(Picky())
    try:
        for offset in (0, 4):
            generator = torch.Generator().manual_seed(0)
            *inputs, grad_out = (_shifted(offset, generator) for _ in range(4))
            assert is_aligned(grad_out) == (not offset)
            inputs = [x.requires_grad_() for x in inputs]
            with patch.object(ring_op, "loadable", _on_any_device):
                out = ring_attention(*inputs, kernel="picky", mesh=mesh)
                results.append([out, *torch.autograd.grad(out, inputs, grad_out)])
    finally:
        unregister_kernel("picky")
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def _shifted(offset: int, generator: torch.Generator) -> Tensor:
    """Random numbers that begin so many numbers after an aligned address."""
    numbers = torch.empty(384 + offset, dtype=torch.bfloat16)[offset:]
    numbers.copy_(torch.randn(384, generator=generator))
    return numbers.view(2, 6, 4, 8).transpose(1, 2)


def _on_any_device(*tensors: Tensor) -> list[Tensor]:
    return [x if is_aligned(x) else checks._moved(x) for x in tensors]
