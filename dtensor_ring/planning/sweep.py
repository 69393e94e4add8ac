"""Needs where runs hold neighbouring positions: by searching sorted segments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dtensor_ring.planning.dealing import Dealing
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.needs import Needs, Sights, source_blocks, spans_by, spans_of
from dtensor_ring.planning.rows import Rows
from dtensor_ring.planning.tile import Span
from dtensor_ring.planning.wavelet import WaveletMatrix


@dataclass(frozen=True, eq=False)
class Segments:
    """Runs of all ranks, cut where documents begin and end: arrays, in the order of positions.

    Batch rows follow one another in one long line of positions, and their documents are numbered
    through, so that one search serves all rows.
    """

    begins: np.ndarray
    ends: np.ndarray
    owners: np.ndarray
    cols: np.ndarray
    """Where in the shard of its owner the segment begins."""
    documents: np.ndarray
    in_prefix: np.ndarray
    """Whether the mask's prefix lifts its right bound here."""


def _segments(dealing: Dealing, bounds: list[np.ndarray], line: int, prefix: int) -> Segments:
    """Cut the runs at the boundaries of each row; a row takes `line` positions and documents."""
    rows = []
    for row, ends in enumerate(bounds):
        # Between two cuts all positions have one owner, one document, and one band.
        cuts = np.unique(np.concatenate([dealing.starts, ends, ends[:-1] + prefix]))
        cuts = cuts[cuts < ends[-1]]  # positions after the last boundary see nothing
        # Runs are dense: a cut belongs to the last run that starts at or before it.
        runs = np.searchsorted(dealing.starts, cuts, "right") - 1
        documents = np.searchsorted(ends, cuts, "right") - 1
        # Rows lie `line` apart, further than any lag, so no search crosses into another row.
        shift = row * line
        rows.append(
            (
                *(cuts + shift, np.append(cuts, ends[-1])[1:] + shift),
                *(dealing.owners[runs], dealing.cols[runs] + cuts - dealing.starts[runs]),
                *(documents + row * line, cuts < ends[documents] + prefix),
            )
        )
    return Segments(*map(np.concatenate, zip(*rows, strict=True)))


def _merged(segments: Segments) -> Segments:
    """Neighbours of one document and one owner as one segment."""
    # With owners that alternate, the first viewer that is not the source is the first or second.
    is_new = np.diff(segments.owners, prepend=-1) | np.diff(segments.documents, prepend=-1)
    first = np.flatnonzero(is_new)
    last = np.append(first, len(is_new))[1:] - 1
    kept = (x[first] for x in vars(segments).values())
    begins, _, *others = kept
    return Segments(begins, segments.ends[last], *others)


class SweptNeeds(Needs):
    """Each segment of keys is seen by a range of segments of queries: a search finds it.

    The time is O(n log n) for n runs and documents, whatever the number of pairs of ranks.
    """

    def __init__(self, queries: Dealing, keys: Dealing, mask: Mask, rows: Rows) -> None:
        self.world_size = len(keys.shards)
        bounds = [[np.array(row[side], dtype=np.int64) for _, row in rows] for side in (0, 1)]
        line = 1 + max(max(int(ends[-1]), len(ends)) for side in bounds for ends in side)
        # Nothing within a row is as long as its line: that is as good as unbounded, and sums fit.
        # Queries have no prefix: it widens what is seen of keys.
        self._queries = _merged(_segments(queries, bounds[0], line, 0))
        self._keys = _segments(keys, bounds[1], line, min(mask.prefix or 0, line))
        self._left = line if mask.left is None else min(mask.left, line)
        right = line if mask.right is None else min(mask.right, line)
        # Keys of a prefix are seen from any distance ahead.
        self._right = np.where(self._keys.in_prefix, line, right)
        self._begin, self._end = self._viewers()

    def _viewers(self) -> tuple[np.ndarray, np.ndarray]:
        """By segment of keys: the range of the segments of queries that see any of it."""
        queries, keys = self._queries, self._keys
        # The band: from the first segment that ends late enough to the last that begins in time.
        begin = np.searchsorted(queries.ends, keys.begins - self._right, "right")
        end = np.searchsorted(queries.begins, keys.ends - 1 + self._left, "right")
        # The document: none before its first segment, none after its last.
        begin = np.maximum(begin, np.searchsorted(queries.documents, keys.documents))
        end = np.minimum(end, np.searchsorted(queries.documents, keys.documents, "right"))
        # An empty range must stay empty, with begin = end, for the searches that use it.
        return begin, np.maximum(begin, end)

    @property
    def num_bytes(self) -> int:
        sides = (x.nbytes for side in (self._queries, self._keys) for x in vars(side).values())
        return 2 * sum(sides) + self._by_owner.nbytes + 200 * self.world_size

    def seen_by(self, rank: int) -> dict[int, Span]:
        # The segments of this rank among those that see a key are a range of its own list.
        own = np.flatnonzero(self._queries.owners == rank)
        begin, end = np.searchsorted(own, self._begin), np.searchsorted(own, self._end)
        seen = np.flatnonzero((begin < end) & (self._keys.owners != rank))
        sights = self._sights(seen, own[begin[seen]], own[end[seen] - 1]).reduced(self.world_size)
        return spans_by(sights.sources, sights)

    def seen_of(self, source: int) -> dict[int, Span]:
        sights = self._sights_of(np.flatnonzero(self._keys.owners == source))
        return spans_by(sights.viewers, sights)

    def sights(self) -> Iterator[Sights]:
        # A key has at most one sight for each rank, however many segments see it.
        num_pairs = np.minimum(self._end - self._begin, self.world_size)
        for keys in source_blocks(self._keys.owners, num_pairs):
            yield self._sights_of(keys)

    @cached_property
    def hulls(self) -> list[Span]:
        # Neighbours differ in owner, so the first that is not the source's own is one of two.
        first = self._begin + self._is_owned(self._begin)
        last = self._end - 1 - self._is_owned(self._end - 1)
        seen = np.flatnonzero((self._begin < self._end) & (first <= last))
        sights = self._sights(seen, first[seen], last[seen])
        # Larger than any column, so that an unseen source stays empty.
        firsts = np.full(self.world_size, np.iinfo(np.int64).max)
        ends = np.zeros(self.world_size, dtype=np.int64)
        np.minimum.at(firsts, sights.sources, sights.firsts)
        np.maximum.at(ends, sights.sources, sights.ends)
        return spans_of(firsts, ends)

    @cached_property
    def reaches(self) -> list[int]:
        reaches = np.zeros(self.world_size, dtype=np.int64)
        seen = np.flatnonzero(self._begin < self._end)
        begin, end, owners = self._begin[seen], self._end[seen], self._keys.owners[seen]
        ranks = WaveletMatrix(self._queries.owners, self.world_size)
        # Furthest on the ring is the highest rank below the source, a lap on, or else the highest.
        below = ranks.count_below(begin, end, owners)
        furthest = ranks.kth(begin, end, np.where(below > 0, below, end - begin) - 1)
        np.maximum.at(reaches, owners, (furthest - owners) % self.world_size)
        return reaches.tolist()

    def _is_owned(self, queries: np.ndarray) -> np.ndarray:
        """By segment of keys: whether this segment of queries is of the same rank."""
        if not self._queries.owners.size:
            return np.zeros_like(queries)
        # Empty ranges may point before the first or after the last segment.
        at = np.clip(queries, 0, len(self._queries.owners) - 1)
        return (self._queries.owners[at] == self._keys.owners).astype(np.int64)

    def _sights_of(self, keys: np.ndarray) -> Sights:
        """Columns of these segments of keys that other ranks see."""
        begin, end = self._begin[keys], self._end[keys]
        # Few pairs are written out; of many, each viewer is searched for its first and last.
        if (end - begin).sum() <= len(keys) * self.world_size:
            pairs = _expanded(keys, begin, end)
            found = self._sights(pairs[0], pairs[1], pairs[1])
        else:
            found = self._sights(*self._by_viewer(keys, begin, end))
        is_other = found.sources != found.viewers
        return Sights(*(x[is_other] for x in found)).reduced(self.world_size)

    def _by_viewer(
        self, keys: np.ndarray, begin: np.ndarray, end: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Segment of keys, and the first and last segment of queries, of each viewer that has any.

        Segments that see a key and are owned by one rank are a range of those of that rank.
        """
        num_queries = len(self._queries.owners)
        ranks = np.arange(self.world_size)[:, None] * num_queries
        first = np.searchsorted(self._by_owner, ranks + begin)
        after = np.searchsorted(self._by_owner, ranks + end)
        # Few of all pairs of viewer and key have any segment: only those go on.
        viewer, key = np.nonzero(first < after)
        first, last = first[viewer, key], after[viewer, key] - 1
        return keys[key], self._by_owner[first] % num_queries, self._by_owner[last] % num_queries

    @cached_property
    def _by_owner(self) -> np.ndarray:
        """Segments of queries by owner, then position: `owner * num_queries + index`, sorted."""
        num_queries = len(self._queries.owners)
        return np.sort(self._queries.owners * num_queries + np.arange(num_queries))

    def _sights(self, keys: np.ndarray, first: np.ndarray, last: np.ndarray) -> Sights:
        """The columns of segments of keys that the queries of a rank see, first to last of them."""
        begins, ends = self._keys.begins[keys], self._keys.ends[keys]
        # Later queries see later keys: the first query has the first column, the last the last.
        lowest = np.maximum(begins, self._queries.begins[first] - self._left)
        highest = np.minimum(ends, self._queries.ends[last] + self._right[keys])
        # Within a segment, positions and columns differ by a constant.
        to_col = self._keys.cols[keys] - begins
        sources, viewers = self._keys.owners[keys], self._queries.owners[first]
        return Sights(sources, viewers, lowest + to_col, highest + to_col)


def _expanded(
    keys: np.ndarray, begin: np.ndarray, end: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Each key next to each number of its range."""
    counts = end - begin
    numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(keys, counts), numbers + np.repeat(begin, counts)
