"""Slices as a value: what is drawn, and how they are put together."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_ring import Slices
from dtensor_ring.planning.slices import LARGEST, UNBOUNDED
from tests.slices import shown, slices

PREFIX = Slices.prefix([0, 5], 2)
FORMS = {
    "lists": Slices([[0, 2], [2, 5]], [[0, 2], [0, 5]], [[None, None], [None, 0]]),
    "arrays": Slices(
        np.array([[0, 2], [2, 5]]),
        np.array([[0, 2], [0, 5]], dtype=np.int32),
        np.array([[LARGEST, LARGEST], [LARGEST, 0]]),
    ),
    "tensors": Slices(
        torch.tensor([[2, 5], [0, 2]]),
        torch.tensor([[0, 5], [0, 2]]).int(),
        torch.tensor([[Slices.UNBOUNDED, 0], [Slices.UNBOUNDED, Slices.UNBOUNDED]]),
    ),
    "batch of one": Slices([[(0, 2), (2, 5)]], [[(0, 2), (0, 5)]], [[(None, None), (None, 0)]]),
    "empty slices": Slices(
        [(0, 2), (2, 5), (3, 3), (0, 0)],
        [(0, 2), (0, 5), (0, 9), (0, 0)],
        [(None, None), *[(None, 0)] * 3],
    ),
    "a table": Slices.of_tables([[(2, 5, 0, 5, UNBOUNDED, 0), (0, 2, 0, 2, UNBOUNDED, UNBOUNDED)]]),
    "numbers": Slices.of_numbers(PREFIX.numbers),
    "pickled": pickle.loads(pickle.dumps(PREFIX)),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_every_form_is_one_value(form: Slices) -> None:
    assert form == PREFIX
    assert hash(form) == hash(PREFIX)


def test_values() -> None:
    assert Slices.prefix([0, 5], 3) != PREFIX
    assert Slices.batched([PREFIX, PREFIX]) != PREFIX
    assert PREFIX != "slices"
    assert len(Slices.batched([PREFIX, PREFIX])) == 2
    assert repr(PREFIX) == "<2 slices of all batch rows>"
    assert repr(Slices.batched([PREFIX, PREFIX])) == "<4 slices of 2 batch rows>"
    assert Slices([], [], []) == Slices.documents([0]) == Slices.of_tables([[]])
    with pytest.raises(ValueError, match="read-only"):
        PREFIX.tables[0][0] = 1


SEQ_LENS = 7, 9


@settings(deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 2))
def test_what_is_seen(data: st.DataObject, num_rows: int, one: int) -> None:
    """By `sees`, as text, as numbers and shifted; `|` adds what is elsewhere."""
    given = data.draw(slices(SEQ_LENS, num_rows, max_size=5))
    given.check(*SEQ_LENS)
    assert Slices.of_numbers(given.numbers) == given
    moved = given.shifted(SEQ_LENS[0], SEQ_LENS[1])
    other = given if one == 1 else Slices.of_tables(given.tables[:1])
    both = moved | other
    for row, table in enumerate(given.tables):
        count = shown(table, SEQ_LENS)
        found = [[given.sees(q, k, row) for k in range(SEQ_LENS[1])] for q in range(SEQ_LENS[0])]
        assert np.array_equal(found, count)
        expected = np.zeros((2 * SEQ_LENS[0], 2 * SEQ_LENS[1]))
        expected[SEQ_LENS[0] :, SEQ_LENS[1] :] = count
        assert np.array_equal(shown(moved.tables[row], expected.shape), expected)
        expected[: SEQ_LENS[0], : SEQ_LENS[1]] = shown(other.tables[row % len(other)], SEQ_LENS)
        assert np.array_equal(shown(both.tables[row], expected.shape), expected)
    assert moved.shifted(-SEQ_LENS[0], -SEQ_LENS[1]) == given
    if num_rows == 1 and len(given.tables[0]):
        ends = given.tables[0][:, [1, 3]].max(axis=0)
        drawn = "\n".join("".join(".#"[x] for x in row[: ends[1]]) for row in count[: ends[0]])
        assert str(given) == drawn


def test_bands_move_with_the_keys() -> None:
    moved = [(0, 2), (2, 5)], [(2, 4), (2, 7)], [(None, None), (None, 2)]
    assert PREFIX.shifted(0, key_by=2) == Slices(*moved), "no bound stays none"


def test_text_of_many() -> None:
    assert str(Slices.batched([Slices.block_causal([1, 1]), Slices.block_causal([2])])) == (
        "row 0:\n#.\n##\nrow 1:\n##\n##"
    )
    assert str(Slices.of_tables([])) == "no batch rows"
    assert str(Slices([], [], [])) == "nothing is seen"
    assert str(Slices.prefix([0, 65], 2)).splitlines() == [
        "queries 0 to 2, keys 0 to 2, left None, right None",
        "queries 2 to 65, keys 0 to 65, left None, right 0",
    ]
    lines = str(Slices.batched([Slices.block_causal([2] * 40)] * 2)).splitlines()
    assert lines[0] == "row 0: queries 0 to 2, keys 0 to 2, left None, right None"
    assert (len(lines), lines[-1]) == (33, "and 48 more")


def test_one_table_is_that_of_all_rows() -> None:
    table = np.array([[0, 4, 0, 4, 0, 0], [4, 8, 4, 8, 0, 0]])
    assert len(Slices.of_tables(table)) == len(Slices.of_tables([table])) == 1
