"""Tiles in any order make the whole, rounded once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dtensor_ring import Mask
from dtensor_ring.compute.accumulate import RunningOutput
from dtensor_ring.compute.memory import TOKEN_MAJOR, Order, cols_of, in_order, rows_of
from dtensor_ring.planning.tile import FULL, Tile
from tests.dense import dense_attention

ROWS, COLS = 5, 8


def tiles_of(num_rows: int, num_cols: int, batch: int) -> list[Tile]:
    """A cover of all rows by all columns, by rows of the batch where there are two."""
    half_rows, half_cols = num_rows // 2, num_cols // 2
    tiles = [
        Tile((0, num_rows), (0, half_cols), FULL),
        Tile((half_rows, num_rows), (half_cols, num_cols), FULL),
    ]
    upper = Tile((0, half_rows), (half_cols, num_cols), FULL, batch=0)
    return [*tiles, upper, *(Tile(upper.rows, upper.cols, FULL, row) for row in range(1, batch))]


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [1, -1], ids=["whole first", "whole last"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("memory_order", [TOKEN_MAJOR, (0, 1, 2, 3)])
@pytest.mark.parametrize("room", [None, 1, 2, 8])
def test_tiles_make_the_whole(
    dtype: torch.dtype, order: int, with_sinks: bool, memory_order: Order, room: int | None
) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, n, 4).to(dtype) for n in (ROWS, COLS, COLS))
    sinks = torch.randn(3) if with_sinks else None
    query = in_order(query, memory_order, dtype)
    running, wide = (
        RunningOutput(query, 4, sinks, room=room),
        torch.promote_types(dtype, torch.float32),
    )
    tiles = tiles_of(ROWS, COLS, 2)[::order]
    for tile in tiles:
        rows, cols = rows_of(tile), cols_of(tile)
        block = dense_attention(query[rows], key[cols], value[cols], Mask.full())
        block_lse = in_order(block.lse.detach(), memory_order[:-1], wide)
        running.add(rows, block.out.detach().to(dtype), block_lse)
    out, lse = running.result()
    assert lse.is_contiguous()
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
    out, lse = RunningOutput(query, 6, sinks).result()
    assert (out.shape, out.dtype, lse.dtype) == ((2, 2, 3, 6), torch.bfloat16, torch.float32)
    assert out.eq(0).all()
    expected = torch.full((2,), -torch.inf) if sinks is None else sinks
    assert torch.equal(lse, expected.view(1, 2, 1).expand(2, 2, 3))


def test_a_single_whole_tile_is_kept_as_it_is() -> None:
    query = torch.randn(1, 2, 3, 4, dtype=torch.bfloat16)
    out, lse = torch.randn(1, 2, 3, 4).bfloat16(), torch.randn(1, 2, 3)
    running = RunningOutput(query, 4)
    running.add(rows_of(Tile((0, 3), (0, 3), FULL)), out, lse)
    result = running.result()
    assert result[0].data_ptr() == out.data_ptr(), "no copy"
    assert torch.equal(result[1], lse)
