"""Which tiles are the last of their rows: what they give is final."""

from __future__ import annotations

from unittest.mock import NonCallableMock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_ring.compute.execute import forward_step, last_of_their_rows
from dtensor_ring.compute.kernels import Scores
from dtensor_ring.compute.memory import rows_of
from dtensor_ring.compute.partial import Partial
from dtensor_ring.compute.trace import Label
from dtensor_ring.planning.columns import Cols
from dtensor_ring.planning.plan import Step
from dtensor_ring.planning.tile import FULL, Tile
from tests.compute.test_partial import overlap


def test_kernels_get_no_empty_batch() -> None:
    """Which some take for an error, and others return nothing for."""
    query = torch.empty(0, 2, 4, 8)
    step = Step(0, 0, Cols(((0, 4),)), (Tile((0, 4), (0, 4), FULL),))
    kernel, scores = NonCallableMock(has_segments=False), Scores(FULL, 1.0)
    partial = Partial(query, 8)
    label = Label("forward", 0, 0)
    forward_step(step, query, (query, query), partial, kernel, scores, label)
    assert partial.result()[0].shape == query.shape


@st.composite
def tiles(draw: st.DrawFn) -> Tile:
    start = draw(st.integers(0, 8))
    rows = start, start + draw(st.integers(1, 4))
    return Tile(rows, (0, 1), FULL, draw(st.sampled_from([None, 0, 1])))


@settings(deadline=None, max_examples=300)
@given(st.lists(tiles(), max_size=6))
def test_nothing_later_has_rows_of_the_last(found: list[Tile]) -> None:
    flags = last_of_their_rows(list(map(rows_of, found)))
    for index, (tile, flag) in enumerate(zip(found, flags, strict=True)):
        if flag:
            assert not any(overlap(tile, later) for later in found[index + 1 :])


@settings(deadline=None, max_examples=300)
@given(st.lists(tiles(), max_size=6))
def test_in_the_order_of_their_rows_all_are_found(found: list[Tile]) -> None:
    found.sort(key=lambda tile: tile.rows)
    assert last_of_their_rows(list(map(rows_of, found))) == [
        not any(overlap(tile, later) for later in found[index + 1 :])
        for index, tile in enumerate(found)
    ]
