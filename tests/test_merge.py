"""Partial results merge to the whole, in any order, and the identity changes nothing."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtensor_ring import Mask
from dtensor_ring.merge import GradientShare, GradientSum, Partial, cols_of, merge_, rows_of
from dtensor_ring.order import TOKEN_MAJOR, Order, in_order
from dtensor_ring.tile import FULL, Tile
from tests.dense import dense_attention

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


def tiles_of(num_rows: int, num_cols: int, batch: int) -> list[Tile]:
    """A cover of all rows by all columns, by rows of the batch where there are two."""
    half_rows, half_cols = num_rows // 2, num_cols // 2
    tiles = [
        Tile((0, num_rows), (0, half_cols), FULL),
        Tile((half_rows, num_rows), (half_cols, num_cols), FULL),
    ]
    upper = Tile((0, half_rows), (half_cols, num_cols), FULL, batch=0)
    return [*tiles, upper, *(Tile(upper.rows, upper.cols, FULL, row) for row in range(1, batch))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [1, -1], ids=["whole first", "whole last"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("memory_order", [TOKEN_MAJOR, (0, 1, 2, 3)])
def test_partial_merges_tiles(
    dtype: torch.dtype, order: int, with_sinks: bool, memory_order: Order
) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, n, 4).to(dtype) for n in (ROWS, COLS, COLS))
    sinks = torch.randn(3) if with_sinks else None
    query = in_order(query, memory_order, dtype)
    partial, wide = Partial(query, 4), torch.promote_types(dtype, torch.float32)
    for tile in tiles_of(ROWS, COLS, 2)[::order]:
        rows, cols = rows_of(tile), cols_of(tile)
        block = dense_attention(query[rows], key[cols], value[cols], Mask.full())
        partial.add(tile, block.out.detach().to(dtype), block.lse.detach().to(wide))
    out, lse = partial.result(sinks)
    expected = dense_attention(query, key, value, Mask.full(), sinks=sinks)
    assert out.dtype == dtype
    assert out.permute(memory_order).is_contiguous(), "in the query's order"
    assert lse.dtype == wide
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected.out.detach(), rtol=0, atol=8 * eps)
    eps = torch.finfo(wide).eps
    torch.testing.assert_close(lse.double(), expected.lse.detach(), rtol=0, atol=32 * eps)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -torch.inf])], ids=["", "sinks"])
def test_partial_of_nothing(sinks: Tensor | None) -> None:
    query = torch.randn(2, 2, 3, 4, dtype=torch.bfloat16)
    out, lse = Partial(query, 6).result(sinks)
    assert (out.shape, out.dtype, lse.dtype) == ((2, 2, 3, 6), torch.bfloat16, torch.float32)
    assert out.eq(0).all()
    expected = torch.full((2,), -torch.inf) if sinks is None else sinks
    assert torch.equal(lse, expected.view(1, 2, 1).expand(2, 2, 3))


def test_a_single_whole_tile_is_kept_as_it_is() -> None:
    query = torch.randn(1, 2, 3, 4, dtype=torch.bfloat16)
    out, lse = torch.randn(1, 2, 3, 4).bfloat16(), torch.randn(1, 2, 3)
    partial = Partial(query, 4)
    partial.add(Tile((0, 3), (0, 3), FULL), out, lse)
    result = partial.result()
    assert result[0].data_ptr() == out.data_ptr(), "no copy"
    assert torch.equal(result[1], lse)


ALL = (slice(None), slice(None), slice(None))
SOME = (slice(0, 1), slice(None), slice(1, 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "regions", [[], [ALL], [SOME], [ALL, SOME], [SOME, ALL, SOME]], ids=lambda r: str(len(r))
)
@pytest.mark.parametrize("home", [False, True], ids=["", "home"])
def test_gradient_sum(dtype: torch.dtype, regions: list[tuple[slice, ...]], home: bool) -> None:
    torch.manual_seed(0)
    like = torch.empty(2, 3, 4, 5, dtype=dtype)
    total, expected = GradientSum(like), torch.zeros(like.shape, dtype=torch.float64)
    for region in regions:
        grad = torch.randn(like[region].shape).to(dtype)
        expected[region] += grad
        total.add(region, grad)
    if home:
        share = torch.randn(2, 3, 2, 5, dtype=torch.promote_types(dtype, torch.float32))
        expected[:, :, 1:3] += share
        total.add_home(share, (1, 3))
    result = total.result()
    assert result.dtype == dtype
    assert result.transpose(1, 2).is_contiguous(), "token-major"
    # float32 accumulates, and one rounding to the dtype is at the end.
    rtol = torch.finfo(dtype).eps / 2 + 1e-6 if dtype != torch.float64 else 1e-15
    torch.testing.assert_close(result.double(), expected, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize(
    "regions", [[], [ALL], [SOME], [SOME, SOME], [SOME, ALL], [ALL] * 3], ids=lambda r: str(len(r))
)
def test_gradient_share(first: bool, regions: list[tuple[slice, ...]]) -> None:
    total = torch.randn(2, 2, 3, 4)
    share = GradientShare(torch.empty(total.shape, dtype=torch.bfloat16))
    expected = torch.zeros_like(total) if first else total.clone()
    for region in regions:
        grad = torch.randn(total[region].shape).bfloat16()
        expected[region] += grad
        share.add(region, grad)
    share.add_to(total, first)
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-6)
