"""The gradient of lse in columns: as exact as the sums it enters, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dtensor_ring.compute.kernels import KERNELS, Problem, Saved, select_kernel
from dtensor_ring.compute.kernels.emulated import COLUMNS, WidenedKernel
from dtensor_ring.compute.kernels.kernel import Gradients
from dtensor_ring.compute.kernels.reference import Reference
from tests.tiles import Case

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
PROBLEM = Problem("cpu", torch.float32, 8, 8, differentiable_lse=True)


class Recorder(Reference):
    """Keeps what it gets."""

    saved: Saved

    def backward(self, saved: Saved, *rest: Any) -> Gradients:
        self.saved = saved
        return super().backward(saved, *rest)


def given_to_the_kernel(grad_lse: Tensor, x: Tensor) -> Saved:
    """What a kernel gets, if query, key, value and output are all `x`."""
    kernel = Recorder()
    saved = Saved(x, x, torch.zeros_like(grad_lse), grad_lse)
    grads = WidenedKernel(kernel).backward(saved, x, x, x, Case().launch, Case().scores)
    assert all(grad.shape == x.shape for grad in grads)
    assert kernel.saved.grad_lse is None
    return kernel.saved


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0.0, 1e-12, 1e-6, 1e-3, 1.0, 1e3, 1e8])
def test_products_of_the_columns_are_the_gradient(dtype: torch.dtype, size: float) -> None:
    """To the 24 bits of float32, wherever float16 can reach."""
    torch.manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    grad_lse = size * torch.randn(2, 3, 50, dtype=wide)
    saved = given_to_the_kernel(grad_lse, torch.zeros(2, 3, 50, 8, dtype=dtype))
    products = (saved.grad_out.double() * saved.out.double()).sum(-1)
    bits = 2.0**-22 if dtype.itemsize == 2 else torch.finfo(dtype).eps
    atol = 2.0**-38 if dtype == torch.float16 else 0.0  # 2**-24 is its smallest, in units of 2**-14
    torch.testing.assert_close(products, -grad_lse.double(), rtol=bits, atol=atol)


def test_a_gradient_that_is_not_a_number_shows() -> None:
    for bad in (torch.nan, torch.inf):
        saved = given_to_the_kernel(torch.full((1, 1, 2), bad), torch.zeros(1, 1, 2, 8))
        assert not (saved.grad_out * saved.out).sum(-1).isfinite().any()


def test_tensors_keep_their_order_of_memory() -> None:
    """Kernels and their caches go by it."""
    token_major = torch.randn(2, 5, 3, 8).transpose(1, 2)
    saved = given_to_the_kernel(torch.randn(2, 3, 5), token_major)
    for x in (saved.out, saved.grad_out):
        assert x.shape == (2, 3, 5, 8 + COLUMNS)
        assert x.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    ("name", "problem", "reason"),
    [
        ("cpu_flash", PROBLEM, None),
        ("cpu_flash", replace(PROBLEM, softcap=1.0), "it has no softcap"),
        ("cpu_flash", replace(PROBLEM, device_type="cuda"), "it runs on a CPU, the tensors are on"),
        ("flash_attn2", (256, 256), "up to 256, got 264, with the 8 columns that the gradient of"),
        (
            "flash_attn2",
            (264, 264),
            "it needs a head dim that is a multiple of 8 up to 256, got 264",
        ),
        ("flash_attn2", (248, 248), None),
        ("flash_attn3", (248, 248), None),
        ("flash_attn4", (128, 128), "up to 128, got 136, with the 8 columns that the gradient of"),
        ("flash_attn4", (192, 128), "one head dim .*, got 192 and 136, with the 8 columns"),
        ("flash_attn4", (120, 120), None),
        ("cuda_flash", (128, 128), None),
        ("cudnn", (128, 120), None),
        ("cudnn", (128, 128), "multiples of 8 up to 128, got 136, 136, with the 8 columns"),
    ],
)
def test_what_a_kernel_supports(
    name: str, problem: Problem | tuple[int, int], reason: str | None
) -> None:
    if isinstance(problem, tuple):
        on_gpu = replace(PROBLEM, device_type="cuda", dtype=torch.bfloat16)
        problem = replace(on_gpu, head_dim=problem[0], value_head_dim=problem[1])
    found = WidenedKernel(KERNELS[name]).supports(problem)
    if reason is None:
        assert found is None
    else:
        with pytest.raises(ValueError, match=reason):
            raise ValueError(found)


def test_only_backward_with_a_gradient_of_lse_is_widened() -> None:
    plain = replace(PROBLEM, differentiable_lse=False)
    assert select_kernel(None, plain) is KERNELS["cpu_flash"]
    widened = select_kernel(None, PROBLEM)
    assert isinstance(widened, WidenedKernel)
    assert widened.wrapped is KERNELS["cpu_flash"]
    assert select_kernel("reference", PROBLEM) is KERNELS["reference"]
