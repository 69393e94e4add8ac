"""Builders of slices, against what their masks say of each pair."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_ring import Mask, Slices
from tests.drawn import examples
from tests.planning.builders import KINDS, Built, check


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_builders_show_what_they_say(kind: Callable[[], st.SearchStrategy[Built]]) -> None:
    settings(deadline=None, max_examples=examples(80))(given(kind())(check))()


def test_ranges_that_move_along_are_few_slices() -> None:
    query = np.arange(100)
    window, documents = np.maximum(query - 9, 0), query // 30 * 30
    image = np.where((query >= 40) & (query < 60), 60, query + 1)
    for begins, ends, expected in (
        (0 * query, query + 1, 1),
        (window, query + 1, 2),
        (documents, query + 1, 4),
        (0 * query, image, 3),
        (window, image, 4),
    ):
        assert len(Slices.per_query(begins, ends).tables[0]) == expected


def test_nothing() -> None:
    """Without documents, parts or queries, nothing is seen; an empty batch stays one."""
    nothing = Slices([], [], [])
    for made in (
        Slices.documents([3]),
        Slices.prefix([0, 0], 2),
        Slices.blocks([0], [], []),
        Slices.global_tokens([0], 1, 2),
        Slices.bottom_right([0, 0], [0, 4]),
        Slices.per_query([], []),
        Slices.block_causal([]),
        Slices.block_diffusion([0]),
        Slices.tree([], []),
    ):
        assert made == nothing
    empty = np.zeros((0, 4), dtype=np.int64)
    for made in (
        Slices.documents(empty),
        Slices.per_query(empty, empty),
        Slices.block_causal(empty),
    ):
        assert made == Slices.of_tables([])


def test_batch_rows() -> None:
    """One row stands for all; rows may differ in length, or be filled up."""
    for made, expected in (
        (Slices.prefix([0, 5], [[2], [3]]), [Slices.prefix([0, 5], 2), Slices.prefix([0, 5], 3)]),
        (
            Slices.documents(
                [[0, 3, 5], [0, 5, 5]],
                [[Mask.full(), Mask.causal()], [Mask.causal(), Mask.causal()]],
            ),
            [Slices.documents([0, 3, 5], [Mask.full(), Mask.causal()]), Slices.documents([0, 5])],
        ),
        (
            Slices.blocks([0, 9], torch.tensor([[1, 6], [4, 0]]), torch.tensor([[3, 8], [7, 0]])),
            [Slices.blocks([0, 9], [1, 6], [3, 8]), Slices.blocks([0, 9], [4], [7])],
        ),
        (
            Slices.tree([[-1, 0, 0], [-1, 0]], [[2, 1, 1], [3, 3]]),
            [Slices.tree([-1, 0, 0], [2, 1, 1]), Slices.tree([-1, 0], [3, 3])],
        ),
        (Slices.block_causal([[2, 2]]), [Slices.block_causal([2, 2])]),
    ):
        assert made == Slices.batched(expected)


def test_trees_in_the_order_of_a_walk_are_few_slices() -> None:
    chain = Slices.tree(range(-1, 99), [3] * 100)
    assert len(chain.tables[0]) == 199
    assert chain.sees(299, 0)
    assert not chain.sees(298, 299)
