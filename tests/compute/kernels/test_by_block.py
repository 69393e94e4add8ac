"""Kernels whose bits do not depend on what else is in a launch, or on where tensors are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dtensor_ring import Mask
from dtensor_ring.compute.kernels import Kernel, Launch, Saved, Scores, kernel_for
from dtensor_ring.compute.kernels.registry import KERNELS
from dtensor_ring.compute.memory import WHOLE

TILES = [
    (5, 7, Mask.full()),
    (37, 37, Mask.causal()),
    (200, 200, Mask.causal()),
    (64, 70, Mask(9, 3)),
    (96, 64, Mask.full()),
]


def _offset(x: Tensor) -> Tensor:
    memory = torch.empty(x.numel() + 3, dtype=x.dtype)[3:].view(x.shape)
    return memory.copy_(x)


WHERE: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.contiguous(),
    lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    _offset,
]


def _run(kernel: Kernel, tensors: list[Tensor], mask: Mask) -> list[Tensor]:
    query, key, value, grad = tensors
    launch, scores = Launch(WHOLE, WHOLE, mask, by_block=True), Scores(mask, 0.2)
    out, lse = kernel.forward(query, key, value, launch, scores)
    return [out, lse, *kernel.backward(Saved(grad, out, lse), query, key, value, launch, scores)]


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["cpu_flash", "reference"])
@pytest.mark.parametrize(("rows", "cols", "mask"), TILES)
def test_heads_alone_have_the_same_bits(
    rows: int, cols: int, mask: Mask, name: str, dtype: torch.dtype
) -> None:
    generator, kernel = torch.Generator().manual_seed(0), KERNELS[name]
    shapes = [(2, 6, rows, 24), (2, 3, cols, 24), (2, 3, cols, 24), (2, 6, rows, 24)]
    whole = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    of_all = _run(kernel, whole, mask)
    for number, where in enumerate(WHERE):
        row, head = number % 2, number
        parts = [(slice(row, row + 1), slice(head * n, head * n + n)) for n in (2, 1, 1, 2)]
        alone = _run(kernel, [where(x[part]) for x, part in zip(whole, parts, strict=True)], mask)
        for x, found, part in zip(of_all, alone, (parts[0], *parts[:1], *parts[:3]), strict=True):
            assert torch.equal(found, x[part]), (name, number)


def test_others_are_refused_by_name() -> None:
    facts = ("cuda", torch.bfloat16, 64, 64, 0.1, 0.0, *[False] * 5, True)
    with pytest.raises(ValueError, match="flash_attn2: its bits depend on what else is in a laun"):
        kernel_for("flash_attn2", *facts)
    with pytest.raises(ValueError, match="its bits are known on a CPU only"):
        kernel_for("reference", "cuda", *facts[1:])
