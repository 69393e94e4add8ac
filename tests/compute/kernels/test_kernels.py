"""Each kernel against dense attention, and what its bits depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dtensor_ring import Mask
from dtensor_ring.compute.kernels import (
    KERNELS,
    Kernel,
    Launch,
    Problem,
    Saved,
    Scores,
    cpu_flash,
    kernel_for,
    select_kernel,
)
from dtensor_ring.compute.kernels.emulated import COLUMNS, WidenedKernel
from dtensor_ring.compute.kernels.kernel import Gradients
from dtensor_ring.compute.kernels.reference import Reference
from dtensor_ring.compute.kernels.registry import able_kernel
from dtensor_ring.compute.kernels.varlen import bottom_right
from dtensor_ring.compute.memory import WHOLE
from tests.dense import dense_attention, visible
from tests.intervals import CASES as INTERVALS
from tests.intervals import OPTIONS as INTERVALS_OPTIONS
from tests.intervals import IntervalsCase, check_intervals
from tests.segments import PACKED, SegmentsCase, check_part_of_the_keys, check_segments
from tests.tiles import CASES, CAUSAL, FULL, GPU, TILES, Case, assert_near, check_tile, sized


def marked(names: list[str]) -> pytest.MarkDecorator:
    """Runs a test once for each of those kernels."""
    kernels = [
        pytest.param(KERNELS[name], id=name, marks=[pytest.mark.gpu] if name in GPU else [])
        for name in names
    ]
    return pytest.mark.parametrize("kernel", kernels)


every_kernel = marked(list(KERNELS))
every_kernel_of_segments = marked([name for name in KERNELS if KERNELS[name].has_segments])


def served(kernel: Kernel, case: Case | SegmentsCase | IntervalsCase) -> tuple[Kernel, str]:
    """The kernel as it serves the case, and where; skips if it cannot."""
    device = "cuda" if kernel.name in GPU else "cpu"
    able, reason = able_kernel(kernel, case.problem(device))
    reason = kernel.missing() or reason
    if reason:
        pytest.skip(f"{kernel.name}: {reason}")
    return able, device


@every_kernel
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_tile(kernel: Kernel, case: Case) -> None:
    case = sized(kernel.name, case)
    able, device = served(kernel, case)
    check_tile(able, case, device)


def test_long_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the kernel of the CPU halves, where a thread has many heads."""
    monkeypatch.setattr(cpu_flash, "FINE", cpu_flash.FINE._replace(large=512))
    check_tile(KERNELS["cpu_flash"], Case(550, 550, CAUSAL, heads=(6, 3), batch=1), "cpu")


@every_kernel_of_segments
@pytest.mark.parametrize("case", PACKED.values(), ids=list(PACKED))
def test_segments(kernel: Kernel, case: SegmentsCase) -> None:
    case = sized(kernel.name, case)
    able, device = served(kernel, case)
    check_segments(able, case, device)


@marked([name for name in KERNELS if KERNELS[name].has_intervals])
@pytest.mark.parametrize("name", INTERVALS)
@pytest.mark.parametrize("option", [None, *INTERVALS_OPTIONS])
def test_intervals(kernel: Kernel, name: str, option: str | None) -> None:
    given = INTERVALS[name]
    more = {"dtype": torch.bfloat16} | (INTERVALS_OPTIONS[option] if option else {})
    given = IntervalsCase(given.tiles, replace(given.case, **more))
    able, device = served(kernel, given)
    check_intervals(able, given, device)


@every_kernel_of_segments
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_of_segments_with_a_part_of_the_keys(kernel: Kernel, dtype: torch.dtype) -> None:
    check_part_of_the_keys(kernel, dtype, served(kernel, Case(dtype=dtype))[1])


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_grad_lse", [False, True])
def test_backward_of_a_part_of_the_keys(
    kernel: Kernel, dtype: torch.dtype, with_grad_lse: bool
) -> None:
    """With `out` and `lse` of the whole row, gradients are those of the part."""
    able, device = served(kernel, Case(dtype=dtype, grad_lse=with_grad_lse))
    torch.manual_seed(0)
    eps = torch.finfo(dtype).eps
    tensors = [torch.randn(1, 2, 12, 8).to(dtype) for _ in range(4)]
    grad_out, query, key, value = tensors
    whole = dense_attention(query, key, value, FULL, scale=0.4)
    out, lse = whole.out.detach().to(dtype), whole.lse.detach().float()
    grad_lse = [torch.randn(1, 2, 12)] if with_grad_lse else []
    saved = Saved(*(x.to(device) for x in (grad_out, out, lse, *grad_lse)))
    query, key, value = (x.to(device) for x in (query, key, value))
    partials = []
    for cols in (slice(0, 5), slice(5, 12)):
        tensors = query, key[:, :, cols], value[:, :, cols]
        partials.append(able.backward(saved, *tensors, Case().launch, Case().scores))
    expected = whole.backward(grad_out, *grad_lse)
    assert_near(partials[0][0] + partials[1][0], expected[0], eps, "gradient of query")
    for index, name in ((1, "key"), (2, "value")):
        joined = torch.cat([partials[0][index], partials[1][index]], 2)
        assert_near(joined, expected[index], eps, f"gradient of {name}")


@pytest.mark.parametrize("case", TILES.values(), ids=list(TILES))
def test_bottom_right_window_shows_the_same_band(case: Case) -> None:
    rows, cols, mask = case.rows, case.cols, case.mask
    left, right = bottom_right(mask, rows, cols)
    if mask == CAUSAL:
        assert (left, right) == (None, None), "the causal flag says it"
        return
    seen = visible(mask, (rows, cols), 1)[0, 0]
    lag = torch.arange(rows).unsqueeze(1) + cols - rows - torch.arange(cols)
    bounds = [left, right]
    assert all(bound is None or bound >= 0 for bound in bounds), "negative means unbounded there"
    # Flash attention 2: what reaches over all columns is unbounded, then one side bounds the other.
    bounds = [None if bound is None or bound >= cols else bound for bound in bounds]
    if bounds.count(None) == 1:
        bounds = [cols if bound is None else bound for bound in bounds]
    in_window = torch.ones(rows, cols, dtype=torch.bool)
    for bound, side in zip(bounds, (lag, -lag), strict=True):
        in_window &= torch.tensor(True) if bound is None else side <= bound
    assert torch.equal(seen, in_window), (left, right)


# Kernels whose bits do not depend on what else is in a launch, or on where tensors are.

BLOCKS = [
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
@pytest.mark.parametrize(("rows", "cols", "mask"), BLOCKS)
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


# The gradient of lse in columns: as exact as the sums it enters, and nothing else changes.

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
