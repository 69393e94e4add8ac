"""Rings of GPU kernels on fake CUDA tensors: shapes, strides and dtypes that compilers rely on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dtensor_ring.compute.kernels import KERNELS, Saved, Scores
from dtensor_ring.compute.memory import (
    HEAD_MAJOR,
    TOKEN_MAJOR,
    Numbers,
    Order,
    empty,
    order_of,
    strides,
)
from dtensor_ring.ring import ring_backward, ring_forward
from tests.rings import Ring
from tests.test_played import RINGS
from tests.traffic import Silent, Traffic, counted_passes

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None, reason="builds for CPUs make no fake CUDA tensors"
)

BATCH, HEADS, KV_HEADS, HEAD_DIM, DTYPE = 2, 4, 2, 64, torch.bfloat16


@contextmanager
def fake_gpu(traffic: Traffic | None = None) -> Iterator[None]:
    """Tensors are fake ones of CUDA, and boundaries are there; merges are counted."""

    def on(numbers: Numbers, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(
            torch.empty(len(x), dtype=numbers._dtype, device=device) for x in numbers._lists
        )

    with FakeTensorMode(), counted_passes(traffic or Traffic()), patch.object(Numbers, "on", on):
        yield


@pytest.mark.pairs
@pytest.mark.parametrize("order", [TOKEN_MAJOR, HEAD_MAJOR], ids=["token-major", "head-major"])
@pytest.mark.parametrize("name", ["cuda_flash", "cudnn"])
@pytest.mark.parametrize("ring", RINGS.values(), ids=list(RINGS))
def test_what_comes_out_is_what_fakes_promise(ring: Ring, name: str, order: Order) -> None:
    kernel = KERNELS[name]
    reason = kernel.supports(ring.problem("cuda", DTYPE, HEAD_DIM, HEAD_DIM))
    if reason:
        pytest.skip(f"{name}: {reason}")
    plans = ring.plans()
    for plan in (plans[0], plans[-1]):
        with fake_gpu():
            like = torch.empty(0, dtype=DTYPE, device="cuda")
            rows, cols = plan.num_local
            query, key, value, grad_out = (
                empty(like, (BATCH, heads, tokens, HEAD_DIM), order)
                for heads, tokens in (
                    (HEADS, rows),
                    (KV_HEADS, cols),
                    (KV_HEADS, cols),
                    (HEADS, rows),
                )
            )
            how = plan, kernel, Scores(ring.mask, 0.125), Silent()
            out, lse = ring_forward(query, (key, value), *how)
            grads = ring_backward(Saved(grad_out, out, lse), query, (key, value), *how)
        assert out.shape == query.shape
        assert (out.dtype, lse.dtype) == (DTYPE, torch.float32)
        assert out.stride() == strides(out.shape, order_of(query))
        assert lse.is_contiguous()
        for x, grad in zip((query, key, value), grads, strict=True):
            assert (grad.shape, grad.dtype, grad.device) == (x.shape, DTYPE, x.device)
            assert grad.stride() == strides(x.shape, TOKEN_MAJOR)
