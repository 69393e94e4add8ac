"""The tiles that a few queries make with the runs of a cache."""

from __future__ import annotations

import pytest

from dtensor_ring import Contiguous, Mask, Striped
from dtensor_ring.decode.plan import DecodeRequest, decode_step
from dtensor_ring.planning.run_table import RunTable

MANY = RunTable([[(16 * i, 8) for i in range(500)], [(16 * i + 8, 8) for i in range(500)]])
"""Blocks of 8 positions in turns."""


@pytest.mark.parametrize(
    ("mask", "num_queries", "num_tiles"),
    [
        (Mask.causal(), 1, 1),
        (Mask.full(), 1, 1),
        (Mask.full(), 64, 1),
        (Mask.sliding(3000), 1, 1),
        (Mask.chunked(4096), 1, 1),
        (Mask.causal(), 8, 2),  # the square of the queries themselves, on the rank that holds them
        (Mask.prefix_causal(5), 1, 1),
    ],
)
def test_what_all_queries_see_is_one_tile(mask: Mask, num_queries: int, num_tiles: int) -> None:
    start = 8000 - num_queries
    requests = [DecodeRequest(MANY, mask, x, 2, 8000, (start,), num_queries) for x in range(2)]
    steps = [decode_step(x) for x in requests]
    assert [len(step.tiles) for step in steps] == [1, num_tiles]
    assert [len(step.cols) for step in steps] == [4000, 4000]


def test_planned_once() -> None:
    request = DecodeRequest(MANY, Mask.causal(), 0, 2, 8000, (7999,), 1)
    again = request._replace(layout=RunTable(MANY.numbers.copy()))
    assert decode_step(request) is decode_step(again)
    assert request.num_bytes == MANY.num_bytes  # the cache counts what its keys hold


def test_rows_of_one_length_share_their_tiles() -> None:
    for starts, batches in (((7,), {None}), ((7, 7), {None}), ((7, 5), {0, 1})):
        step = decode_step(DecodeRequest(Contiguous(), Mask.causal(), 0, 1, 8, starts, 1))
        assert {tile.batch for tile in step.tiles} == batches


def test_queries_after_all_keys_see_those_in_their_window() -> None:
    """Two queries, after as many keys as one table of slices has."""
    step = decode_step(DecodeRequest(Contiguous(), Mask.sliding(5), 0, 1, 1024, (1024,), 2))
    assert sum(tile.area for tile in step.tiles) == 5 + 4


def test_keys_with_gaps() -> None:
    step = decode_step(DecodeRequest(Striped(), Mask.causal(), 1, 4, 64, (60,), 4))
    assert {tile.mask for tile in step.tiles} == {Mask.full()}
    assert [tile.cols for tile in step.tiles] == [(0, 15), (0, 16)]
