"""Masks and documents: what is meant by each form, and what is refused."""

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

from dtensor_ring import Mask
from dtensor_ring.planning.mask import Documents, as_documents
from tests.dense import visible


def masks(bounds: st.SearchStrategy[int]) -> st.SearchStrategy[Mask]:
    """Bands, some of them in chunks, others with a prefix."""
    band = {"left": st.none() | bounds, "right": st.sampled_from([0, None]) | bounds}
    chunk, prefix = bounds.map(lambda n: n + 1), bounds
    plain, chunked, prefixed = (
        st.builds(Mask, **band, **more) for more in ({}, {"chunk": chunk}, {"prefix": prefix})
    )
    return plain | chunked | prefixed


@pytest.mark.parametrize(
    ("mask", "seen_by_4"),
    [
        (Mask.full(), [0, 1, 2, 3, 4, 5, 6, 7]),
        (Mask.causal(), [0, 1, 2, 3, 4]),
        (Mask.sliding(0), [4]),
        (Mask.sliding(2), [2, 3, 4]),
        (Mask.local(1, 2), [3, 4, 5, 6]),
        (Mask.local(None, 1), [0, 1, 2, 3, 4, 5]),
        (Mask.local(3, None), [1, 2, 3, 4, 5, 6, 7]),
        (Mask.chunked(3), [3, 4]),
        (Mask.chunked(4), [4]),
        (Mask(None, None, chunk=3), [3, 4, 5]),
        (Mask(3, 0, chunk=4), [4]),
        (Mask(1, 0, chunk=5), [3, 4]),
        (Mask.prefix_causal(0), [0, 1, 2, 3, 4]),
        (Mask.prefix_causal(3), [0, 1, 2, 3, 4]),
        (Mask.prefix_causal(6), [0, 1, 2, 3, 4, 5]),
        (Mask(2, 0, prefix=6), [2, 3, 4, 5]),
    ],
)
def test_named_masks(mask: Mask, seen_by_4: list[int]) -> None:
    assert [key for key in range(8) if mask.sees(4, key)] == seen_by_4


@given(masks(st.integers(0, 9)))
def test_sees_what_the_dense_mask_shows(mask: Mask) -> None:
    seen = [[mask.sees(query, key) for key in range(10)] for query in range(10)]
    assert torch.equal(torch.tensor(seen), visible(mask, (10, 10), 1)[0, 0])


def test_masks_are_values() -> None:
    assert Mask(None, 0) == Mask.causal() == Mask.local(None, 0)
    assert hash(Mask.sliding(5)) == hash(Mask(5, 0))
    assert Mask.full() != Mask.causal() != Mask.chunked(4) != Mask.prefix_causal(4)
    assert Mask.chunked(4) == Mask(None, 0, chunk=4)
    assert Mask.prefix_causal(4) == Mask(None, 0, prefix=4)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"left": -1}, ValueError, "left counts tokens and is at least 0, got -1; None means"),
        ({"right": -2}, ValueError, "right counts tokens and is at least 0, got -2; None means"),
        ({"chunk": 0}, ValueError, "chunk counts tokens and is at least 1, got 0; None means"),
        ({"prefix": -1}, ValueError, "prefix counts tokens and is at least 0, got -1; None means"),
        (
            {"left": 2**63},
            ValueError,
            r"Mask left counts tokens and is at most 2\*\*63 - 1, got 922",
        ),
        ({"left": 1.5}, TypeError, "Mask left is an int or None, got float"),
        ({"right": True}, TypeError, "Mask right is an int or None, got bool"),
        ({"chunk": "4"}, TypeError, "Mask chunk is an int or None, got str"),
        ({"prefix": 2.0}, TypeError, "Mask prefix is an int or None, got float"),
        (
            {"chunk": 4, "prefix": 0},
            ValueError,
            r"a mask has chunks or a prefix, not both, got Mask\(left=None, right=0, chunk=4, pref",
        ),
    ],
)
def test_bad_bounds(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Mask(**{"left": None, "right": 0, **wrong})


# Boundaries of documents: every form comes to one value.

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
