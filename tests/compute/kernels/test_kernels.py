"""Each kernel against dense attention, on tiles and segments as the planner makes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dtensor_ring.compute.kernels import KERNELS, Kernel, Saved, cpu_flash
from dtensor_ring.compute.kernels.registry import able_kernel
from dtensor_ring.compute.kernels.varlen import bottom_right
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
