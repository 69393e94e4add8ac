"""What slices refuse, in words, and numbers at the edge of what they hold."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dtensor_ring import Mask, Slices
from dtensor_ring.planning import slice_tables
from tests.planning.test_slices import PREFIX

ONE = [(0, 2)]
BANDS = [(None, 0)]
IMPOSSIBLE: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "floats": (
        lambda: Slices([(0.0, 2.0)], ONE, BANDS),
        TypeError,
        "query_ranges must hold integers: float64 ",
    ),
    "bools": (
        lambda: Slices(ONE, [(False, True)], BANDS),
        TypeError,
        "key_ranges must hold integers: bool ",
    ),
    "float bands": (
        lambda: Slices(ONE, ONE, [(0.5, 0)]),
        TypeError,
        "bands must hold integers: float64",
    ),
    "no pairs": (
        lambda: Slices([(0, 1, 2)], ONE, BANDS),
        ValueError,
        "pairs of integers (N, 2) or (B, N, 2), got [(0, 1, 2)]",
    ),
    "a number": (lambda: Slices(ONE, 3, BANDS), ValueError, "key_ranges must be pairs of integers"),
    "ragged": (
        lambda: Slices([(0, 1), (0,)], ONE, BANDS),
        TypeError,
        "query_ranges cannot be read as pairs",
    ),
    "other lengths": (
        lambda: Slices(ONE, ONE * 2, BANDS),
        ValueError,
        "of one shape, got (1, 2), (2, 2), (1, 2)",
    ),
    "decreasing": (
        lambda: Slices([(5, 3)], ONE, BANDS),
        ValueError,
        "query_ranges of slices must begin at 0 or later, not end before they begin",
    ),
    "negative": (
        lambda: Slices(ONE, [(-1, 3)], BANDS),
        ValueError,
        "begin and be int32, got -1 to 3",
    ),
    "decreasing numbers": (
        lambda: Slices.of_numbers(np.array([[5, 3, 0, 1, 0, 0]])),
        ValueError,
        "query_ranges of slices must",
    ),
    "too far": (lambda: Slices([(0, 2**31)], ONE, BANDS), ValueError, "got 0 to 2147483648"),
    "far band": (
        lambda: Slices(ONE, ONE, [(0, -(2**31))]),
        ValueError,
        "bands of slices must be int32, got -2147483648",
    ),
    "shifted before 0": (
        lambda: PREFIX.shifted(0, -1),
        ValueError,
        "before position 0, by=0, key_by=-1, or end after int32, got queries 0 to 2, keys 0 to 2",
    ),
    "shifted by a half": (lambda: PREFIX.shifted(0.5), TypeError, "by must be an int, got 0.5"),  # type: ignore[arg-type]
    "other rows": (
        lambda: Slices.batched([PREFIX] * 2) | Slices.batched([PREFIX] * 3),
        ValueError,
        "must be as many, or one for all of them: left has 2, right has 3",
    ),
    "no parts": (
        lambda: Slices.batched([PREFIX, None]),
        TypeError,
        "parts must be a sequence of Slices, got [<2 slices",
    ),  # type: ignore[list-item]
    "no row": (
        lambda: Slices.batched([PREFIX] * 2).sees(0, 0, 2),
        ValueError,
        "row must be from 0 to 1, got 2",
    ),
    "no position": (lambda: PREFIX.sees(0, "a"), TypeError, "key must be an int, got 'a'"),  # type: ignore[arg-type]
    "other type": (lambda: PREFIX | [PREFIX], TypeError, "unsupported operand type(s) for |"),  # type: ignore[operator]
    # Builders.
    "falling bounds": (
        lambda: Slices.documents([0, 5, 3]),
        ValueError,
        "cu_seqlens must have a begin and never decrease, got [0, 5, 3]",
    ),
    "no bounds": (
        lambda: Slices.documents([]),
        ValueError,
        "cu_seqlens must have a begin and never decrease, got []",
    ),
    "negative bounds": (
        lambda: Slices.prefix([-1, 3], 1),
        ValueError,
        "cu_seqlens must be from 0 to 2147483647, got [-1, 3]",
    ),
    "float bounds": (
        lambda: Slices.prefix(torch.tensor([0.0, 3.0]), 1),
        TypeError,
        "cu_seqlens must hold integers: float32",
    ),
    "fewer masks": (
        lambda: Slices.documents([0, 3, 5], [Mask.full()] * 3),
        ValueError,
        "mask must be as many as documents in cu_seqlens, 2, or a single one, got 3",
    ),
    "no masks": (
        lambda: Slices.documents([0, 3], ["causal"]),
        TypeError,
        "mask must be a Mask, or a list of one for each document",
    ),  # type: ignore[list-item]
    "many chunks": (
        lambda: Slices.documents([0, 2**30], Mask.chunked(1)),
        ValueError,
        "at most 65,536, which take seconds to plan, got 1,073,741,824",
    ),
    "fewer prefixes": (
        lambda: Slices.prefix([0, 3, 5], [1]),
        ValueError,
        "prefix_lengths must be as many as documents, 2, or a single one, got 1",
    ),
    "negative prefix": (
        lambda: Slices.prefix([0, 3], -1),
        ValueError,
        "prefix_lengths must be from 0 to 2147483647, got -1",
    ),
    "true prefix": (
        lambda: Slices.prefix([0, 3], True),
        TypeError,
        "prefix_lengths must hold integers: bool",
    ),
    "rows of prefixes": (
        lambda: Slices.prefix([[0, 3]] * 2, [[1]] * 3),
        ValueError,
        "cu_seqlens has 2, prefix_lengths has 3",
    ),
    "blocks overlap": (
        lambda: Slices.blocks([0, 9], [1, 3], [4, 5]),
        ValueError,
        "must be disjoint, got [[1, 4], [3, 5]] in documents of cu_seqlens [0, 9]",
    ),
    "a block across": (
        lambda: Slices.blocks([0, 4, 9], [3], [5]),
        ValueError,
        "must be in one document, got [[3, 5]] in documents of cu_seqlens [0",
    ),
    "a block outside": (
        lambda: Slices.blocks([2, 4], [0, 5], [1, 6]),
        ValueError,
        "must begin in a document, got [[0, 1]",
    ),
    "a block backwards": (
        lambda: Slices.blocks([0, 9], [3], [1]),
        ValueError,
        "must not end before they begin, got [[3, 1]]",
    ),
    "half a block": (
        lambda: Slices.blocks([0, 9], [3], []),
        ValueError,
        "begins and ends of blocks must be as many, got 1 and 0",
    ),
    "other block mask": (
        lambda: Slices.blocks([0, 9], [3], [4], Mask.full()),
        ValueError,
        "mask must be Mask.causal() or Mask.sliding(window), got Mask(",
    ),
    "chunked blocks": (
        lambda: Slices.blocks([0, 9], [3], [4], Mask.chunked(2)),
        ValueError,
        "mask must be a band of left and right here",
    ),
    "no window": (
        lambda: Slices.global_tokens([0, 9], 1, -1),
        ValueError,
        "window must be from 0 to ",
    ),
    "other key bounds": (
        lambda: Slices.bottom_right([0, 3], [0, 3, 5]),
        ValueError,
        "key_cu_seqlens must be as many as boundaries in cu_seqlens, 2",
    ),
    "other ends": (
        lambda: Slices.per_query([0, 1], [1]),
        ValueError,
        "begins and ends must be of one shape",
    ),
    "negative length": (
        lambda: Slices.block_causal([1, -1]),
        ValueError,
        "lengths must be from 0 to 2147483647, got [1, -1]",
    ),
    "long parts": (
        lambda: Slices.block_diffusion([2**30, 2**30]),
        ValueError,
        "the sum of lengths must be from 0",
    ),
    "no reach": (lambda: Slices.block_causal([1], -1), ValueError, "num_earlier must be from 0"),
    "late parent": (
        lambda: Slices.tree([-1, 2, 0], [1, 1, 1]),
        ValueError,
        "parents must come before their children in the sequence, as keys",
    ),
    "two chains in turn": (
        lambda: Slices.tree([-1, -1, *range(1000)], [1] * 1002),
        ValueError,
        "and a tree whose nodes are in the order of a walk",
    ),
    "fewer parents": (
        lambda: Slices.tree([-1], [1, 1]),
        ValueError,
        "parents and lengths must be as many, got 1 and 2",
    ),
    "negative parent": (lambda: Slices.tree([-2], [1]), ValueError, "parents must be from -1 to"),
    "rows of questions": (
        lambda: Slices.shared_prefix([[1], [2]], [[1], [2]]),
        ValueError,
        "prefix_lengths must be of one row, got 2",
    ),
    "fewer questions": (
        lambda: Slices.shared_prefix([1, 2], [[1]]),
        ValueError,
        "prefix_lengths must be as many as rows of answer_lengths, 1",
    ),
}


@pytest.mark.parametrize("case", IMPOSSIBLE.values(), ids=list(IMPOSSIBLE))
def test_refusals(case: tuple[Callable[[], Any], type[Exception], str]) -> None:
    make, error, message = case
    with pytest.raises(error, match=re.escape(message)):
        make()


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
