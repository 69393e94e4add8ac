"""Random slices of each builder, with the definition of what they show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from dtensor_ring import Mask, Slices
from tests.slices import shown

LARGEST = 28
"""Positions that the boundaries below come to."""

Sees = Callable[[int, int], bool]


class Built(NamedTuple):
    """Slices of one batch row, and the definition of what it shows."""

    slices: Slices
    seq_lens: tuple[int, int]
    sees: Sees


def check(built: Built) -> None:
    """Each pair that is seen is in one slice, others are in none."""
    (table,) = built.slices.tables
    built.slices.check(*built.seq_lens)
    rows, cols = map(range, built.seq_lens)
    expected = [[int(built.sees(query, key)) for key in cols] for query in rows]
    assert np.array_equal(shown(table, built.seq_lens), expected)


def part_of(bounds: Sequence[int], position: int) -> int:
    """The part between boundaries that a position is in, negative outside of all."""
    parts = pairwise(bounds)
    return next(
        (i for i, (begin, end) in enumerate(parts) if begin <= position < end), -position - 1
    )


def begin_of(bounds: Sequence[int], position: int) -> int:
    return bounds[part_of(bounds, position)]


def in_documents(bounds: Sequence[int], sees: Sees) -> Sees:
    """A definition that holds within documents."""

    def both(query: int, key: int) -> bool:
        number = part_of(bounds, query)
        return 0 <= number == part_of(bounds, key) and sees(query, key)

    return both


lengths = st.lists(st.integers(0, 5), max_size=5)
bounds = st.tuples(st.integers(0, 3), lengths).map(
    lambda x: [x[0] + sum(x[1][:i]) for i in range(len(x[1]) + 1)]
)
windows = st.none() | st.integers(0, 6)
bands = st.builds(Mask, windows, windows)
masks = (
    bands
    | st.builds(Mask, windows, windows, chunk=st.integers(1, 6))
    | st.builds(Mask, windows, windows, prefix=st.integers(0, 6))
)


@st.composite
def documents(draw: st.DrawFn) -> Built:
    ends = draw(bounds)
    number = len(ends) - 1
    each = draw(st.lists(masks, min_size=number, max_size=number))
    given = each if draw(st.booleans()) or not each else each[0]
    each = [given] * number if isinstance(given, Mask) else each

    def sees(query: int, key: int) -> bool:
        mask, begin = each[part_of(ends, query)], begin_of(ends, query)
        # Chunks count from position 0, prefixes from the begin of the document.
        begin = 0 if mask.chunk else begin
        return mask.sees(query - begin, key - begin)

    return Built(Slices.documents(ends, given), (LARGEST, LARGEST), in_documents(ends, sees))


@st.composite
def prefix(draw: st.DrawFn) -> Built:
    ends = draw(bounds)
    number = len(ends) - 1
    each = draw(st.integers(0, 7) | st.lists(st.integers(0, 7), min_size=number, max_size=number))

    def sees(query: int, key: int) -> bool:
        length = each if isinstance(each, int) else each[part_of(ends, query)]
        return key <= query or key < begin_of(ends, query) + length

    return Built(Slices.prefix(ends, each), (LARGEST, LARGEST), in_documents(ends, sees))


@st.composite
def blocks(draw: st.DrawFn) -> Built:
    ends = draw(bounds)
    left = draw(windows)
    found = []
    for begin, end in pairwise(ends):
        cuts = sorted(draw(st.lists(st.integers(begin, end), max_size=6)))
        found += zip(cuts[::2], cuts[1::2], strict=False)
    found = draw(st.permutations(found))
    begins, stops = ([block[side] for block in found] for side in (0, 1))
    mask = Mask(left, 0)

    def sees(query: int, key: int) -> bool:
        together = any(b <= query < e and b <= key < e for b, e in found)
        return together or mask.sees(query, key)

    made = Slices.blocks(ends, begins, stops, mask=mask)
    return Built(made, (LARGEST, LARGEST), in_documents(ends, sees))


@st.composite
def global_tokens(draw: st.DrawFn) -> Built:
    ends, window = draw(bounds), draw(st.integers(0, 6))
    number = len(ends) - 1
    each = draw(st.integers(0, 7) | st.lists(st.integers(0, 7), min_size=number, max_size=number))

    def sees(query: int, key: int) -> bool:
        count = each if isinstance(each, int) else each[part_of(ends, query)]
        return query - key >= 0 and (query - key <= window or key < begin_of(ends, query) + count)

    made = Slices.global_tokens(ends, each, window)
    return Built(made, (LARGEST, LARGEST), in_documents(ends, sees))


@st.composite
def bottom_right(draw: st.DrawFn) -> Built:
    ends, mask = draw(bounds), draw(bands)
    number = len(ends) - 1
    each = draw(st.lists(st.integers(0, 5), min_size=number, max_size=number))
    key_ends = [sum(each[:i]) for i in range(number + 1)]

    def sees(query: int, key: int) -> bool:
        number = part_of(ends, query)
        if number < 0 or number != part_of(key_ends, key):
            return False
        lag = query + key_ends[number + 1] - ends[number + 1] - key
        return (mask.left is None or lag <= mask.left) and (
            mask.right is None or -lag <= mask.right
        )

    return Built(Slices.bottom_right(ends, key_ends, mask), (LARGEST, LARGEST), sees)


@st.composite
def per_query(draw: st.DrawFn) -> Built:
    """Ranges that often stay or move along."""
    anywhere, step = st.integers(0, 9), st.integers(0, 1)
    rows = [(draw(anywhere), draw(anywhere))]
    for _ in range(draw(st.integers(0, 14))):
        begin, end = rows[-1]
        moved = st.tuples(step.map(begin.__add__), step.map(end.__add__))
        rows.append(draw(moved | st.tuples(anywhere, anywhere)))
    begins, ends = map(list, zip(*rows, strict=True))
    if draw(st.booleans()):
        made = Slices.per_query(begins, ends)
        return Built(made, (len(rows), LARGEST), lambda q, k: begins[q] <= k < ends[q])
    # A second range, elsewhere.
    ranges = np.array([rows, [(end + 10, begin + 10) for begin, end in rows]]).transpose(2, 1, 0)
    made = Slices.per_query(ranges[:1], ranges[1:])
    return Built(
        made,
        (len(rows), 2 * LARGEST),
        lambda q, k: begins[q] <= k < ends[q] or ends[q] + 10 <= k < begins[q] + 10,
    )


@st.composite
def block_causal(draw: st.DrawFn) -> Built:
    parts, last_hops = draw(lengths), draw(windows)
    ends = [sum(parts[:i]) for i in range(len(parts) + 1)]

    def sees(query: int, key: int) -> bool:
        mine, other = part_of(ends, query), part_of(ends, key)
        return 0 <= other <= mine and (last_hops is None or other >= mine - last_hops)

    return Built(Slices.block_causal(parts, last_hops), (LARGEST, LARGEST), sees)


@st.composite
def block_diffusion(draw: st.DrawFn) -> Built:
    parts = draw(lengths)
    half = sum(parts)
    ends = [sum(parts[:i]) for i in range(len(parts) + 1)]

    def sees(query: int, key: int) -> bool:
        mine, other = part_of(ends, query % max(half, 1)), part_of(ends, key % max(half, 1))
        if max(query, key) >= 2 * half:
            return False
        if query < half:
            return mine == other if key < half else other < mine
        return key >= half and other <= mine

    return Built(Slices.block_diffusion(parts), (52, 52), sees)


@st.composite
def tree(draw: st.DrawFn) -> Built:
    parts = draw(st.lists(st.integers(0, 4), max_size=8))
    parents = [draw(st.integers(-1, node - 1)) for node in range(len(parts))]
    ends = [sum(parts[:i]) for i in range(len(parts) + 1)]

    def sees(query: int, key: int) -> bool:
        node, other = part_of(ends, query), part_of(ends, key)
        if node < 0 or node == other:
            return node >= 0 and key <= query
        while node >= 0 and node != other:
            node = parents[node]
        return node == other

    return Built(Slices.tree(parents, parts), (33, 33), sees)


@st.composite
def shared_prefix(draw: st.DrawFn) -> Built:
    groups = draw(
        st.lists(
            st.tuples(st.integers(0, 4), st.lists(st.integers(0, 3), max_size=3)),
            min_size=1,
            max_size=3,
        )
    )
    questions, answers = [x for x, _ in groups], [x for _, x in groups]
    if len(groups) == 1 and draw(st.booleans()):
        made = Slices.shared_prefix(questions[0], answers[0])
    else:
        made = Slices.shared_prefix(questions, answers)
    whose = [
        (group, part)
        for group, (question, rest) in enumerate(groups)
        for part, length in enumerate((question, *rest))
        for _ in range(length)
    ]

    def sees(query: int, key: int) -> bool:
        if max(query, key) >= len(whose) or key > query:
            return False
        (group, part), (other_group, other) = whose[query], whose[key]
        return group == other_group and other in (0, part)

    return Built(made, (45, 45), sees)


@st.composite
def pools(draw: st.DrawFn) -> Built:
    num_tokens, size = draw(st.integers(0, LARGEST)), draw(st.integers(1, 9))

    def sees(query: int, key: int) -> bool:
        return query < num_tokens and (key + 1) * size - 1 <= query

    return Built(Slices.pools(num_tokens, size), (LARGEST, LARGEST), sees)


KINDS = (documents, prefix, blocks, global_tokens, bottom_right, per_query, pools)
KINDS += (block_causal, block_diffusion, tree, shared_prefix)
