"""What slices refuse, in words, and numbers at the edge of what they hold."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from dtensor_ring import Mask, Slices
from dtensor_ring.planning import slice_tables
from tests.planning.test_slices import PREFIX
from tests.refusals import Refused, check_refused

ONE = [(0, 2)]
BANDS = [(None, 0)]
TYPES: Refused = {
    "query_ranges must hold integers: float64 ": lambda: Slices([(0.0, 2.0)], ONE, BANDS),
    "key_ranges must hold integers: bool ": lambda: Slices(ONE, [(False, True)], BANDS),
    "bands must hold integers: float64": lambda: Slices(ONE, ONE, [(0.5, 0)]),
    "query_ranges cannot be read as pairs": lambda: Slices([(0, 1), (0,)], ONE, BANDS),
    "by must be an int, got 0.5": lambda: PREFIX.shifted(0.5),  # type: ignore[arg-type]
    "parts must be a sequence of Slices, got [<2 slices": lambda: Slices.batched([PREFIX, None]),  # type: ignore[list-item]
    "key must be an int, got 'a'": lambda: PREFIX.sees(0, "a"),  # type: ignore[arg-type]
    "unsupported operand type(s) for |": lambda: PREFIX | [PREFIX],  # type: ignore[operator]
    "cu_seqlens must hold integers: float32": lambda: Slices.prefix(torch.tensor([0.0, 3.0]), 1),
    "mask must be a Mask, or a list of one for each document": lambda: Slices.documents(
        [0, 3], ["causal"]
    ),  # type: ignore[list-item]
    "prefix_lengths must hold integers: bool": lambda: Slices.prefix([0, 3], True),
}
VALUES: Refused = {
    "pairs of integers (N, 2) or (B, N, 2), got [(0, 1, 2)]": lambda: Slices(
        [(0, 1, 2)], ONE, BANDS
    ),
    "key_ranges must be pairs of integers": lambda: Slices(ONE, 3, BANDS),
    "of one shape, got (1, 2), (2, 2), (1, 2)": lambda: Slices(ONE, ONE * 2, BANDS),
    "query_ranges of slices must begin at 0 or later, not end before they begin": lambda: Slices(
        [(5, 3)], ONE, BANDS
    ),
    "begin and be int32, got -1 to 3": lambda: Slices(ONE, [(-1, 3)], BANDS),
    "query_ranges of slices must": lambda: Slices.of_numbers(np.array([[5, 3, 0, 1, 0, 0]])),
    "got 0 to 2147483648": lambda: Slices([(0, 2**31)], ONE, BANDS),
    "bands of slices must be int32, got -2147483648": lambda: Slices(ONE, ONE, [(0, -(2**31))]),
    "before position 0, by=0, key_by=-1, or end after int32, got queries 0 to 2": lambda: (
        PREFIX.shifted(0, -1)
    ),
    "must be as many, or one for all of them: left has 2, right has 3": lambda: (
        Slices.batched([PREFIX] * 2) | Slices.batched([PREFIX] * 3)
    ),
    "row must be from 0 to 1, got 2": lambda: Slices.batched([PREFIX] * 2).sees(0, 0, 2),
    "cu_seqlens must have a begin and never decrease, got [0, 5, 3]": lambda: Slices.documents(
        [0, 5, 3]
    ),
    "cu_seqlens must have a begin and never decrease, got []": lambda: Slices.documents([]),
    "cu_seqlens must be from 0 to 2147483647, got [-1, 3]": lambda: Slices.prefix([-1, 3], 1),
    "mask must be as many as documents in cu_seqlens, 2, or a single one, got 3": lambda: (
        Slices.documents([0, 3, 5], [Mask.full()] * 3)
    ),
    "at most 65,536, which take seconds to plan, got 1,073,741,824": lambda: Slices.documents(
        [0, 2**30], Mask.chunked(1)
    ),
    "prefix_lengths must be as many as documents, 2, or a single one, got 1": lambda: Slices.prefix(
        [0, 3, 5], [1]
    ),
    "prefix_lengths must be from 0 to 2147483647, got -1": lambda: Slices.prefix([0, 3], -1),
    "cu_seqlens has 2, prefix_lengths has 3": lambda: Slices.prefix([[0, 3]] * 2, [[1]] * 3),
    "must be disjoint, got [[1, 4], [3, 5]] in documents of cu_seqlens [0, 9]": lambda: (
        Slices.blocks([0, 9], [1, 3], [4, 5])
    ),
    "must be in one document, got [[3, 5]] in documents of cu_seqlens [0": lambda: Slices.blocks(
        [0, 4, 9], [3], [5]
    ),
    "must begin in a document, got [[0, 1]": lambda: Slices.blocks([2, 4], [0, 5], [1, 6]),
    "must not end before they begin, got [[3, 1]]": lambda: Slices.blocks([0, 9], [3], [1]),
    "begins and ends of blocks must be as many, got 1 and 0": lambda: Slices.blocks(
        [0, 9], [3], []
    ),
    "mask must be Mask.causal() or Mask.sliding(window), got Mask(": lambda: Slices.blocks(
        [0, 9], [3], [4], Mask.full()
    ),
    "mask must be a band of left and right here": lambda: Slices.blocks(
        [0, 9], [3], [4], Mask.chunked(2)
    ),
    "window must be from 0 to ": lambda: Slices.global_tokens([0, 9], 1, -1),
    "key_cu_seqlens must be as many as boundaries in cu_seqlens, 2": lambda: Slices.bottom_right(
        [0, 3], [0, 3, 5]
    ),
    "begins and ends must be of one shape": lambda: Slices.per_query([0, 1], [1]),
    "lengths must be from 0 to 2147483647, got [1, -1]": lambda: Slices.block_causal([1, -1]),
    "the sum of lengths must be from 0": lambda: Slices.block_diffusion([2**30, 2**30]),
    "num_earlier must be from 0": lambda: Slices.block_causal([1], -1),
    "parents must come before their children in the sequence, as keys": lambda: Slices.tree(
        [-1, 2, 0], [1, 1, 1]
    ),
    "and a tree whose nodes are in the order of a walk": lambda: Slices.tree(
        [-1, -1, *range(1000)], [1] * 1002
    ),
    "parents and lengths must be as many, got 1 and 2": lambda: Slices.tree([-1], [1, 1]),
    "parents must be from -1 to": lambda: Slices.tree([-2], [1]),
    "prefix_lengths must be of one row, got 2": lambda: Slices.shared_prefix(
        [[1], [2]], [[1], [2]]
    ),
    "prefix_lengths must be as many as rows of answer_lengths, 1": lambda: Slices.shared_prefix(
        [1, 2], [[1]]
    ),
}


def test_refusals() -> None:
    check_refused({TypeError: TYPES, ValueError: VALUES})


UNFIT = {
    "late queries": (
        PREFIX,
        (4, 5),
        "slices must end at or before the sequence length 4 (keys 5), got queries 2 to 5, keys 0",
    ),
    "late keys": (
        Slices.batched([Slices.block_causal([2]), PREFIX]),
        (5, 4),
        "(keys 4), got queries 2 to 5, keys 0 to 5, left None, right 0 in batch row 1",
    ),
    "overlap": (
        PREFIX | Slices([(4, 6)], [(3, 5)], [(None, -1)]),
        (6, 6),
        "slices must be disjoint, got queries 2 to 5, keys 0 to 5, left None, right 0 and queries "
        "4 to 6, keys 3 to 5, left None, right -1 for all batch rows: query 4 sees key 3 in both",
    ),
}


@pytest.mark.parametrize("case", UNFIT.values(), ids=list(UNFIT))
def test_slices_that_do_not_fit(case: tuple[Slices, tuple[int, int], str]) -> None:
    given, seq_lens, message = case
    for _ in range(2):  # what was found is kept
        with pytest.raises(ValueError, match=re.escape(message)):
            given.check(*seq_lens)


def test_too_many_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_tables, "MAX_SLICES", 5)
    Slices.batched([PREFIX, PREFIX]).check(5, 5)
    with pytest.raises(ValueError, match=r"slices of all rows must be at most 5, .* got 6"):
        Slices.batched([PREFIX] * 3).check(5, 5)


def test_numbers_never_wrap() -> None:
    far = Slices([(0, 5)], [(0, 5)], [(1 - 2**31, None)]).shifted(0, key_by=10)
    assert not far.sees(0, 10)
    assert not Slices.of_numbers(far.numbers).sees(0, 10)
    with pytest.raises(ValueError, match="end after int32"):
        Slices.block_causal([4]).shifted(2**31 - 3)
    with pytest.raises(ValueError, match="int32"):
        Slices(np.array([[0, 2**64 - 1]], dtype=np.uint64), [(0, 5)], [(0, 0)])
