"""Intervals of keys as steps have them, and what every kernel that takes them computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dtensor_ring import Mask
from dtensor_ring.compute.kernels import Launch, Saved, Scores
from dtensor_ring.compute.kernels.kernel import Gradients, Intervals, Kernel, Problem, Result
from dtensor_ring.compute.kernels.reference import Reference
from dtensor_ring.compute.memory import WHOLE
from dtensor_ring.planning.intervals import intervals_of
from dtensor_ring.planning.tile import CAUSAL, FULL, Tile
from tests.dense import dense_attention, visible
from tests.tiles import Case, assert_near


class OneLaunch(Reference):
    """The reference, of intervals and tiles; it notes its launches, forward and backward."""

    name = "one_launch"
    has_segments = False
    has_intervals = True

    def __init__(self) -> None:
        self.forwards: list[Launch] = []
        self.backwards: list[Launch] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores) -> Result:
        self.forwards.append(launch)
        return super().forward(q, k, v, launch, scores)

    def backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores
    ) -> Gradients:
        self.backwards.append(launch)
        return super().backward(saved, q, k, v, launch, scores)


@dataclass(frozen=True)
class IntervalsCase:
    """Tiles of one launch, and what is computed on them."""

    tiles: tuple[Tile, ...]
    case: Case

    def seen(self) -> Tensor:
        """`(B, R, C)`."""
        case = self.case
        seen = torch.zeros(case.batch, case.rows, case.cols, dtype=torch.bool)
        for tile in self.tiles:
            of = slice(None) if tile.batch is None else slice(tile.batch, tile.batch + 1)
            part = seen[of, slice(*tile.rows), slice(*tile.cols)]
            part |= visible(tile.mask, part.shape[1:], 1)[0, 0]
        return seen

    @property
    def launch(self) -> Launch:
        found = intervals_of(self.tiles, self.case.batch)
        spans = (0, self.case.batch), (0, self.case.rows), (0, self.case.cols)
        assert (found.batches, found.rows, found.cols) == spans, "no tensor is larger"
        return Launch(WHOLE, WHOLE, FULL, intervals=Intervals(found.ends))

    def problem(self, device: str) -> Problem:
        return self.case.problem(device)


WINDOW = (
    Tile((0, 9), (0, 9), Mask(4, 0)),
    Tile((0, 4), (9, 12), Mask(3, None)),
    Tile((9, 140), (20, 151), Mask(30, 0)),
)
"""Where rows see two intervals."""
DOCUMENTS = tuple(Tile(x, x, CAUSAL) for x in ((0, 5), (5, 40), (40, 41), (50, 140)))
"""Some rows see nothing, and no row sees some keys."""
BY_ROW = (
    *(Tile(x, x, CAUSAL, 0) for x in ((0, 30), (35, 130))),
    *(Tile(x, y, FULL, 1) for x, y in (((3, 7), (0, 150)), ((7, 140), (60, 61)))),
)
CASES = {
    "window": IntervalsCase(WINDOW, Case(140, 151)),
    "documents": IntervalsCase(DOCUMENTS, Case(140, 140)),
    "by row": IntervalsCase(BY_ROW, Case(140, 150)),
    "one key": IntervalsCase((Tile((0, 5), (0, 1), FULL),), Case(5, 1)),
}
OPTIONS = {
    "grouped": {"heads": (4, 2)},
    "grad of lse": {"grad_lse": True},
    "bfloat16, grouped, grad of lse": {"dtype": torch.bfloat16, "heads": (4, 2), "grad_lse": True},
    "head dims": {"head_dims": (16, 8)},
    "strided": {"strided": True},
}


def check_intervals(kernel: Kernel, given: IntervalsCase, device: str = "cpu") -> None:
    """Output, lse and gradients are those of dense attention; rows without keys are (0, -inf)."""
    torch.manual_seed(0)
    case, seen, launch = given.case, given.seen(), given.launch
    (heads, kv_heads), (head_dim, value_dim) = case.heads, case.head_dims
    query = case.tensor(heads, case.rows, head_dim, device)
    key = case.tensor(kv_heads, case.cols, head_dim, device)
    value = case.tensor(kv_heads, case.cols, value_dim, device)
    grad_out = case.tensor(heads, case.rows, value_dim, device)
    grad_lse = torch.randn(case.batch, heads, case.rows) if case.grad_lse else None
    scores = case.scores
    out, lse = kernel.forward(query, key, value, launch, scores)
    how = {"scale": case.scale, "softcap": case.softcap, "seen": seen}
    expected = dense_attention(*(x.cpu() for x in (query, key, value)), FULL, **how)
    eps = torch.finfo(case.dtype).eps
    assert (out.dtype, lse.dtype) == (case.dtype, torch.float32)
    is_empty = ~seen.any(-1).unsqueeze(1).expand(lse.shape)
    assert (lse.cpu()[is_empty] == -torch.inf).all()
    assert (out.cpu()[is_empty] == 0).all()
    assert_near(out, expected.out, eps, "out")
    assert_near(lse.cpu()[~is_empty], expected.lse[~is_empty], 1e-5, "lse")
    saved = Saved(grad_out, out, lse, None if grad_lse is None else grad_lse.to(device))
    grads = kernel.backward(saved, query, key, value, launch, scores)
    # The gradient of an lse of -inf is 0, and is not asked for.
    slope = None if grad_lse is None else grad_lse.masked_fill(is_empty, 0)
    wholes = expected.backward(grad_out.cpu(), slope)
    for name, grad, whole in zip("qkv", grads, wholes, strict=True):
        assert_near(grad, whole, eps, f"gradient of {name}")
