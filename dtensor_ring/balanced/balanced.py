"""A layout made for one batch: all ranks get the same work, and little travels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from dtensor_ring.balanced.packing import Hands, Partition
from dtensor_ring.balanced.work import Units, Work, areas
from dtensor_ring.planning.layout import Contiguous, Layout, Run, ZigZag, shard_length
from dtensor_ring.planning.lru import cached_bytes
from dtensor_ring.planning.mask import Boundaries, Documents, Mask, as_documents
from dtensor_ring.planning.plan import FULL, checked_slices
from dtensor_ring.planning.ranges import MAX_RANKS, as_count, expanded
from dtensor_ring.planning.run_table import LAYOUTS, as_layout
from dtensor_ring.planning.slices import Slices

MAX_PAIRS = 2**20
"""Pairs of pieces that steps are computed for, in about 0.2 s; of more, no waiting is counted."""

TOKEN = 2048
"""Pairs that a rank computes while the key and value of one token travel.

With 32 query heads and 8 key heads of 128 in 16 bits: 16 Kflop and 4 KiB, at 500 Tflop/s and
50 GB/s.
"""


def busiest_load(work: Work, partition: Partition, world_size: int) -> int:
    """Pairs that the queries of the busiest rank see."""
    loads = np.zeros(world_size, dtype=work.table.dtype)
    np.add.at(loads, partition.owners, work.areas(partition.begins, partition.ends))
    return int(loads.max())


def cost(work: Work, partition: Partition, world_size: int) -> int:
    """Pairs that all ranks together could compute until the ring is done and all has travelled."""
    makespan, num_received = ring_cost(work, partition, world_size)
    return world_size * makespan + TOKEN * work.num_rows * num_received


def ring_cost(work: Work, partition: Partition, world_size: int) -> tuple[int, int]:
    """When the last rank is done, in pairs, and the positions that all ranks receive."""
    begins, ends, owners = partition
    ranges, slices, first, end = work.seen(begins, ends)
    num_received = _num_received(partition, owners[ranges], first, end)
    # The pieces that have any of the keys follow one another.
    key_first, key_end = np.searchsorted(ends, first, "right"), np.searchsorted(begins, end, "left")
    if (key_end - key_first).sum() > MAX_PAIRS:
        makespan = busiest_load(work, partition, world_size)
    else:
        pair, key = expanded(key_first, key_end)
        table, queries = work.table[slices[pair]], ranges[pair]
        table[:, 2] = np.maximum(table[:, 2], begins[key])
        table[:, 3] = np.minimum(table[:, 3], ends[key])
        found = areas(table, begins[queries], ends[queries])
        makespan = ring_makespan(owners[queries], owners[key], found, world_size)
    return makespan, num_received


def ring_makespan(
    viewers: np.ndarray, sources: np.ndarray, found: np.ndarray, world_size: int
) -> int:
    """When the last rank is done, in pairs, if keys go around the ring and messages take no time.

    A step of a rank begins when its step before is done, and the neighbours that it exchanges
    messages with meanwhile have begun theirs.

    Args:
        viewers: ranks whose queries see pairs; one for each entry, in any order.
        sources: the ranks that hold the keys.
        found: how many pairs.
        world_size: ranks on the ring.
    """
    ranks, distances = np.arange(world_size), (viewers - sources) % world_size
    after, before = (ranks + 1) % world_size, ranks - 1
    reaches = np.zeros(world_size, dtype=np.int64)
    np.maximum.at(reaches, sources, np.where(found > 0, distances, 0))
    num_steps = int(reaches.max()) + 1
    order = np.argsort(distances, kind="stable")
    bounds = np.searchsorted(distances[order], np.arange(num_steps + 1))
    begun = np.zeros(world_size, dtype=found.dtype)
    for step in range(num_steps):
        part = order[bounds[step] : bounds[step + 1]]
        done = begun.copy()
        np.add.at(done, viewers[part], found[part])
        # A packet goes on to the last rank that sees any of it.
        sends = reaches[(ranks - step) % world_size] > step
        done = np.maximum(done, np.where(sends, begun[after], 0))
        begun = np.maximum(done, np.where(sends[before], begun[before], 0))
    return int(begun.max())


def _num_received(
    partition: Partition, viewers: np.ndarray, first: np.ndarray, end: np.ndarray
) -> int:
    """Positions that ranks see and do not hold: each once for every rank that sees it."""
    if not len(partition.ends):
        return 0
    # One line of positions for each rank: the union of what it sees and holds, less what it holds.
    line = int(partition.ends[-1]) + 1
    owners = partition.owners
    begins = np.concatenate([viewers * line + first, owners * line + partition.begins])
    ends = np.concatenate([viewers * line + end, owners * line + partition.ends])
    order = np.argsort(begins, kind="stable")
    ends = np.maximum.accumulate(ends[order])
    covered = ends - np.maximum(begins[order], np.append(0, ends[:-1]))
    return int(np.maximum(covered, 0).sum() - (partition.ends - partition.begins).sum())


TOLERANCE = 20
"""A dealing is even if the busiest rank is within one 20th of the mean."""

SHARES = (15, 14, 8, 4)
"""Largest areas of units that are dealt whole, in 16ths of the mean of a rank; less moves more."""

MAX_ROUNDS = 32
"""Blocks that each rank gets at most where units cannot be dealt evenly."""

MAX_BLOCKS = 2**23
"""More would make a table of runs of half a gigabyte."""


WHOLE: tuple[Layout, ...] = (ZigZag(), Contiguous())
"""Layouts that give a rank two runs at most, whatever the batch."""


@dataclass(frozen=True)
class Balanced(Layout):
    """Equal work for all ranks: short documents whole, long ones in parts on ranks side by side.

    Of several even dealings it is the one with which the ring is soonest done; contiguous and
    zigzag are among them. It is found in closed form, and is the same on every rank. It belongs to
    one batch, so it is passed as data: see `sequence_runs`.

    Args:
        mask: the mask that the areas are counted for; `None` where `slices` say what is seen.
        seq_len: global length, in tokens.
        world_size: ranks on the ring.
        cu_seqlens: boundaries of documents, `(D+1,)` or `(B, D+1)`; a tensor or a sequence;
            kept as `Documents`.
        block: shorter documents, in tokens, are dealt together with their neighbours. Small blocks
            balance better, large ones make fewer runs, hence fewer tiles. By default a 32nd of a
            shard.
        slices: what queries see, in place of mask and boundaries.

    Raises:
        TypeError: if the mask is not a `Mask`, slices are no `Slices`, or a number is no integer.
        ValueError: if a number is out of range, there are too many blocks, the boundaries or slices
            do not fit the sequence, or slices come beside a mask or boundaries.

    Example:
        >>> layout = Balanced(Mask.causal(), 16, 2, cu_seqlens=(0, 12, 16), block=2)
        >>> [layout.positions(rank, 2, 16) for rank in range(2)]
        [[3, 4, 5, 6, 7, 8, 12, 13], [0, 1, 2, 9, 10, 11, 14, 15]]
    """

    name: ClassVar[str] = "balanced"
    per_batch: ClassVar[bool] = True

    mask: Mask | None
    seq_len: int
    world_size: int
    cu_seqlens: Boundaries | None = None
    block: int | None = None
    slices: Slices | None = None
    _seen: Slices = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_seen(self.mask, self.slices)
        counts = {
            "seq_len": as_count("seq_len", self.seq_len),
            "world_size": as_count("world_size", self.world_size, 1, MAX_RANKS),
            "block": None if self.block is None else as_count("block", self.block, 1),
        }
        for name, count in counts.items():  # a float would count as the same number
            object.__setattr__(self, name, count)
        num_blocks = self.seq_len // self.block_length
        if num_blocks > MAX_BLOCKS:
            raise ValueError(
                f"seq_len {self.seq_len} takes {num_blocks:,} blocks of {self.block_length} "
                f"tokens, at most {MAX_BLOCKS:,} can be dealt; give a larger block"
            )
        object.__setattr__(self, "cu_seqlens", as_documents(self.cu_seqlens))
        object.__setattr__(self, "_seen", self._checked())

    @property
    def documents(self) -> Documents | None:
        """The boundaries, converted."""
        return as_documents(self.cu_seqlens)

    def _checked(self) -> Slices:
        """What queries see, if it can be planned."""
        lengths = self.seq_len, self.seq_len
        mask = FULL if self.mask is None else self.mask
        return checked_slices(mask, self.world_size, lengths, self.documents, slices=self.slices)

    @property
    def block_length(self) -> int:
        """Tokens of a block."""
        return self.block or max(1, self.seq_len // (32 * self.world_size))

    @property
    def max_runs(self) -> int:
        """Runs that a rank has at most, whatever the documents: two for each of its blocks."""
        return 2 * -(-shard_length(0, self.world_size, self.seq_len) // self.block_length)

    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        if (world_size, seq_len) != (self.world_size, self.seq_len):
            raise ValueError(
                f"this layout was balanced for {self.seq_len} tokens on {self.world_size} ranks, "
                f"it cannot deal {seq_len} tokens to {world_size}; make another one"
            )
        return _deal(self)[rank]


@cached_bytes(2**26, lambda runs: 64 + 100 * sum(map(len, runs)))
def _deal(layout: Balanced) -> tuple[tuple[Run, ...], ...]:
    """The runs of every rank; at most 64 MiB of them are kept."""
    sizes = layout.world_size, layout.seq_len, layout.block_length
    return balanced_partition(layout._seen, *sizes, layout.max_runs).runs(layout.world_size)


def balanced_partition(
    slices: Slices, world_size: int, seq_len: int, block: int, max_runs: int
) -> Partition:
    """Deal a sequence evenly: of several even ways, the one of the least cost.

    If no way is even, it is the most even one. Ties go to the first.

    Args:
        slices: what queries see.
        world_size: ranks on the ring.
        seq_len: global length, in tokens.
        block: units shorter than this many tokens are dealt together with their neighbours.
        max_runs: that a rank may have, at least 2.
    """
    work, sizes = Work(slices), (world_size, seq_len)
    most = work.total + work.total // TOLERANCE
    found = [(busiest_load(work, x, world_size), x) for x in _whole(*sizes)]
    # What comes later moves more, so the first even one ends the search.
    for dealings in (_by_units(work, block, *sizes), _by_blocks(work, block, *sizes)):
        for partition in dealings:
            if partition.max_runs <= max_runs:
                found.append((busiest_load(work, partition, world_size), partition))
                if world_size * found[-1][0] <= most:
                    break
        even = [partition for load, partition in found if world_size * load <= most]
        if even:
            return min(even, key=lambda one: cost(work, one, world_size))
    return min(found, key=lambda one: one[0])[1]


def _whole(world_size: int, seq_len: int) -> Iterator[Partition]:
    """The sequence as a whole."""
    for layout in WHOLE:
        yield Partition.dealt(layout, world_size, seq_len)


def _by_units(work: Work, block: int, world_size: int, seq_len: int) -> Iterator[Partition]:
    """Small units whole, large ones in parts, for each share that makes a difference."""
    units, tried = work.units(seq_len, block), set()
    lengths = units.ends - units.begins
    longest = max(1, shard_length(0, world_size, seq_len))
    for share in SHARES:
        most = max(1, share * work.total // (16 * world_size))
        num_parts = np.maximum(-(-units.areas // most), -(-lengths // longest)).astype(np.int64)
        num_parts = np.clip(num_parts, 1, world_size)
        if num_parts.tobytes() in tried:
            continue
        tried.add(num_parts.tobytes())
        hands, is_large = Hands(work, world_size, seq_len), num_parts > 1
        hands.deal_parted(Units(*(x[is_large] for x in units)), num_parts[is_large])
        hands.deal_whole(Units(*(x[~is_large] for x in units)))
        yield hands.dealt()


def _by_blocks(work: Work, block: int, world_size: int, seq_len: int) -> Iterator[Partition]:
    """Blocks of equal lengths, for units that hold too much for any rank, or rows that differ."""
    shard, rounds = shard_length(0, world_size, seq_len), 4
    while rounds <= MAX_ROUNDS and rounds * block <= shard:
        edges = np.append(np.arange(0, seq_len, shard // rounds), seq_len)
        hands = Hands(work, world_size, seq_len, reserve=0)
        hands.deal_whole(Units(edges[:-1], edges[1:], work.areas(edges[:-1], edges[1:])))
        yield hands.dealt()
        rounds *= 2


def check_seen(mask: Mask | None, slices: Slices | None) -> None:
    """Refuse what does not say which keys a query sees.

    Raises:
        TypeError: if it is neither a mask nor slices.
    """
    if slices is not None and not isinstance(slices, Slices):
        raise TypeError(f"slices must be Slices, got {type(slices).__name__}")
    if not isinstance(mask, Mask) and (mask is not None or slices is None):
        raise TypeError(f"mask must be a Mask, such as Mask.causal(), got {mask!r}")


def layout_for(
    layout: Layout | str,
    mask: Mask | None,
    seq_len: int,
    world_size: int,
    documents: Documents | None,
    slices: Slices | None = None,
) -> Layout:
    """A layout as given, the one of that spelling, or the one of that name made for a batch.

    Raises:
        ValueError: if no layout is spelled so.
        TypeError: if `layout` is neither a layout nor a string.
    """
    if layout == Balanced.name:
        return Balanced(mask, seq_len, world_size, documents, slices=slices)
    return layout if isinstance(layout, Layout) and layout.per_batch else as_layout(layout)


def layouts_for(
    mask: Mask | None,
    seq_len: int,
    world_size: int,
    documents: Documents | None,
    slices: Slices | None = None,
) -> list[Layout]:
    """All layouts without parameters, then those that are made for this batch."""
    fixed = [kind() for kind in LAYOUTS.values() if not kind.parameters]
    return [*fixed, Balanced(mask, seq_len, world_size, documents, slices=slices)]
