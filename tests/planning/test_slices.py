"""Slices: what is drawn, built, put together, and refused."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_ring import Mask, Slices
from dtensor_ring.planning import slice_tables
from dtensor_ring.planning import slices as overlap
from dtensor_ring.planning.mask import as_documents
from dtensor_ring.planning.plan import checked_slices
from dtensor_ring.planning.slices import LARGEST, UNBOUNDED, find_overlap, rows_of
from tests.drawn import examples
from tests.planning.builders import KINDS, Built, check
from tests.planning.test_plan import cross_rings, rings
from tests.refusals import Refused, check_refused
from tests.rings import Ring
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


# What slices refuse, in words, and numbers at the edge of what they hold.

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


# Builders of slices, against what their masks say of each pair.


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


# Slices that have a pair in common, against all pairs written out.

OVERLAP_LENS = 9, 12
RANGES = [st.tuples(*[st.integers(0, x)] * 2).map(sorted) for x in OVERLAP_LENS]
BOUNDS = st.just(UNBOUNDED) | st.integers(-12, 12)
ROWS = st.tuples(*RANGES, BOUNDS, BOUNDS).map(lambda x: (*x[0], *x[1], *x[2:]))


@settings(deadline=None, max_examples=examples(400))
@given(st.lists(ROWS, max_size=6), st.integers(1, 4))
def test_overlaps_are_found(rows: list[tuple[int, ...]], chunk: int) -> None:
    table = np.array(rows, dtype=np.int64).reshape(-1, 6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "CHUNK", chunk)
        found = find_overlap(table)
    if found is None:
        assert shown(table, OVERLAP_LENS).max(initial=0) <= 1
        return
    for row in (found.first, found.second):
        assert row in rows
        assert shown(np.array([row]), OVERLAP_LENS)[found.query, found.key] == 1
    assert found.first != found.second or rows.count(found.first) > 1


STAIRS = [(8 * i, 8 * i + 8) for i in range(256)]
LARGE = {
    # By queries, by keys and by lags: each of these is easy in one way only.
    "documents": Slices.documents(range(0, 80008, 8), Mask.causal()),
    "rows": Slices(STAIRS, [(0, 2048)] * 256, [(None, None)] * 256),
    "columns": Slices([(0, 2048)] * 256, STAIRS, [(None, None)] * 256),
    "diagonals": Slices(
        [(0, 2048)] * 256, [(0, 2048)] * 256, [(3 * i, -3 * i) for i in range(256)]
    ),
    "squares": Slices.of_tables(
        [[(*q, *k, UNBOUNDED, UNBOUNDED) for q in STAIRS[:64] for k in STAIRS[:64]]]
    ),
}


@pytest.mark.parametrize("slices", LARGE.values(), ids=list(LARGE))
def test_few_pairs_of_slices_are_compared(slices: Slices, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is bounded by the neighbours in one direction, not by all pairs."""
    (table,) = slices.tables
    monkeypatch.setattr(overlap, "MAX_PAIRS", 64 * len(table))
    assert find_overlap(table) is None
    more = np.append(table, table[-1:] + np.array([0, 1, 0, 1, 0, 0]), axis=0)
    assert find_overlap(more) is not None


def test_slices_that_are_everywhere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "MAX_PAIRS", 100)
    message = r"4,096 of them .* in common in \d+,\d+ ways, of which 100 can be looked at"
    with pytest.raises(ValueError, match=message):
        find_overlap(LARGE["squares"].tables[0])


# Masks and documents as slices, against what they show.


@settings(deadline=None, max_examples=examples(120))
@given(rings() | cross_rings())
def test_slices_show_what_is_visible(ring: Ring) -> None:
    documents, key_documents = (
        as_documents(rows, keep_empty=True) for rows in (ring.documents, ring.key_documents)
    )
    found = checked_slices(
        *(ring.mask, ring.world_size, ring.seq_lens, documents, key_documents, ring.slices)
    )
    expected = ring.visible().numpy()
    for batch, table in rows_of(found):
        for row in range(ring.batch) if batch is None else [batch]:
            assert np.array_equal(shown(table, ring.seq_lens), expected[row])
