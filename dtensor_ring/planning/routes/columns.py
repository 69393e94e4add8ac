"""Columns of a shard: the keys that travel together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from operator import itemgetter

import numpy as np

from dtensor_ring.planning.values.span import Span, length, moved


@dataclass(frozen=True)
class Cols:
    """Columns of a shard: ascending spans, none of which is empty, overlaps or touches the next.

    A packet of columns has them side by side, without what lies between the spans.

    >>> cols = Cols(((0, 4), (10, 12)))
    >>> len(cols), cols.packed((10, 11))
    (6, (4, 5))
    """

    spans: tuple[Span, ...] = ()

    @classmethod
    def union(cls, spans: Iterable[Span]) -> Cols:
        """All columns of the spans.

        >>> Cols.union([(3, 5), (0, 1), (4, 8), (8, 9), (2, 2)])
        Cols(spans=((0, 1), (3, 9)))
        """
        joined: list[Span] = []
        for first, end in sorted(span for span in spans if length(span)):
            if joined and first <= joined[-1][1]:
                first, before = joined.pop()
                end = max(end, before)
            joined.append((first, end))
        return cls(tuple(joined))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each span begins among the packed columns, and the number of columns at last."""
        return tuple(accumulate(map(length, self.spans), initial=0))

    def packed(self, span: Span) -> Span:
        """Where columns that lie within one of the spans are among the packed columns."""
        number = bisect_right(self.spans, span[0], key=itemgetter(0)) - 1
        return moved(span, self.offsets[number] - self.spans[number][0])

    def within(self, whole: Cols) -> Cols:
        """These columns, as they are counted among the packed columns of `whole`, which has them.

        >>> Cols(((10, 12),)).within(Cols(((0, 4), (10, 14))))
        Cols(spans=((4, 6),))
        """
        if whole not in self._within:
            # Kept, as what is made of columns is kept for as long as they live.
            self._within[whole] = Cols.union(map(whole.packed, self.spans))
        return self._within[whole]

    @cached_property
    def _within(self) -> dict[Cols, Cols]:
        return {}

    @cached_property
    def _hash(self) -> int:
        return hash(self.spans)

    def __hash__(self) -> int:
        return self._hash  # messages are looked up by their columns in every call

    def __len__(self) -> int:
        return self.offsets[-1]


def cols_by(ids: np.ndarray, firsts: np.ndarray, ends: np.ndarray) -> dict[int, Cols]:
    """The columns of each id, whose entries follow one another, united."""
    spans = list(zip(firsts.tolist(), ends.tolist(), strict=True))
    begins = np.flatnonzero(np.diff(ids, prepend=-1))
    bounds = pairwise([*begins.tolist(), len(spans)])
    return {
        number: Cols(tuple(spans[begin:end]))
        for number, (begin, end) in zip(ids[begins].tolist(), bounds, strict=True)
    }
