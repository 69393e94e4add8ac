"""The turns of a cache: what all its layers append next, and which of them have done so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

import numpy as np

from dtensor_ring.planning.cache_table import CacheTable
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.ranges import Span, as_count

MAX_LISTED = 8
"""Layers that an error lists."""


class Turn(NamedTuple):
    """Tokens that all layers append, seen from one rank."""

    begin: int
    """Position of the first one."""
    is_dealt: bool
    num_given: int
    """Tokens that each layer is given."""
    kept: tuple[Span, ...]
    """Of those, the ones that stay on this rank, in the order of columns."""
    cols: Span
    """The new columns, after which there are no others."""
    capacities: tuple[int, ...]
    """By rank: columns that each layer has memory for after the turn."""
    capacities_before: tuple[int, ...]
    """And before it."""
    is_first: bool
    """Whether it says how many sequences there are."""


class Turns:
    """The table of a cache, and the turn that its layers are in.

    Args:
        table: of no tokens.
        rank: the rank whose columns these are.
        num_layers: that append in each turn.
    """

    def __init__(self, table: CacheTable, rank: int, num_layers: int) -> None:
        self.rank, self.num_layers = rank, num_layers
        self.start(table)

    def start(self, table: CacheTable) -> None:
        """Begin with a table of no tokens."""
        self.table = table
        self.last: Turn | None = None
        self.batch: int | None = None
        self.order = 0
        """A checksum of the selections of sequences, 0 without one."""
        self._capacities = table.num_local
        self._behind: set[int] = set()

    def num_cols(self, number: int) -> int:
        """Columns that a layer has on this rank."""
        if self.last is not None and number in self._behind:
            return self.last.cols[0]
        return self.table.num_local[self.rank]

    def begin(self, num_tokens: int, layout: Layout | None) -> None:
        """Begin a turn, dealt by the layout, or not if that is `None`.

        Raises:
            ValueError: if a layer has not appended the turn before, or the layout cannot deal it.
        """
        self.check_complete("begin a turn")
        before, num_tokens = self.table, as_count("num_tokens", num_tokens, 1)
        if layout is None:
            table, num_given = before.append(num_tokens), num_tokens
            own = table.runs_from(self.rank, before.seq_len)
            starts = [(start - before.seq_len, length) for start, length in own]
            kept = tuple((start, start + length) for start, length in starts)
        else:
            table = before.append_dealt(layout, num_tokens)
            num_given = table.num_local[self.rank] - before.num_local[self.rank]
            kept = ((0, num_given),)
        cols = before.num_local[self.rank], table.num_local[self.rank]
        # Memory that was needed once is kept.
        capacities = tuple(map(max, self._capacities, table.num_reserved))
        self.last = Turn(
            before.seq_len,
            *(layout is not None, num_given, kept, cols, capacities),
            *(self._capacities, self.batch is None),
        )
        self._capacities = capacities
        self.table, self._behind = table, set(range(self.num_layers))

    def of_layer(self, number: int) -> Turn:
        """The turn that a layer appends now.

        Raises:
            ValueError: if it has appended it already, or none has begun.
        """
        if self.last is None:
            raise ValueError(
                f"layer {number} cannot append: no turn has begun, cache.begin(num_tokens, "
                "dealt=...) says how many tokens come"
            )
        if number not in self._behind:
            raise ValueError(
                f"layer {number} has appended this turn already; cache.begin(num_tokens, "
                "dealt=...) begins the next one"
            )
        return self.last

    def done(self, number: int) -> None:
        """A layer has appended."""
        self._behind.discard(number)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these sequences, in this order."""
        if self.batch is None or [*rows] == [*range(self.batch)]:  # nothing is elsewhere then
            return
        self.batch = len(rows)
        self.order = crc32(np.array(rows, dtype=np.int64).tobytes(), self.order)

    def check_complete(self, what: str) -> None:
        """Refuse what needs all layers to have the same tokens.

        Raises:
            ValueError: if a layer has yet to append.
        """
        if not self._behind or self.last is None:
            return
        listed = ", ".join(map(str, sorted(self._behind)[:MAX_LISTED]))
        more = ", ..." if len(self._behind) > MAX_LISTED else ""
        raise ValueError(
            f"cannot {what}: of {self.num_layers} layers, {listed}{more} did not append the "
            f"{self.last.num_given} tokens of this turn; if it failed, crop({self.last.begin}) "
            "takes it back"
        )

    def taken_back(self, seq_len: int) -> Turn | None:
        """The last turn, if a crop to that length drops it whole.

        Whether it was complete does not matter: of a turn that failed, some ranks may have it.

        Raises:
            ValueError: if the length is negative, more than there is, or within such a turn.
        """
        table = self.table.crop(seq_len)
        if self.last is None or table.seq_len > self.last.begin:
            self.check_complete(f"crop to {table.seq_len} tokens")
        return self.last if self.last is not None and table.seq_len <= self.last.begin else None

    def crop(self, seq_len: int) -> None:
        """Drop the last positions; a turn that is not complete can only be dropped whole."""
        dropped = self.taken_back(seq_len)
        if dropped is not None:  # what it needed is not what the next turn needs
            self._capacities = dropped.capacities_before
            if dropped.is_first:  # others leave as many sequences as there are by now
                self.batch = None
        self.table, self.last, self._behind = self.table.crop(seq_len), None, set()
