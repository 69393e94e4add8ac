"""The work of an attention by position, and partitions of the sequence into equal work."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dtensor_ring.planning.layout import Layout, Run, shard_length
from dtensor_ring.planning.ranges import Span, expanded
from dtensor_ring.planning.slice_tables import stacked
from dtensor_ring.planning.slices import Slices


def visible_pairs(slices: Slices, queries: Span) -> int:
    """Return the number of pairs that a range of queries sees, summed over the batch rows."""
    table = exact_table(slices)
    begins, ends = (np.full(len(table), x, dtype=table.dtype) for x in queries)
    return int(areas(table, begins, ends).sum())


# Below this number of pairs, sums, 16 times sums, and terms of the closed form are exact in int64.
EXACT = 2**58


def exact_table(slices: Slices) -> np.ndarray:
    """Return all rows as one table `(N, 6)`; it has Python integers if int64 is too small."""
    table = stacked(slices.tables)
    num_queries, num_keys = (int(table[:, column].max(initial=0)) for column in (1, 3))
    is_exact = len(slices) * num_queries * num_keys < EXACT and num_queries + num_keys < 2**31
    return table if is_exact else table.astype(object)


def areas(table: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return for each slice the number of pairs that its queries in `[begins, ends)` see.

    Query q sees the keys of `[k_begin, k_end)` in `[q - left, q + right + 1)`. With
    h(x) = max(0, x) their number is h(q + right + 1 - k_begin) - h(q + right + 1 - k_end) -
    h(q - left - k_begin) + h(q - left - k_end). A sum of h over consecutive numbers is a
    difference of triangle numbers.
    """
    q_begin, q_end, k_begin, k_end, left, right = table.T
    begins = np.maximum(begins, q_begin)
    ends = np.maximum(begins, np.minimum(ends, q_end))
    # Clip bounds to the lags of the slice, as the square of `UNBOUNDED` would overflow.
    least, most = q_begin - k_end + 1, q_end - 1 - k_begin
    back = np.minimum(np.maximum(left, least - 1), most)
    ahead = np.minimum(np.maximum(right, -most - 1), -least)
    return (
        _summed(begins, ends, ahead + 1 - k_begin)
        - _summed(begins, ends, ahead + 1 - k_end)
        - _summed(begins, ends, -back - k_begin)
        + _summed(begins, ends, -back - k_end)
    )


def _summed(begins: np.ndarray, ends: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Return the sum of max(0, q + shift) over the queries q of each range."""
    return _triangle(ends + shift) - _triangle(begins + shift)


def _triangle(x: np.ndarray) -> np.ndarray:
    """Return 1 + 2 + ... + (x - 1)."""
    x = np.maximum(x, 0)
    return x * (x - 1) // 2


class Units(NamedTuple):
    """Ranges of positions, in order, that see nothing of one another and cover the sequence.

    Attributes:
        begins: first position of each unit.
        ends: position after the last one of each unit.
        areas: number of pairs that the queries of each unit see, over all batch rows; 0 outside
            of all slices.
    """

    begins: np.ndarray
    ends: np.ndarray
    areas: np.ndarray


class AttentionWork:
    """The slices of all batch rows in one table, which answers what ranges of queries see.

    Attributes:
        table: the slices with visible pairs, sorted by query begin; see `exact_table`.
        total: number of all visible pairs.
        num_rows: number of batch rows in the slices.
    """

    def __init__(self, slices: Slices) -> None:
        table, self.num_rows = exact_table(slices), len(slices)
        table = table[np.argsort(table[:, 0].astype(np.int64), kind="stable")]
        found = areas(table, table[:, 0], table[:, 1])
        self.table, self._areas = table[found > 0], found[found > 0]
        self.total = int(found.sum())
        self._begins = self.table[:, 0].astype(np.int64)
        # Slices may end in any order, but a search needs ascending ends.
        self._ends = np.maximum.accumulate(self.table[:, 1].astype(np.int64))

    def areas(self, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return the number of pairs that each range of queries sees."""
        ranges, slices = self._overlaps(begins, ends)
        result = np.zeros(len(begins), dtype=self.table.dtype)
        np.add.at(result, ranges, areas(self.table[slices], begins[ranges], ends[ranges]))
        return result

    def seen(self, begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return ranges of queries, their slices, and the begins and ends of the keys they see."""
        ranges, slices = self._overlaps(begins, ends)
        q_begin, q_end, k_begin, k_end, left, right = self.table[slices].T
        q_begin, q_end = np.maximum(begins[ranges], q_begin), np.minimum(ends[ranges], q_end)
        # Later queries see later keys: the first query sees the first key, the last the last.
        first, end = np.maximum(k_begin, q_begin - left), np.minimum(k_end, q_end + right)
        kept = np.flatnonzero((q_begin < q_end) & (first < end))
        return ranges[kept], slices[kept], *(x[kept].astype(np.int64) for x in (first, end))

    def units(self, seq_len: int, block: int) -> Units:
        """Return the units of the sequence; short neighbours in the same block are joined."""
        bounds, found = self._parts(seq_len)
        starts, is_long = bounds[:-1], np.diff(bounds) >= block
        # Join neighbours shorter than a block that begin in the same block of the sequence.
        is_new = (starts[1:] // block != starts[:-1] // block) | is_long[1:] | is_long[:-1]
        first = np.flatnonzero(np.append(True, is_new))[: len(starts)]
        areas_of = np.add.reduceat(found, first) if len(first) else found
        return Units(starts[first], bounds[np.append(first[1:], -1)][: len(first)], areas_of)

    def cuts(self, units: Units, num_parts: np.ndarray) -> list[np.ndarray]:
        """Return for each unit the edges of parts of equal area: `num_parts + 1` positions."""
        of, part = expanded(np.zeros_like(num_parts), num_parts + 1)
        # Divide first, as the product of an area and a number of parts might overflow.
        share, rest = units.areas[of] // num_parts[of], units.areas[of] % num_parts[of]
        goals = share * part + rest * part // num_parts[of]
        begins, low, high = (x[of] for x in (units.begins, units.begins, units.ends))
        # Bisect all edges at once for the first position with enough area before it.
        while (low < high).any():
            middle = (low + high) // 2
            is_less = (self.areas(begins, middle) < goals) & (low < high)
            low, high = np.where(is_less, middle + 1, low), np.where(is_less, high, middle)
        low = np.where(part == num_parts[of], units.ends[of], low)  # the last part ends the unit
        return np.split(low, np.cumsum(num_parts + 1)[:-1])

    def _overlaps(self, begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return pairs (range, slice): for each range, all slices from its first to its last."""
        first = np.searchsorted(self._ends, begins, "right")
        return expanded(first, np.searchsorted(self._begins, ends, "left"))

    def _parts(self, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the bounds of connected parts of the sequence and of gaps, and their areas."""
        q_begin, q_end, k_begin, k_end, left, right = self.table.T
        begins = np.minimum(q_begin, np.maximum(k_begin, q_begin - left)).astype(np.int64)
        ends = np.maximum(q_end, np.minimum(k_end, q_end + right)).astype(np.int64)
        order = np.argsort(begins, kind="stable")
        begins, ends = begins[order], np.maximum.accumulate(ends[order])
        # A part begins where all earlier slices have ended.
        first = np.flatnonzero(np.append(True, begins[1:] >= ends[:-1]))[: len(begins)]
        last = np.append(first[1:], len(begins))[: len(first)] - 1
        bounds = np.unique(np.concatenate([[0, seq_len], begins[first], ends[last]]))
        found = np.zeros(len(bounds) - 1, dtype=self.table.dtype)
        if len(first):
            at = np.searchsorted(bounds, begins[first])
            found[at] = np.add.reduceat(self._areas[order], first)
        return bounds, found


class Partition(NamedTuple):
    """The pieces of a sequence, in the order of positions. Adjacent pieces are on different ranks.

    Attributes:
        begins: first position of each piece.
        ends: position after the last one of each piece.
        owners: the rank that holds each piece.
    """

    begins: np.ndarray
    ends: np.ndarray
    owners: np.ndarray

    @classmethod
    def of(cls, pieces: list[tuple[int, int, int]]) -> Partition:
        """Build a partition from (begin, end, owner) in any order; empty pieces are dropped.

        >>> Partition.of([(4, 6, 0), (0, 2, 1), (2, 4, 1), (2, 2, 0)]).ends
        array([4, 6])
        """
        filled = sorted(piece for piece in pieces if piece[0] < piece[1])
        begins, ends, owners = np.array(filled, dtype=np.int64).reshape(-1, 3).T
        is_other = owners[1:] != owners[:-1]
        first, last = (np.flatnonzero(np.insert(is_other, at, True)) for at in (0, len(is_other)))
        return (
            cls(begins[first], ends[last], owners[first]) if filled else cls(begins, ends, owners)
        )

    @classmethod
    def of_layout(cls, layout: Layout, world_size: int, seq_len: int) -> Partition:
        """Build the partition of a layout whose runs have stride 1."""
        return cls.of(
            [
                (run.start, run.start + run.length, rank)
                for rank in range(world_size)
                for run in layout.runs(rank, world_size, seq_len)
            ]
        )

    @property
    def max_runs(self) -> int:
        """The largest number of pieces that a rank holds."""
        return int(np.bincount(self.owners, minlength=1).max())

    def runs(self, world_size: int) -> tuple[tuple[Run, ...], ...]:
        """Return the runs of each rank."""
        runs: list[list[Run]] = [[] for _ in range(world_size)]
        for begin, end, owner in np.stack(self, axis=1).tolist():
            runs[owner].append(Run(begin, end - begin))
        return tuple(map(tuple, runs))


# Fraction of a shard (1/64) filled last, in the order of positions, so that all shards end up full.
RESERVE = 64

# Area per token is compared in 16ths. Integers make the result the same on every machine.
FINE = 16

# A part above 19/20 of a shard leaves its rank no room for other units to balance it.
FULLEST = 20

# The largest number of entries compared to find neighbouring ranks for the parts of a unit.
MAX_CANDIDATES = 2**20


class Packer:
    """Assign units to ranks so that areas are even and each rank gets its number of tokens."""

    def __init__(
        self, work: AttentionWork, world_size: int, seq_len: int, reserve: int = RESERVE
    ) -> None:
        self._work, self._world_size = work, world_size
        # Rounded up, so that the means of all ranks hold all pairs.
        self._mean = -(-work.total // world_size)
        full = np.array([shard_length(rank, world_size, seq_len) for rank in range(world_size)])
        kept = -(-full // reserve) if reserve else np.zeros_like(full)
        self._room, self._kept = full - kept, kept.tolist()
        self._loads = [0] * world_size
        self._pieces: list[tuple[int, int, int]] = []
        self._left: list[tuple[int, int]] = []

    def pack_parts(self, units: Units, num_parts: np.ndarray) -> None:
        """Assign parts of equal area to neighbours on the ring, beginning with the largest unit.

        A part sees keys of the ranks just before its own, so waits are short and few tokens travel.
        If a part is too long for a shard, parts hold an early and a late piece each, as in zigzag.
        """
        if not len(num_parts):
            return
        edges = self._work.cuts(units, num_parts)
        for index in np.lexsort((units.begins, -units.areas)).tolist():
            begin, end = int(units.begins[index]), int(units.ends[index])
            longest = max(1, int(self._room.max()))
            parts = np.stack([edges[index][:-1], edges[index][1:]], axis=1)[:, None]
            # Parts of equal area differ in length: if the longest would fill a rank, fold the unit.
            if FULLEST * (parts[..., 1] - parts[..., 0]).max() > (FULLEST - 1) * longest:
                num_folded = max(int(num_parts[index]), -((begin - end) // longest))
                parts = _folded(begin, end, min(num_folded, self._world_size))
            if not self._place_parts(parts):
                self._left.append((begin, end))

    def pack_units(self, units: Units) -> None:
        """Assign each unit to one rank, beginning with the largest area per token.

        A unit goes to the rank that lacks the most area per token, which evens out the ranks.
        """
        densities = FINE * units.areas // (units.ends - units.begins)
        lacks = np.array([self._lack(rank) for rank in range(self._world_size)], densities.dtype)
        # Below what any rank can lack, so that a rank without room is never the greatest.
        lowest = -FINE * self._work.total - 1
        order = np.lexsort((units.begins, -densities))
        for begin, end, area in np.stack(units, axis=1)[order].tolist():
            rank = int(np.where(self._room >= end - begin, lacks, lowest).argmax())
            if self._room[rank] < end - begin:
                self._left.append((begin, end))
                continue
            self._assign(begin, end, rank, area)
            lacks[rank] = self._lack(rank)

    def _lack(self, rank: int) -> int:
        """Return the area that a rank lacks, per token that it lacks, in units of 1/`FINE`."""
        num_tokens = max(1, int(self._room[rank]) + self._kept[rank])
        return FINE * (self._mean - self._loads[rank]) // num_tokens

    def partition(self) -> Partition:
        """Return all pieces. Units left over fill rank after rank, in the order of positions."""
        rooms = [x + y for x, y in zip(self._room.tolist(), self._kept, strict=True)]
        rank = 0
        for begin, end in sorted(self._left):
            while begin < end:
                # A unit may be longer than the room of a rank, and then goes on at the next one.
                while not rooms[rank]:
                    rank += 1
                length = min(end - begin, rooms[rank])
                rooms[rank] -= length
                self._pieces.append((begin, begin + length, rank))
                begin += length
        return Partition.of(self._pieces)

    def _place_parts(self, parts: np.ndarray) -> bool:
        """Assign parts `(M, pieces, 2)` to the least busy neighbours; return whether they fit."""
        num_parts, num_pieces, _ = parts.shape
        lengths = (parts[..., 1] - parts[..., 0]).sum(1)
        begins, ends = parts.reshape(-1, 2).T
        of_parts = self._work.areas(begins, ends).reshape(num_parts, num_pieces)
        # Of thousands of ranks only every n-th is tried as the first, or the table would be large.
        starts = np.arange(0, self._world_size, -(-self._world_size * num_parts // MAX_CANDIDATES))
        candidates = (starts[:, None] + np.arange(num_parts)) % self._world_size
        fits = np.flatnonzero((self._room[candidates] >= lengths).all(1))
        if not fits.size:
            return False
        # The busiest of its ranks decides for a candidate, as the others wait for it.
        loads = (np.array(self._loads, of_parts.dtype)[candidates[fits]] + of_parts.sum(1)).max(1)
        ranks = candidates[fits[np.argmin(loads)]]
        for rank, part, areas in zip(
            ranks.tolist(), parts.tolist(), of_parts.tolist(), strict=True
        ):
            for (begin, end), area in zip(part, areas, strict=True):
                self._assign(begin, end, rank, area)
        return True

    def _assign(self, begin: int, end: int, rank: int, area: int) -> None:
        self._room[rank] -= end - begin
        self._loads[rank] += area
        self._pieces.append((begin, end, rank))


def _folded(begin: int, end: int, num_parts: int) -> np.ndarray:
    """Return parts of equal length with an early and a late piece each, `(M, 2, 2)`."""
    # Eight positions in two parts: 1 1 0 0 0 0 1 1.
    edges = begin + (end - begin) * np.arange(2 * num_parts + 1) // (2 * num_parts)
    pieces = np.stack([edges[:-1], edges[1:]], axis=1)
    # The last rank gets the latest piece. Ranks all around the ring see early pieces, only the next
    # ones see late pieces, so packets shrink as they travel.
    return np.stack([pieces[num_parts - 1 :: -1], pieces[num_parts:]], axis=1)
