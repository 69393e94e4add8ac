"""A layout made for one batch: all ranks get the same work, and few tokens travel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from dtensor_ring.balanced.work import AttentionWork, Packer, Partition, Units, areas
from dtensor_ring.planning.layout import Contiguous, Layout, Run, ZigZag, shard_length
from dtensor_ring.planning.lru import cached_bytes
from dtensor_ring.planning.mask import Boundaries, Documents, Mask, as_documents
from dtensor_ring.planning.plan import FULL, checked_slices
from dtensor_ring.planning.ranges import MAX_RANKS, as_count, expanded
from dtensor_ring.planning.run_table import LAYOUTS, as_layout
from dtensor_ring.planning.slices import Slices

# Pairs that a rank computes while the key and value of one token travel. With 32 query heads and 8
# key heads of 128 in 16 bits: 16 Kflop and 4 KiB, at 500 Tflop/s and 50 GB/s.
TOKEN = 2048


def busiest_load(work: AttentionWork, partition: Partition, world_size: int) -> int:
    """Return the number of pairs that the queries of the busiest rank see."""
    loads = np.zeros(world_size, dtype=work.table.dtype)
    np.add.at(loads, partition.owners, work.areas(partition.begins, partition.ends))
    return int(loads.max())


def cost(work: AttentionWork, partition: Partition, world_size: int) -> int:
    """Return the time of all ranks on the ring plus the time of transfers, both in pairs."""
    makespan, num_received = ring_cost(work, partition, world_size)
    return cost_of(work, makespan, num_received, world_size)


def cost_of(work: AttentionWork, makespan: int, num_received: int, world_size: int) -> int:
    """Return the cost of a partition whose `ring_cost` is known."""
    return world_size * makespan + TOKEN * work.num_rows * num_received


# The largest number of pairs of pieces for which steps are simulated, in about 0.2 s. With more,
# the cost does not count waiting.
MAX_PAIRS = 2**20


def ring_cost(work: AttentionWork, partition: Partition, world_size: int) -> tuple[int, int]:
    """Return the time of the slowest rank, in pairs, and the positions that all ranks receive."""
    begins, ends, owners = partition
    ranges, slices, first, end = work.seen(begins, ends)
    num_received = _num_received(partition, owners[ranges], first, end)
    # The pieces that hold any of the keys are adjacent.
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
    """Return when the slowest rank is done, in pairs, on a ring, see `next_begins`.

    Args:
        viewers: for each entry, in any order, the rank whose queries see the pairs.
        sources: the rank that holds the keys.
        found: the number of pairs.
        world_size: number of ranks on the ring.
    """
    ranks, distances = np.arange(world_size), (viewers - sources) % world_size
    reaches = np.zeros(world_size, dtype=np.int64)
    np.maximum.at(reaches, sources, np.where(found > 0, distances, 0))
    num_steps = int(reaches.max()) + 1
    order = np.argsort(distances, kind="stable")
    bounds = np.searchsorted(distances[order], np.arange(num_steps + 1))
    begun = np.zeros(world_size, dtype=found.dtype)
    for step in range(num_steps):
        part, work = order[bounds[step] : bounds[step + 1]], np.zeros_like(begun)
        np.add.at(work, viewers[part], found[part])
        # A packet travels on to the furthest rank that sees any of it.
        senders = ranks[reaches[(ranks - step) % world_size] > step]
        begun = next_begins(begun, work, senders, (senders + 1) % world_size)
    return int(begun.max())


def next_begins(
    begun: np.ndarray, work: np.ndarray, senders: np.ndarray, receivers: np.ndarray
) -> np.ndarray:
    """Return when ranks begin their next step, `(W,)`, if messages take no time.

    A rank begins a step when its previous step is done, and when the ranks with which it had
    messages in that step had begun it, too.

    Args:
        begun: when each rank began this step, `(W,)`.
        work: how long it takes each, `(W,)`.
        senders: the rank that sends, of each message in this step.
        receivers: the one that receives.

    >>> next_begins(*map(np.array, ([0, 5], [1, 1], [0], [1]))).tolist()
    [5, 6]
    """
    found = begun + work
    np.maximum.at(found, senders, begun[receivers])
    np.maximum.at(found, receivers, begun[senders])
    return found


def _num_received(
    partition: Partition, viewers: np.ndarray, first: np.ndarray, end: np.ndarray
) -> int:
    """Return the number of positions that ranks see and do not hold, summed over the ranks."""
    if not len(partition.ends):
        return 0
    # A line of positions for each rank: the union of what it sees and holds, less what it holds.
    line = int(partition.ends[-1]) + 1
    owners = partition.owners
    begins = np.concatenate([viewers * line + first, owners * line + partition.begins])
    ends = np.concatenate([viewers * line + end, owners * line + partition.ends])
    order = np.argsort(begins, kind="stable")
    ends = np.maximum.accumulate(ends[order])
    covered = ends - np.maximum(begins[order], np.append(0, ends[:-1]))
    return int(np.maximum(covered, 0).sum() - (partition.ends - partition.begins).sum())


# A partition is even if the busiest rank is at most one 20th above the mean.
TOLERANCE = 20

# Largest areas of units that stay whole, in 16ths of the mean per rank. Smaller ones move more.
SHARES = (15, 14, 8, 4)

# The largest number of blocks per rank if units cannot be spread evenly.
MAX_ROUNDS = 32

# The largest number of blocks. With more, a table of runs would take half a gigabyte.
MAX_BLOCKS = 2**23


# Layouts that give a rank at most two runs, for any batch.
WHOLE: tuple[Layout, ...] = (ZigZag(), Contiguous())


@dataclass(frozen=True)
class Balanced(Layout):
    """Equal work for all ranks: short documents stay whole, long ones span neighbouring ranks.

    It compares several even partitions, contiguous and zigzag among them, and takes the one of
    least cost. The result is computed in closed form, and is the same on every rank. It belongs to
    one batch, so it is passed as data: see `sequence_runs`.

    Args:
        mask: the mask whose pairs are counted; `None` if `slices` say what is seen.
        seq_len: global length, in tokens.
        world_size: number of ranks on the ring.
        cu_seqlens: boundaries of documents, `(D+1,)` or `(B, D+1)`; a tensor or a sequence;
            kept as `Documents`.
        block: documents shorter than this many tokens stay together with their neighbours. Small
            blocks balance better; large ones make fewer runs and tiles. The default is a 32nd of a
            shard.
        slices: what queries see, in place of mask and boundaries.

    Raises:
        TypeError: if the mask is not a `Mask`, slices are not `Slices`, or a number is not an
            integer.
        ValueError: if a number is out of range, there are too many blocks, the boundaries or slices
            do not fit the sequence, or slices are given with a mask or boundaries.

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
        for name, count in counts.items():  # keep the int: the argument may be another integer type
            object.__setattr__(self, name, count)
        num_blocks = self.seq_len // self.block_length
        if num_blocks > MAX_BLOCKS:
            raise ValueError(
                f"seq_len {self.seq_len} takes {num_blocks:,} blocks of {self.block_length} "
                f"tokens, at most {MAX_BLOCKS:,} can be sharded; give a larger block"
            )
        object.__setattr__(self, "cu_seqlens", as_documents(self.cu_seqlens))
        object.__setattr__(self, "_seen", self._checked())

    @property
    def documents(self) -> Documents | None:
        """The boundaries as `Documents`."""
        return as_documents(self.cu_seqlens)

    def _checked(self) -> Slices:
        """Check what queries see, and return it as slices."""
        lengths = self.seq_len, self.seq_len
        mask = FULL if self.mask is None else self.mask
        return checked_slices(mask, self.world_size, lengths, self.documents, slices=self.slices)

    @property
    def block_length(self) -> int:
        """Number of tokens in a block."""
        return self.block or max(1, self.seq_len // (32 * self.world_size))

    @property
    def max_runs(self) -> int:
        """The largest number of runs of a rank for any documents: two for each of its blocks."""
        return 2 * -(-shard_length(0, self.world_size, self.seq_len) // self.block_length)

    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        if (world_size, seq_len) != (self.world_size, self.seq_len):
            raise ValueError(
                f"this layout was balanced for {self.seq_len} tokens on {self.world_size} ranks, "
                f"it cannot shard {seq_len} tokens over {world_size}; make another one"
            )
        return _balanced_runs(self)[rank]


@cached_bytes(2**26, lambda runs: 64 + 100 * sum(map(len, runs)))
def _balanced_runs(layout: Balanced) -> tuple[tuple[Run, ...], ...]:
    """Return the runs of every rank; a cache keeps at most 64 MiB of them."""
    return balanced_partition(
        layout._seen,
        world_size=layout.world_size,
        seq_len=layout.seq_len,
        block=layout.block_length,
        max_runs=layout.max_runs,
    ).runs(layout.world_size)


def balanced_partition(
    slices: Slices, world_size: int, seq_len: int, block: int, max_runs: int
) -> Partition:
    """Partition a sequence evenly: return the even partition of the least cost.

    If none is even, return the most even one. Ties go to the first.

    Args:
        slices: what queries see.
        world_size: number of ranks on the ring.
        seq_len: global length, in tokens.
        block: units shorter than this many tokens stay together with their neighbours.
        max_runs: the largest number of runs of a rank, at least 2.
    """
    work = AttentionWork(slices)
    trials = _Trials(work, world_size, max_runs)
    trials.add_all(_whole(world_size, seq_len))
    for partitions_of in (_by_units, _by_blocks):
        trials.add_while_cheaper(partitions_of(work, block, world_size, seq_len))
        if trials.even:
            return min(trials.even, key=lambda one: one[0])[1]
    return min(trials.found, key=lambda one: one[0])[1]


class _Trials:
    """Partitions that were tried.

    Attributes:
        found: all that give a rank few enough runs, each after the pairs of its busiest rank.
        even: those that are even, each after its cost.
    """

    def __init__(self, work: AttentionWork, world_size: int, max_runs: int) -> None:
        self._work, self._world_size, self._max_runs = work, world_size, max_runs
        self._most = work.total + work.total // TOLERANCE
        self.found: list[tuple[int, Partition]] = []
        self.even: list[tuple[int, Partition]] = []

    def add_all(self, candidates: Iterator[Partition]) -> None:
        """Add partitions."""
        for partition in candidates:
            self._add(partition)

    def add_while_cheaper(self, candidates: Iterator[Partition]) -> None:
        """Add partitions, of which later ones move more tokens, until less waiting cannot pay."""
        least = None
        for partition in candidates:
            times = self._add(partition)
            if times is None:
                continue
            price, makespan = times
            # Even in time: a later partition could only move more.
            if self._world_size * makespan <= self._most or (least is not None and price >= least):
                return
            least = price

    def _add(self, partition: Partition) -> tuple[int, int] | None:
        """Add a partition; return its cost and its makespan, `None` if it is not even."""
        if partition.max_runs > self._max_runs:
            return None
        load = busiest_load(self._work, partition, self._world_size)
        self.found.append((load, partition))
        # A price counts waiting, which takes simulated steps: only even partitions are worth it.
        if self._world_size * load > self._most:
            return None
        makespan, num_received = ring_cost(self._work, partition, self._world_size)
        price = cost_of(self._work, makespan, num_received, self._world_size)
        self.even.append((price, partition))
        return price, makespan


def _whole(world_size: int, seq_len: int) -> Iterator[Partition]:
    """Yield the partitions of fixed layouts, which do not look at documents."""
    for layout in WHOLE:
        yield Partition.of_layout(layout, world_size, seq_len)


def _by_units(
    work: AttentionWork, block: int, world_size: int, seq_len: int
) -> Iterator[Partition]:
    """Yield partitions with small units whole and large ones in parts, one for each share."""
    units, tried = work.units(seq_len, block), set()
    lengths = units.ends - units.begins
    longest = max(1, shard_length(0, world_size, seq_len))
    for share in SHARES:
        most = max(1, share * work.total // (16 * world_size))
        # A part must fit one shard by its tokens, however few pairs they see.
        num_parts = np.maximum(-(-units.areas // most), -(-lengths // longest)).astype(np.int64)
        num_parts = np.clip(num_parts, 1, world_size)
        # Shares that cut all units alike give the same partition.
        if num_parts.tobytes() in tried:
            continue
        tried.add(num_parts.tobytes())
        packer, is_large = Packer(work, world_size, seq_len), num_parts > 1
        # Large units first: they need neighbours with room, and small ones fill what is left.
        packer.pack_parts(Units._make(x[is_large] for x in units), num_parts[is_large])
        packer.pack_units(Units._make(x[~is_large] for x in units))
        yield packer.partition()


def _by_blocks(
    work: AttentionWork, block: int, world_size: int, seq_len: int
) -> Iterator[Partition]:
    """Yield partitions into blocks of equal length, for large units or rows that differ."""
    shard, rounds = shard_length(0, world_size, seq_len), 4
    while rounds <= MAX_ROUNDS and rounds * block <= shard:
        edges = np.append(np.arange(0, seq_len, shard // rounds), seq_len)
        packer = Packer(work, world_size, seq_len, reserve=0)
        packer.pack_units(Units(edges[:-1], edges[1:], work.areas(edges[:-1], edges[1:])))
        yield packer.partition()
        rounds *= 2


def check_seen(mask: Mask | None, slices: Slices | None) -> None:
    """Refuse a mask and slices that do not say which keys a query sees.

    Raises:
        TypeError: if neither is given, or one has the wrong type.
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
    """Return a layout, given as a layout or its spec; `"balanced"` makes one for this batch.

    Raises:
        ValueError: if the spec is unknown.
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
    """Return all layouts without parameters, then those made for this batch."""
    fixed = [kind() for kind in LAYOUTS.values() if not kind.parameters]
    return [*fixed, Balanced(mask, seq_len, world_size, documents, slices=slices)]
