"""Each kernel against dense attention, on tiles as the planner makes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dtensor_ring import Mask
from dtensor_ring.kernels import KERNELS, Kernel, Problem
from dtensor_ring.kernels.cuda_flash import bottom_right
from tests.dense import dense_attention, visible

FULL, CAUSAL = Mask.full(), Mask.causal()


@dataclass(frozen=True)
class Case:
    """A tile and what is computed on it."""

    rows: int = 7
    cols: int = 7
    mask: Mask = FULL
    heads: tuple[int, int] = (2, 2)
    head_dims: tuple[int, int] = (8, 8)
    batch: int = 2
    softcap: float = 0.0
    dtype: torch.dtype = torch.float32
    strided: bool = False
    grad_lse: bool = False

    def problem(self, device: str) -> Problem:
        return Problem(
            *(device, self.dtype, *self.head_dims),
            *(0.4, self.softcap, self.grad_lse),
        )

    def tensor(self, heads: int, length: int, head_dim: int, device: str) -> Tensor:
        x = torch.randn(self.batch, heads, length, head_dim).to(device, self.dtype)
        if not self.strided:
            return x
        token_major = x.new_zeros(self.batch, length + 3, heads, head_dim).transpose(1, 2)
        return token_major[:, :, 2:-1].copy_(x)


TILES = {
    "full": Case(),
    "one pair": Case(1, 1, CAUSAL),
    "wide": Case(3, 300),
    "tall": Case(300, 3),
    "causal": Case(7, 7, CAUSAL),
    "causal blocks": Case(200, 200, CAUSAL),
    "band": Case(9, 8, Mask(2, 1)),
    "wide band": Case(5, 9, Mask(1, 5)),
    "band of blocks": Case(300, 290, Mask(20, 30)),
    "looks back": Case(5, 9, Mask(2, None)),
    "looks ahead": Case(6, 9, Mask(None, 3)),
    "empty batch": Case(4, 4, CAUSAL, batch=0),
    "strided": Case(200, 200, CAUSAL, strided=True),
}
OPTIONS = {
    "grouped": {"heads": (4, 2)},
    "multi-query": {"heads": (3, 1)},
    "head dim of value": {"head_dims": (8, 16)},
    "softcap": {"softcap": 2.0},
    "grad of lse": {"grad_lse": True},
    "all": {"heads": (4, 2), "head_dims": (16, 8), "softcap": 1.5, "grad_lse": True},
    "float64": {"dtype": torch.float64},
    "float16": {"dtype": torch.float16},
    "bfloat16, grouped": {"dtype": torch.bfloat16, "heads": (4, 2)},
    "bfloat16, softcap": {"dtype": torch.bfloat16, "softcap": 2.0},
}
SHAPES = ("wide", "causal blocks", "band of blocks")
IN_BFLOAT16 = {
    f"{shape}, bfloat16": replace(case, dtype=torch.bfloat16) for shape, case in TILES.items()
}
CASES = (
    TILES
    | IN_BFLOAT16
    | {
        f"{shape}, {name}": replace(TILES[shape], **option)
        for shape in SHAPES
        for name, option in OPTIONS.items()
    }
)
GPU = ("flash_attn2", "cuda_flash")
every_kernel = pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(kernel, id=name, marks=[pytest.mark.gpu] if name in GPU else [])
        for name, kernel in KERNELS.items()
    ],
)


def assert_near(actual: Tensor, expected: Tensor, eps: float, what: str) -> None:
    """Within a few roundings of the largest entry: sums of hundreds of terms round anywhere.

    Terms are about 1 in size, and may cancel to nothing, as the gradient of a single pair does.
    """
    assert actual.shape == expected.shape, what
    atol = 16 * eps * max(1.0, expected.abs().max().item()) if expected.numel() else 0
    torch.testing.assert_close(
        actual.cpu().double(), expected.detach(), rtol=0, atol=atol, msg=lambda m: f"{what}: {m}"
    )


def device_of(kernel: Kernel, case: Case) -> str:
    """Where the kernel runs; skips where it cannot, or says that it cannot serve the case."""
    device = "cuda" if kernel.name in GPU else "cpu"
    reason = kernel.missing() or kernel.supports(case.problem(device))
    if reason:
        pytest.skip(f"{kernel.name}: {reason}")
    return device


@every_kernel
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_tile(kernel: Kernel, case: Case) -> None:
    device, scale = device_of(kernel, case), 0.4
    torch.manual_seed(0)
    wide = torch.promote_types(case.dtype, torch.float32)
    (heads, kv_heads), (head_dim, value_dim) = case.heads, case.head_dims
    query = case.tensor(heads, case.rows, head_dim, device)
    key = case.tensor(kv_heads, case.cols, head_dim, device)
    value = case.tensor(kv_heads, case.cols, value_dim, device)
    grad_out = case.tensor(heads, case.rows, value_dim, device)
    grad_lse = torch.randn(case.batch, heads, case.rows, dtype=wide) if case.grad_lse else None
    options = (case.mask, scale, case.softcap)
    inputs = [x.clone() for x in (query, key, value)]

    out, lse = kernel.forward(query, key, value, *options)
    expected = dense_attention(
        *(x.cpu() for x in inputs), case.mask, scale=scale, softcap=case.softcap
    )
    assert (out.dtype, lse.dtype) == (case.dtype, wide)
    eps = torch.finfo(case.dtype).eps
    # aten's exponentials are approximate for 16-bit inputs, so lse is not quite float32 there.
    lse_eps = eps if case.dtype == wide else eps / 64
    assert_near(out, expected.out, eps, "out")
    assert_near(lse, expected.lse, lse_eps, "lse")

    slope = None if grad_lse is None else grad_lse.to(device)
    grads = kernel.backward(grad_out, query, key, value, out, lse, slope, *options)
    expected_grads = expected.backward(grad_out.cpu(), grad_lse)
    for name, grad, expected_grad in zip("qkv", grads, expected_grads, strict=True):
        assert_near(grad, expected_grad, eps, f"gradient of {name}")
    for name, x, before in zip("qkv", (query, key, value), inputs, strict=True):
        assert torch.equal(x, before), f"{name} was written to"


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_of_a_part_of_the_keys(kernel: Kernel, dtype: torch.dtype) -> None:
    """With `out` and `lse` of the whole row, gradients are the part's share."""
    device = device_of(kernel, Case(dtype=dtype))
    torch.manual_seed(0)
    eps = torch.finfo(dtype).eps
    tensors = [torch.randn(1, 2, 12, 8).to(dtype) for _ in range(4)]
    grad_out, query, key, value = tensors
    whole = dense_attention(query, key, value, FULL, scale=0.4)
    out, lse = whole.out.detach().to(dtype), whole.lse.detach().float()
    saved = [x.to(device) for x in (grad_out, query, key, value, out, lse)]
    shares = []
    for cols in (slice(0, 5), slice(5, 12)):
        keys, values = (x[:, :, cols] for x in saved[2:4])
        shares.append(kernel.backward(*saved[:2], keys, values, *saved[4:], None, FULL, 0.4, 0.0))
    expected = whole.backward(grad_out)
    assert_near(shares[0][0] + shares[1][0], expected[0], eps, "gradient of query")
    for index, name in ((1, "key"), (2, "value")):
        joined = torch.cat([shares[0][index], shares[1][index]], 2)
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
