"""Boundaries of documents: every form comes to one value."""

from __future__ import annotations

import pickle
import re
from array import array
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtensor_ring.planning.mask import Documents, as_documents

FORMS = {
    "list": [0, 3, 8],
    "tuple": (0, 3, 8),
    "array": np.array([0, 3, 8]),
    "int32": np.array([0, 3, 8], dtype=np.int32),
    "tensor": torch.tensor([0, 3, 8], dtype=torch.int32),
    "buffer": array("i", [0, 3, 8]),
    "row in a list": [[0, 3, 8]],
    "row in a tensor": torch.tensor([[0, 3, 8]]),
    "list of tensors": [torch.tensor([0, 3, 8])],
    "padded": (0, 3, 8, 8, 8, 8),
    "empty documents": (0, 0, 3, 3, 8),
    "rows alike": [[0, 3, 8], [0, 3, 8]],
    "rows alike but for empty ones": torch.tensor([[0, 3, 8, 8], [0, 3, 3, 8]]),
    "ragged": [(0, 3, 8), (0, 3, 8, 8)],
    "documents": Documents([(0, 3, 8)]),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_every_form_is_one_value(form: Any) -> None:
    documents = as_documents(form)
    assert documents == Documents([(0, 3, 8)])
    assert hash(documents) == hash(Documents([(0, 3, 8)]))
    assert documents.rows == tuple(documents) == ((0, 3, 8),)
    assert all(type(end) is int for row in documents.rows for end in row)


def test_numbered_documents_stay() -> None:
    assert as_documents((0, 3, 3, 8, 8), keep_empty=True).rows == ((0, 3, 3, 8, 8),)
    rows = [[0, 3, 8], [0, 0, 8]]
    assert as_documents(np.array(rows), keep_empty=True).rows == ((0, 3, 8), (0, 0, 8))


def test_none_and_empty_batches() -> None:
    assert as_documents(None) is None
    for empty in (np.zeros((0, 3), dtype=np.int32), torch.zeros(0, 3, dtype=torch.int32)):
        assert as_documents(empty) == Documents()
        assert len(as_documents(empty)) == 0
    given = Documents([(0, 3, 3)])
    assert as_documents(given) is given


@given(st.lists(st.lists(st.integers(0, 9), max_size=8), min_size=1, max_size=3))
def test_only_neighbours_that_repeat_are_dropped(rows: list[list[int]]) -> None:
    """Whether they ascend or not: `check` refuses what is given, not what was made of it."""
    expected = [tuple(end for end, _ in groupby(row)) for row in rows]
    found = as_documents(rows).rows
    assert found == tuple(expected[:1] if len(set(expected)) == 1 else expected)


def test_values() -> None:
    documents = Documents([(0, 3, 8), (0, 8)])
    assert documents == Documents([[0, 3, 8], [0, 8]]) != Documents([(0, 8), (0, 3, 8)])
    assert documents != ((0, 3, 8), (0, 8))
    assert documents != Documents([(0, 3, 8)])
    assert repr(documents) == "Documents([[0, 3, 8], [0, 8]])"
    assert pickle.loads(pickle.dumps(documents)) == documents
    assert documents.num_bytes == 48 * 5
    with pytest.raises(ValueError, match="read-only"):
        documents.arrays[0][0] = 1
    source = np.array([0, 8])
    copied = Documents([source])
    source[1] = 9
    assert copied == Documents([(0, 8)]), "a copy"


@pytest.mark.parametrize("row", [(), (1, 8), (0, 9), (0, 5, 4), (0, 5, 4, 8)])
def test_no_boundaries(row: tuple[int, ...]) -> None:
    message = (
        "lengths must start at 0, never decrease and end at or before the sequence length 8, "
        f"got {list(row)}"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Documents([(0, 8), row]).check(8, "lengths")
    Documents([(0,), (0, 8), (0, 3, 3, 7)]).check(8)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (8, ValueError, "ends must be boundaries (D+1,) or (B, D+1), got 8"),
        ("0, 8", ValueError, "ends must be boundaries (D+1,) or (B, D+1), got '0, 8'"),
        ([[[0, 8]]], ValueError, "ends must be boundaries (D+1,) or (B, D+1), got [[[0, 8]]]"),
        (np.zeros((1, 1, 2), int), ValueError, "(B, D+1), got array([[[0, 0]]])"),
        ([0.0, 8.0], TypeError, "ends must hold integers: float64 cannot be interpreted as an"),
        ([[0.0, 8.0]], TypeError, "cannot be interpreted as an integer, got [[0.0, 8.0]]"),
        (torch.tensor([0.0, 8.0]), TypeError, "float32 cannot be interpreted as an integer"),
        ([0, [8]], TypeError, "ends cannot be read as boundaries (setting an array element with a"),
        (torch.zeros(2, device="meta"), TypeError, "as boundaries (Cannot copy out of meta tensor"),
        (torch.zeros(2).int().to_sparse(), TypeError, "as boundaries (can't convert Sparse layout"),
        ([True, False], TypeError, "bool cannot be interpreted as an integer"),
    ],
    ids=str,
)
def test_refusals(wrong: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        as_documents(wrong, name="ends")
