"""A layout made for one batch: ranks trade blocks until all have the same work."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dtensor_ring.planning.cache import cached_bytes
from dtensor_ring.planning.count import MAX_RANKS, as_count
from dtensor_ring.planning.documents import Boundaries, Documents, as_documents
from dtensor_ring.planning.layout import Layout, ZigZag
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.plan import check_documents, visible_pairs
from dtensor_ring.planning.rows import slices_of
from dtensor_ring.planning.run import Run, joined, shard_length
from dtensor_ring.planning.spelling import LAYOUTS, as_layout

TOLERANCE = 0.01
"""Trading ends when the busiest rank is within this of the mean: more would only add runs."""

MAX_BLOCKS = 2**23
"""Those of two billion tokens, over which trading takes minutes."""


@dataclass(frozen=True)
class Balanced(Layout):
    """Starts as zigzag; then ranks trade blocks until their visible areas are even.

    Deterministic, the same on every rank. Where zigzag is balanced already it is zigzag. It
    belongs to one batch, so it is passed as data: see `sequence_runs`.

    Args:
        mask: the mask that the areas are counted for.
        seq_len: global length, in tokens.
        world_size: ranks on the ring.
        cu_seqlens: boundaries of documents, `(D+1,)` or `(B, D+1)`; a tensor or a sequence;
            kept as `Documents`.
        block: tokens of a traded block: smaller blocks balance better, larger ones make fewer
            runs, hence fewer tiles. By default 256, or a sixteenth of a shard if that is less.

    Raises:
        TypeError: if the mask is not a `Mask`, or a number is not an integer.
        ValueError: if a number is out of range, there are too many blocks, or the boundaries do
            not fit the sequence.

    >>> layout = Balanced(Mask.causal(), 16, 2, cu_seqlens=(0, 12, 16), block=2)
    >>> [layout.positions(rank, 2, 16) for rank in range(2)]
    [[4, 5, 10, 11, 12, 13, 14, 15], [0, 1, 2, 3, 6, 7, 8, 9]]
    """

    name: ClassVar[str] = "balanced"
    per_batch: ClassVar[bool] = True

    mask: Mask
    seq_len: int
    world_size: int
    cu_seqlens: Boundaries | None = None
    block: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mask, Mask):
            raise TypeError(f"mask must be a Mask, such as Mask.causal(), got {self.mask!r}")
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
                f"tokens, more than {MAX_BLOCKS:,} could be traded; give a larger block"
            )
        object.__setattr__(self, "cu_seqlens", as_documents(self.cu_seqlens))
        check_documents(self.world_size, self.seq_len, self.documents)

    @property
    def documents(self) -> Documents | None:
        """The boundaries, converted."""
        return as_documents(self.cu_seqlens)

    @property
    def block_length(self) -> int:
        """Tokens of a block."""
        return self.block or max(1, min(256, self.seq_len // (16 * self.world_size)))

    @property
    def max_runs(self) -> int:
        """Runs that a rank has at most, whatever the documents: one for each of its blocks."""
        # Zigzag deals two halves; a trade swaps blocks, so their number stays.
        half_shard = -(-shard_length(0, self.world_size, self.seq_len) // 2)
        return 2 * -(-half_shard // self.block_length)

    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        if (world_size, seq_len) != (self.world_size, self.seq_len):
            raise ValueError(
                f"this layout was balanced for {self.seq_len} tokens on {self.world_size} ranks, "
                f"it cannot deal {seq_len} tokens to {world_size}; make another one"
            )
        return _deal(self)[rank]


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive positions, and the pairs that their queries see."""

    start: int
    length: int
    area: int


@cached_bytes(2**26, lambda hands: 64 + 100 * sum(map(len, hands)))
def _deal(layout: Balanced) -> tuple[tuple[Run, ...], ...]:
    """The runs of every rank; at most 64 MiB of them are kept."""
    hands = [list(_blocks(layout, rank)) for rank in range(layout.world_size)]
    # Each trade brings two loads closer together, so this ends.
    while _trade(hands):
        pass
    return tuple(_joined(hand) for hand in hands)


def _blocks(layout: Balanced, rank: int) -> Iterator[_Block]:
    """The blocks of the runs that zigzag deals to a rank."""
    slices = slices_of(layout.mask, (layout.seq_len, layout.seq_len), layout.documents)
    for run in ZigZag().runs(rank, layout.world_size, layout.seq_len):
        for start in range(run.start, run.start + run.length, layout.block_length):
            length = min(layout.block_length, run.start + run.length - start)
            # Over the keys of all ranks: wherever they are, the work is the same.
            area = visible_pairs(slices, Run(start, length))
            yield _Block(start, length, area)


def _trade(hands: list[list[_Block]]) -> bool:
    """Let the busiest rank trade a block for a lighter one; returns whether there was one."""
    loads = [sum(block.area for block in hand) for hand in hands]
    by_load = sorted(range(len(hands)), key=loads.__getitem__)
    busiest = by_load[-1]
    if loads[busiest] * len(hands) <= (1 + TOLERANCE) * sum(loads):
        return False
    for other in by_load[:-1]:  # the idlest rank first: it can take most
        swap = _best_swap(hands[busiest], hands[other], loads[busiest] - loads[other])
        if swap:
            mine, theirs = swap
            hands[busiest][hands[busiest].index(mine)] = theirs
            hands[other][hands[other].index(theirs)] = mine
            return True
    return False


def _best_swap(heavy: list[_Block], light: list[_Block], gap: int) -> tuple[_Block, _Block] | None:
    """The two blocks whose exchange brings the loads of two ranks closest, `None` if none does.

    Both have the same length. Of equal exchanges, the first in the sequence is taken.
    """
    # Half the gap is what should change hands: a block larger by that much for a smaller one.
    offered = sorted(light, key=lambda block: (block.length, block.area, block.start))
    swaps = [
        (abs(gap - 2 * (mine.area - theirs.area)), mine.start, theirs.start, mine, theirs)
        for mine in heavy
        for theirs in _nearest(offered, mine.length, mine.area - gap // 2)
        if mine.length == theirs.length and 0 < mine.area - theirs.area < gap
    ]
    return min(swaps, key=lambda swap: swap[:3])[3:] if swaps else None


def _nearest(blocks: list[_Block], length: int, area: int) -> Iterator[_Block]:
    """The blocks of that length with the next larger and the next smaller area."""

    def size(block: _Block) -> tuple[int, int]:
        return block.length, block.area

    at = bisect_left(blocks, (length, area), key=size)
    if at < len(blocks):
        yield blocks[at]
    # Of equal blocks the first: all ranks must make the same choice.
    if at > 0:
        yield blocks[bisect_left(blocks, size(blocks[at - 1]), key=size)]


def _joined(hand: list[_Block]) -> tuple[Run, ...]:
    """Blocks in the order of positions, neighbours as one run."""
    in_order = sorted(hand, key=lambda block: block.start)
    return joined([Run(block.start, block.length) for block in in_order])


def layout_for(
    layout: Layout | str, mask: Mask, seq_len: int, world_size: int, documents: Documents | None
) -> Layout:
    """A layout as given, the one of that spelling, or the one of that name made for a batch.

    Raises:
        ValueError: if no layout is spelled so.
        TypeError: if `layout` is neither a layout nor a string.
    """
    if layout == Balanced.name:
        return Balanced(mask, seq_len, world_size, documents)
    return layout if isinstance(layout, Layout) and layout.per_batch else as_layout(layout)


def layouts_for(
    mask: Mask, seq_len: int, world_size: int, documents: Documents | None
) -> list[Layout]:
    """All layouts without parameters, then those that are made for this batch."""
    fixed = [kind() for kind in LAYOUTS.values() if not kind.parameters]
    return [*fixed, Balanced(mask, seq_len, world_size, documents)]
