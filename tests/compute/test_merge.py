"""Partial results merge to the whole, in any order, and the identity changes nothing."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtensor_ring.compute.merge import merge_

ROWS, COLS = 5, 8


def scored(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of rows of scores; a row that sees nothing is (0, -inf)."""
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
    return weights @ values, lse


def identity(head_dim: int = 3) -> tuple[Tensor, Tensor]:
    zeros = torch.zeros(ROWS, head_dim, dtype=torch.float64)
    return zeros, torch.full((ROWS,), -torch.inf, dtype=torch.float64)


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
