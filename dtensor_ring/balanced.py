"""A layout made for one batch: blocks are dealt so that every rank sees as many pairs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any, ClassVar

from dtensor_ring.layout import Layout, Run, ZigZag, shard_length
from dtensor_ring.mask import Mask
from dtensor_ring.plan import as_documents, check_documents, visible_pairs

TOLERANCE = 0.01
"""A busiest rank this much above the mean is balanced: trading further would only add runs."""


@dataclass(frozen=True)
class Balanced(Layout):
    """Starts as zigzag; then ranks trade blocks until their visible areas are even.

    Deterministic, the same on every rank. Where zigzag is balanced already it is zigzag. It
    belongs to one batch, so it is passed as data: see `sequence_runs`.

    Args:
        mask: the mask that the areas are counted for.
        seq_len: global length, in tokens.
        world_size: ranks on the ring.
        cu_seqlens: boundaries of documents, `(D+1,)` or `(B, D+1)`; a tensor or a sequence.
        block: what is traded, in tokens: smaller blocks balance better, larger ones make fewer
            runs, hence fewer tiles. By default 256, or a sixteenth of a shard if that is less.

    Raises:
        TypeError: if the mask is no `Mask`, or a number no integer.
        ValueError: if `block` is not positive, or the boundaries are none of that sequence.

    >>> layout = Balanced(Mask.causal(), 16, 2, cu_seqlens=(0, 12, 16), block=2)
    >>> [layout.positions(rank, 2, 16) for rank in range(2)]
    [[4, 5, 10, 11, 12, 13, 14, 15], [0, 1, 2, 3, 6, 7, 8, 9]]
    """

    name: ClassVar[str] = "balanced"

    mask: Mask
    seq_len: int
    world_size: int
    cu_seqlens: Any = None
    block: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mask, Mask):
            raise TypeError(f"mask must be a Mask, such as Mask.causal(), got {self.mask!r}")
        for name in ("seq_len", "world_size", "block"):  # a float would count as the same number
            if getattr(self, name) is not None:
                object.__setattr__(self, name, index(getattr(self, name)))
        if self.block is not None and self.block < 1:
            raise ValueError(f"a block holds at least one token, got {self.block}")
        object.__setattr__(self, "cu_seqlens", as_documents(self.cu_seqlens))
        check_documents(self.world_size, self.seq_len, self.cu_seqlens)

    @property
    def block_length(self) -> int:
        """Tokens of a block."""
        return self.block or max(1, min(256, self.seq_len // (16 * self.world_size)))

    @property
    def max_runs(self) -> int:
        """Runs that a rank has at most, whatever the documents: one for each of its blocks."""
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


@lru_cache(maxsize=64)
def _deal(layout: Balanced) -> tuple[tuple[Run, ...], ...]:
    """The runs of every rank."""
    hands = [list(_blocks(layout, rank)) for rank in range(layout.world_size)]
    while _trade(hands):
        pass
    return tuple(_joined(hand) for hand in hands)


def _blocks(layout: Balanced, rank: int) -> Iterator[_Block]:
    """What zigzag deals to a rank, in blocks."""
    for run in ZigZag().runs(rank, layout.world_size, layout.seq_len):
        for start in range(run.start, run.start + run.length, layout.block_length):
            length = min(layout.block_length, run.start + run.length - start)
            area = visible_pairs(layout.mask, layout.seq_len, layout.cu_seqlens, Run(start, length))
            yield _Block(start, length, area)


def _trade(hands: list[list[_Block]]) -> bool:
    """Let the busiest rank trade a block for a lighter one; whether one was found."""
    loads = [sum(block.area for block in hand) for hand in hands]
    by_load = sorted(range(len(hands)), key=loads.__getitem__)
    busiest = by_load[-1]
    if loads[busiest] * len(hands) <= (1 + TOLERANCE) * sum(loads):
        return False
    for other in by_load[:-1]:
        swap = _best_swap(hands[busiest], hands[other], loads[busiest] - loads[other])
        if swap:
            mine, theirs = swap
            hands[busiest][hands[busiest].index(mine)] = theirs
            hands[other][hands[other].index(theirs)] = mine
            return True
    return False


def _best_swap(heavy: list[_Block], light: list[_Block], gap: int) -> tuple[_Block, _Block] | None:
    """The blocks of one length whose exchange brings two hands closest, if any brings them closer.

    Of equal ones the first in the sequence.
    """
    offered = sorted(light, key=lambda block: (block.length, block.area, block.start))
    swaps = [
        (abs(gap - 2 * (mine.area - theirs.area)), mine.start, theirs.start, mine, theirs)
        for mine in heavy
        for theirs in _nearest(offered, mine.length, mine.area - gap // 2)
        if mine.length == theirs.length and 0 < mine.area - theirs.area < gap
    ]
    return min(swaps, key=lambda swap: swap[:3])[3:] if swaps else None


def _nearest(blocks: list[_Block], length: int, area: int) -> Iterator[_Block]:
    """The first of those of the next area from there on, and of those of the one below."""

    def size(block: _Block) -> tuple[int, int]:
        return block.length, block.area

    at = bisect_left(blocks, (length, area), key=size)
    if at < len(blocks):
        yield blocks[at]
    if at > 0:
        yield blocks[bisect_left(blocks, size(blocks[at - 1]), key=size)]


def _joined(hand: list[_Block]) -> tuple[Run, ...]:
    """Blocks in the order of positions, neighbours as one run."""
    runs: list[Run] = []
    for block in sorted(hand, key=lambda block: block.start):
        if runs and runs[-1].start + runs[-1].length == block.start:
            runs[-1] = Run(runs[-1].start, runs[-1].length + block.length)
        else:
            runs.append(Run(block.start, block.length))
    return tuple(runs)
