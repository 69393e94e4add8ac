"""Where chains are cut: blocks that kernels start, next to those that have rows or keys."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtensor_ring import Contiguous, Mask
from dtensor_ring.compute.execute import LAUNCH, cut, launches, num_blocks
from dtensor_ring.compute.kernels import Launch
from dtensor_ring.planning.ranges import length
from tests.rings import Ring

SEQ_LEN = 16384


def started(launch: Launch) -> int:
    """Blocks of one head that a kernel starts which goes by the longest segment."""
    if launch.segments is None:
        return num_blocks(length((launch.rows[2].start, launch.rows[2].stop)))
    return (len(launch.segments.rows) - 1) * num_blocks(launch.segments.max_rows)


def found(documents: tuple[int, ...], seq_len: int = SEQ_LEN) -> list[Launch]:
    (plan,) = Ring(Contiguous(), 1, seq_len, Mask.causal(), (documents,)).plans()
    (step,) = plan.steps
    return [*launches(step, (1, seq_len, seq_len), has_segments=True)]


SHORT = range(0, 4096, 8)
CASES = {
    "the longest first": (0, *range(8192, 12288, 8)),
    "the longest last": (*SHORT, 12288),
    "in the middle": (*SHORT, *range(12288, SEQ_LEN, 8)),
    "two of them": (*SHORT, 8192, 12288, *range(12296, SEQ_LEN, 8)),
    "a gap is none": (*SHORT,),
}


@pytest.mark.parametrize("documents", CASES.values(), ids=list(CASES))
def test_one_long_document_among_many_short_ones(documents: tuple[int, ...]) -> None:
    """Without cuts they are tens of times as many blocks as have rows."""
    split = found(documents)
    needed = sum(num_blocks(end - start) for start, end in pairwise(documents))
    total = sum(map(started, split))
    assert total <= 1.1 * needed
    assert len(split) <= 4
    longest = max(end - start for start, end in pairwise(documents))
    whole = (len(documents) - 1) * num_blocks(longest)
    assert whole > 10 * total or longest == 8


def test_documents_of_like_lengths_are_one_launch() -> None:
    assert len(found(tuple(range(0, SEQ_LEN + 1, 64)))) == 1
    assert len(found((0, 3000, 3500, 8000, 12000, SEQ_LEN))) == 1


def test_only_what_is_seen_is_launched() -> None:
    """Tokens after the last document see nothing, and no kernel reads them."""
    (launch,) = found((0, 100, 200, 300, 400))
    assert (launch.rows[2], launch.cols[2]) == (slice(0, 400), slice(0, 400))


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 2), st.integers(0, 64)), max_size=40))
def test_each_segment_is_in_one_launch(drawn: list[tuple[int, int, int]]) -> None:
    links = [blocks for blocks, _, _ in drawn]
    gaps = [(number, longest if number else 0) for _, number, longest in drawn[1:]]
    spans = cut(links, gaps)
    assert [x for span in spans for x in range(*span)] == list(range(len(links)))
    cost = sum(_cost(links, gaps, span) for span in spans)
    assert cost <= sum(LAUNCH + x for x in links), "a launch of each is no better"
    if links:
        # Neighbours that were not joined save a launch's worth, so no more than half is lost.
        assert cost <= 2 * _cost(links, gaps, (0, len(links)))


def _cost(links: list[int], gaps: list[tuple[int, int]], span: tuple[int, int]) -> int:
    inner = gaps[span[0] : span[1] - 1]
    longest = max([*links[slice(*span)], *(blocks for _, blocks in inner)])
    return LAUNCH + longest * (length(span) + sum(number for number, _ in inner))
