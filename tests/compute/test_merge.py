"""Partial results merge to the whole, in any order, and the identity changes nothing."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_ring.compute.merge import merge_

ROWS, COLS = 5, 8


def scored(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of rows of scores; a row that sees nothing is (0, -inf)."""
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
    return (weights @ values)[None, None], lse[None, None]


def identity(head_dim: int = 3) -> tuple[Tensor, Tensor]:
    zeros = torch.zeros(1, 1, ROWS, head_dim, dtype=torch.float64)
    return zeros, torch.full((1, 1, ROWS), -torch.inf, dtype=torch.float64)


@settings(deadline=None)
@given(
    pieces=st.permutations(range(COLS)).flatmap(
        lambda cols: st.lists(st.integers(0, COLS), max_size=4).map(
            lambda cuts: [cols[a:b] for a, b in pairwise([0, *sorted(cuts), COLS])]
        )
    ),
    spread=st.sampled_from([0.1, 1.0, 30.0, 1000.0]),
    hidden=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_pieces_in_any_order_make_the_whole(
    pieces: list[list[int]], spread: float, hidden: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = spread * torch.randn(ROWS, COLS, generator=generator, dtype=torch.float64)
    scores[torch.rand(ROWS, COLS, generator=generator) < hidden] = -torch.inf
    values = torch.randn(COLS, 3, generator=generator, dtype=torch.float64)
    out, lse = identity()
    for cols in pieces:
        merge_(out, lse, *scored(scores[:, cols], values[cols]))
    torch.testing.assert_close((out, lse), scored(scores, values), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("first", [True, False], ids=["identity first", "identity last"])
@pytest.mark.parametrize("seen", [True, False], ids=["with a block", "with itself"])
def test_identity(first: bool, seen: bool) -> None:
    block = scored(torch.randn(ROWS, COLS).double(), torch.randn(COLS, 3).double())
    block = block if seen else identity()
    out, lse = (x.clone() for x in (identity() if first else block))
    merge_(out, lse, *(block if first else identity()))
    torch.testing.assert_close((out, lse), block, rtol=0, atol=0)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [torch.inf, -torch.inf, 3e38], ids=str)
@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize("lead", [-20.0, 0.0, 20.0])
def test_extreme_outputs(first: bool, lead: float, number: float, dtype: torch.dtype) -> None:
    """An infinite output stays so, whatever its weight; large ones are not subtracted."""
    outs = torch.tensor([number, -3e38], dtype=dtype).view(2, 1, 1, 1, 1)
    lses = torch.tensor([lead, 0.0]).view(2, 1, 1, 1)
    if not first:
        outs, lses = outs.flip(0), lses.flip(0)
    weights = lses.double().softmax(0).unsqueeze(-1)
    expected = (weights * outs.double()).sum(0)
    out, lse = outs[0].clone(), lses[0].clone()
    merge_(out, lse, outs[1], lses[1])
    torch.testing.assert_close(out.double(), expected, rtol=0.01, atol=1e35)


class Ops(TorchDispatchMode):
    """A context that counts ops."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_without_numbers_nothing_is_merged() -> None:
    """On the meta device, where the pieces that a CPU merges would be thousands of ops."""
    out, lse = torch.empty(1, 1, 2**20, 8, device="meta"), torch.empty(1, 1, 2**20, device="meta")
    with Ops() as ops:
        merge_(out, lse, out.bfloat16(), lse)
    assert ops.count == 1, "the cast"
