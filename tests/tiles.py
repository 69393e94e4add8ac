"""Tiles as the planner makes them, and what every kernel computes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from dtensor_ring import Mask
from dtensor_ring.compute.kernels import Kernel, Launch, Problem, Saved, Scores
from dtensor_ring.compute.memory import WHOLE
from tests.dense import dense_attention

FULL, CAUSAL = Mask.full(), Mask.causal()
GPU = ("flash_attn3", "flash_attn4", "cudnn", "flash_attn2", "cuda_flash", "cudnn_flex")
GPU += ("cudnn_sdpa",)
"""Kernels that need one."""
HUB = ("hub:kernels-community/flash-attn3", "hub:kernels-community/flash-attn2")
"""Those that are downloaded."""

SMALLEST = {"flash_attn4": 32}
"""Head dims below which a kernel serves nothing."""


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
    scale: float = 0.4
    strided: bool = False
    grad_lse: bool = False

    def problem(self, device: str) -> Problem:
        return Problem(
            *(device, self.dtype, *self.head_dims),
            *(self.scale, self.softcap, self.grad_lse),
            windowed=self.mask not in (FULL, CAUSAL),
            grouped=self.heads[0] != self.heads[1],
        )

    @property
    def launch(self) -> Launch:
        return Launch(WHOLE, WHOLE, self.mask)

    @property
    def scores(self) -> Scores:
        return Scores(self.mask, self.scale, self.softcap)

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
    "causal halves": Case(450, 450, CAUSAL),
    "causal, many heads": Case(450, 450, CAUSAL, heads=(4, 4)),
    "band, many heads": Case(300, 290, Mask(20, 30), heads=(4, 4)),
    "band": Case(9, 8, Mask(2, 1)),
    "wide band": Case(5, 9, Mask(1, 5)),
    "band of blocks": Case(300, 290, Mask(20, 30)),
    "looks back": Case(5, 9, Mask(2, None)),
    "looks ahead": Case(6, 9, Mask(None, 3)),
    "strided": Case(200, 200, CAUSAL, strided=True),
}
OPTIONS = {
    "grouped": {"heads": (4, 2)},
    "multi-query": {"heads": (3, 1)},
    "head dim of value": {"head_dims": (8, 16)},
    "latent": {"head_dims": (192, 128), "scale": 0.07},
    "softcap": {"softcap": 2.0},
    "grad of lse": {"grad_lse": True},
    "grad of lse, grouped": {"grad_lse": True, "heads": (4, 2)},
    "grad of lse, float64": {"grad_lse": True, "dtype": torch.float64},
    "grad of lse, float16": {"grad_lse": True, "dtype": torch.float16},
    "grad of lse, bfloat16": {"grad_lse": True, "dtype": torch.bfloat16},
    "grad of lse, head dims": {"grad_lse": True, "head_dims": (16, 8)},
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


AnyCase = TypeVar("AnyCase", bound=Any)


def sized(kernel: str, case: AnyCase) -> AnyCase:
    """The case with head dims that are large enough for a kernel."""
    smallest = SMALLEST.get(kernel, 0)
    return replace(case, head_dims=tuple(max(x, smallest) for x in case.head_dims))


def assert_near(actual: Tensor, expected: Tensor, eps: float, what: str) -> None:
    """Within a few roundings of the largest entry: sums of hundreds of terms round anywhere.

    Terms are about 1 in size, and may cancel to nothing, as the gradient of a single pair does.
    """
    assert actual.shape == expected.shape, what
    atol = 16 * eps * max(1.0, expected.abs().max().item()) if expected.numel() else 0
    torch.testing.assert_close(
        actual.cpu().double(), expected.detach(), rtol=0, atol=atol, msg=lambda m: f"{what}: {m}"
    )


def check_tile(kernel: Kernel, case: Case, device: str) -> None:
    """Output, lse and gradients of a tile are those of dense attention."""
    torch.manual_seed(0)
    wide = torch.promote_types(case.dtype, torch.float32)
    (heads, kv_heads), (head_dim, value_dim) = case.heads, case.head_dims
    query = case.tensor(heads, case.rows, head_dim, device)
    key = case.tensor(kv_heads, case.cols, head_dim, device)
    value = case.tensor(kv_heads, case.cols, value_dim, device)
    grad_out = case.tensor(heads, case.rows, value_dim, device)
    grad_lse = torch.randn(case.batch, heads, case.rows, dtype=wide) if case.grad_lse else None
    options = case.launch, case.scores
    inputs = [x.clone() for x in (query, key, value)]

    out, lse = kernel.forward(query, key, value, *options)
    expected = dense_attention(
        *(x.cpu() for x in inputs), case.mask, scale=case.scale, softcap=case.softcap
    )
    assert (out.dtype, lse.dtype) == (case.dtype, wide)
    eps = torch.finfo(case.dtype).eps
    # aten's exponentials are approximate for 16-bit inputs, so lse is not quite float32 there.
    lse_eps = eps if case.dtype == wide else eps / 64
    assert_near(out, expected.out, eps, "out")
    assert_near(lse, expected.lse, lse_eps, "lse")

    slope = None if grad_lse is None else grad_lse.to(device)
    saved = Saved(grad_out, out, lse, slope)
    grads = kernel.backward(saved, query, key, value, *options)
    expected_grads = expected.backward(grad_out.cpu(), grad_lse)
    for name, grad, expected_grad in zip("qkv", grads, expected_grads, strict=True):
        assert_near(grad, expected_grad, eps, f"gradient of {name}")
    for name, x, before in zip("qkv", (query, key, value), inputs, strict=True):
        assert torch.equal(x, before), f"{name} was written to"
