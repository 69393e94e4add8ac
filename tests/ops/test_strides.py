"""Views that kernels of GPUs cannot load are copied, in the same order of memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dtensor_ring.compute.memory import HEAD_MAJOR, TOKEN_MAJOR, order_of
from dtensor_ring.ops import strides
from dtensor_ring.ops.strides import ALIGNMENT, is_aligned, loadable

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
        moved = strides._moved(x)
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
