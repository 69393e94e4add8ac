"""Segments as the planner makes them, and what every kernel that takes them computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from dtensor_ring import Mask
from dtensor_ring.compute.kernels import Kernel, Launch, Problem, Saved, Scores
from dtensor_ring.compute.kernels.kernel import Segments
from dtensor_ring.compute.memory import WHOLE
from tests.dense import dense_attention
from tests.tiles import CAUSAL, FULL, Case, assert_near


@dataclass(frozen=True)
class SegmentsCase:
    """Segments and what is computed on them."""

    rows: tuple[int, ...]
    cols: tuple[int, ...]
    mask: Mask = FULL
    heads: tuple[int, int] = (2, 2)
    head_dims: tuple[int, int] = (8, 8)
    softcap: float = 0.0
    dtype: torch.dtype = torch.float32
    scale: float = 0.4
    grad_lse: bool = False

    @property
    def launch(self) -> Launch:
        return Launch(WHOLE, WHOLE, self.mask, Segments(self.rows, self.cols))

    @property
    def scores(self) -> Scores:
        return Scores(self.mask, self.scale, self.softcap)

    def problem(self, device: str) -> Problem:
        options = (self.mask, self.heads, self.head_dims, 1, self.softcap, self.dtype, self.scale)
        return Case(1, 1, *options, grad_lse=self.grad_lse).problem(device)

    def tensors(self) -> list[Tensor]:
        """Random query, key, value and gradient of out, the middle of larger tensors."""
        (heads, kv_heads), (head_dim, value_dim) = self.heads, self.head_dims
        num_rows, num_cols = self.rows[-1], self.cols[-1]
        shapes = (
            (num_rows, heads, head_dim),
            (num_cols, kv_heads, head_dim),
            (num_cols, kv_heads, value_dim),
            (num_rows, heads, value_dim),
        )
        return [torch.randn(x + 3, y, z).to(self.dtype)[2:-1] for x, y, z in shapes]

    def parts(self) -> Iterator[tuple[slice, slice]]:
        """The queries and the keys of the segments that have both."""
        for rows, cols in zip(pairwise(self.rows), pairwise(self.cols), strict=True):
            if rows[0] < rows[1] and cols[0] < cols[1]:
                yield slice(*rows), slice(*cols)


PACKED = {
    "documents": SegmentsCase((0, 5, 12, 20), (0, 5, 12, 20), CAUSAL),
    "long": SegmentsCase((0, 130, 131, 300), (0, 130, 131, 300), CAUSAL),
    "rectangles": SegmentsCase((0, 3, 10, 11), (0, 6, 8, 20)),
    "one row each": SegmentsCase((0, 1, 1, 2), (0, 4, 7, 8), heads=(4, 2)),
    "gaps": SegmentsCase((0, 4, 4, 9, 15, 15), (0, 4, 9, 14, 14, 20), CAUSAL),
    "gaps, full": SegmentsCase((0, 4, 4, 9, 15, 15), (0, 3, 9, 14, 14, 20)),
    "a gap first, the longest": SegmentsCase((0, 30, 30, 33), (0, 0, 40, 43), CAUSAL),
    "looks back": SegmentsCase((0, 40, 90, 100), (0, 40, 90, 100), Mask(7, 0)),
    "band, gaps": SegmentsCase((0, 9, 9, 20, 50), (0, 9, 60, 71, 71), Mask(2, 3)),
    "wider than a segment": SegmentsCase((0, 3, 23), (0, 3, 23), Mask(5, 0)),
}
PACKED_OPTIONS = {
    "grouped": {"heads": (4, 2)},
    "latent": {"head_dims": (192, 128), "scale": 0.07},
    "softcap": {"softcap": 2.0},
    "bfloat16": {"dtype": torch.bfloat16},
    "bfloat16, grouped": {"dtype": torch.bfloat16, "heads": (4, 2)},
    "grad of lse": {"grad_lse": True},
    "grad of lse, bfloat16": {"grad_lse": True, "dtype": torch.bfloat16, "heads": (4, 2)},
}
PACKED |= {
    f"{packed}, {name}": replace(PACKED[packed], **option)
    for packed in ("long", "gaps", "band, gaps")
    for name, option in PACKED_OPTIONS.items()
}


@dataclass
class Packed:
    """What dense attention gives for segments, one by one, in float64."""

    out: Tensor
    lse: Tensor
    grads: list[Tensor]


def dense_segments(
    case: SegmentsCase, inputs: list[Tensor], grad_out: Tensor, grad_lse: Tensor | None = None
) -> Packed:
    """Rows without keys are (0, -inf); they, and keys without rows, have gradients of 0."""
    lse = grad_out.new_full((grad_out.shape[1], len(grad_out)), -torch.inf, dtype=torch.float64)
    grads = [torch.zeros_like(x, dtype=torch.float64) for x in inputs]
    result = Packed(torch.zeros_like(grad_out, dtype=torch.float64), lse, grads)
    for rows, cols in case.parts():
        spans = rows, cols, cols
        part = [x[span].transpose(0, 1).unsqueeze(0) for x, span in zip(inputs, spans, strict=True)]
        dense = dense_attention(*part, case.mask, scale=case.scale, softcap=case.softcap)
        result.out[rows] = dense.out[0].detach().transpose(0, 1)
        result.lse[:, rows] = dense.lse[0].detach()
        slopes = None if grad_lse is None else grad_lse[:, rows].unsqueeze(0)
        found = dense.backward(grad_out[rows].transpose(0, 1).unsqueeze(0), slopes)
        for grad, span, part in zip(grads, spans, found, strict=True):
            grad[span] = part[0].transpose(0, 1)
    return result


def check_segments(kernel: Kernel, case: SegmentsCase, device: str) -> None:
    """Output, lse and gradients of segments are those of dense attention, one by one."""
    torch.manual_seed(0)
    *inputs, grad_out = case.tensors()
    # Rows without keys have one as well, which leads nowhere.
    grad_lse = torch.randn(grad_out.shape[1::-1]) if case.grad_lse else None
    expected = dense_segments(case, inputs, grad_out, grad_lse)
    tensors, slope = [x.to(device) for x in inputs], grad_out.to(device)
    options = case.launch, case.scores

    out, lse = kernel.forward(*tensors, *options)
    assert (out.dtype, lse.dtype) == (case.dtype, torch.float32)
    eps = torch.finfo(case.dtype).eps
    assert_near(out, expected.out, eps, "out")
    seen = expected.lse > -torch.inf
    assert torch.equal(lse.cpu() == -torch.inf, ~seen), "lse of rows without keys"
    lse_eps = eps if case.dtype == torch.float32 else eps / 64
    assert_near(lse.cpu()[seen], expected.lse[seen], lse_eps, "lse")

    slopes = None if grad_lse is None else grad_lse.to(device)
    grads = kernel.backward(Saved(slope, out, lse, slopes), *tensors, *options)
    for name, grad, expected_grad in zip("qkv", grads, expected.grads, strict=True):
        assert_near(grad, expected_grad, eps, f"gradient of {name}")
    for name, x, before in zip("qkv", tensors, inputs, strict=True):
        assert torch.equal(x.cpu(), before), f"{name} was written to"


def check_part_of_the_keys(kernel: Kernel, dtype: torch.dtype, device: str) -> None:
    """With `out` and `lse` of the whole row, gradients are those of a part of the keys."""
    torch.manual_seed(0)
    eps = torch.finfo(dtype).eps
    whole = SegmentsCase((0, 5, 12), (0, 7, 14), dtype=dtype)
    *inputs, grad_out = whole.tensors()
    expected = dense_segments(whole, inputs, grad_out)
    query, key, value = inputs
    rest = grad_out, expected.out.to(dtype), expected.lse.float()
    saved = Saved(*(x.to(device) for x in rest))
    grad_query = torch.zeros_like(expected.grads[0])
    for bounds, kept in {
        (0, 3, 6): [0, 1, 2, 7, 8, 9],
        (0, 4, 8): [3, 4, 5, 6, 10, 11, 12, 13],
    }.items():
        tensors = [x.to(device) for x in (query, key[kept], value[kept])]
        launch = replace(whole, cols=bounds).launch
        grads = kernel.backward(saved, *tensors, launch, whole.scores)
        grad_query += grads[0].cpu()
        for index, name in ((1, "key"), (2, "value")):
            assert_near(grads[index], expected.grads[index][kept], eps, f"gradient of {name}")
    assert_near(grad_query, expected.grads[0], 2 * eps, "gradient of query")
