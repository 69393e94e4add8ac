"""How the tokens of a sequence are sharded over the ranks of a ring.

The owner of a position depends on the position alone, whatever the length of the sequence. So
prompts that begin alike have their common blocks on the same ranks. Each rank gets one block of
every round of W.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from dtensor_ring.planning.ranges import expanded, united


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive local tokens whose global positions form an arithmetic progression."""

    start: int
    length: int
    stride: int = 1

    def position(self, index: int) -> int:
        """Global position of the run's token number `index`."""
        return self.start + index * self.stride

    @property
    def last(self) -> int:
        """Global position of the run's last token."""
        return self.position(self.length - 1)

    def indices(self, begin: int, end: int) -> tuple[int, int]:
        """Half-open range of the run's tokens whose positions lie in `[begin, end)`."""
        # Rounded up, as -(-a // b): the first token at or after each end.
        first = max(0, -((self.start - begin) // self.stride))
        last = min(self.length, -((self.start - end) // self.stride))
        return first, max(first, last)


def shard_length(rank: int, world_size: int, seq_len: int) -> int:
    """Tokens that `rank` holds: the sizes of `torch.chunk`, hence of DTensor's `Shard`."""
    # All ranks get a full chunk until the tokens run out.
    chunk = -(-seq_len // world_size)
    return max(0, min(chunk, seq_len - rank * chunk))


def joined(runs: list[Run]) -> tuple[Run, ...]:
    """Runs of stride 1 in ascending order, neighbours as one run."""
    result: list[Run] = []
    for run in runs:
        if result and result[-1].start + result[-1].length == run.start:
            run = Run(result[-1].start, result.pop().length + run.length)
        result.append(run)
    return tuple(result)


def nth_block(rank: int, n: int, world_size: int) -> int:
    """Number of the n-th block of a rank.

    >>> [nth_block(0, n, 2) for n in range(4)], [nth_block(1, n, 2) for n in range(4)]
    ([0, 3, 4, 7], [1, 2, 5, 6])
    """
    # Odd rounds go back, so that the last rank of one is the first of the next.
    return n * world_size + (world_size - 1 - rank if n % 2 else rank)


class Serpentine(NamedTuple):
    """How blocks of `block` tokens are dealt to `world_size` ranks.

    A rank's *columns* are its tokens in the order of their positions: the n-th block of a rank has
    the columns from `n * block` on.
    """

    block: int
    world_size: int

    def owner(self, number: int) -> int:
        """The rank that holds a block.

        >>> [Serpentine(64, 3).owner(number) for number in range(7)]
        [0, 1, 2, 2, 1, 0, 0]
        """
        n, place = divmod(number, self.world_size)
        return self.world_size - 1 - place if n % 2 else place

    def num_before(self, position: int, rank: int) -> int:
        """Columns of a rank whose positions are less than this one.

        >>> Serpentine(4, 2).num_before(10, rank=0), Serpentine(4, 2).num_before(10, rank=1)
        (4, 6)
        """
        n = position // (self.block * self.world_size)
        # All blocks of earlier rounds, and what of this round's block comes before.
        start = nth_block(rank, n, self.world_size) * self.block
        return n * self.block + min(self.block, max(0, position - start))

    def columns(self, begin: int, end: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Which of the positions from `begin` to `end` a rank holds, and in which columns: int64.

        >>> Serpentine(4, 2).columns(2, 14, rank=0)
        (array([ 0,  1, 10, 11]), array([2, 3, 4, 5]))
        """
        numbers, offsets = np.divmod(np.arange(begin, end), self.block)
        n, places = np.divmod(numbers, self.world_size)
        mine = np.where(n % 2, self.world_size - 1 - places, places) == rank
        return np.flatnonzero(mine), n[mine] * self.block + offsets[mine]

    def runs(self, begin: int, end: int) -> np.ndarray:
        """Start and length of the runs of each rank from `begin` to `end`, `(W, R, 2)`, int32.

        A run for each block; those that hold nothing fill the rows up.

        >>> Serpentine(4, 2).runs(2, 10).tolist()
        [[[2, 2], [12, 0]], [[4, 4], [8, 2]]]
        """
        each_round = self.block * self.world_size
        n = np.arange(begin // each_round, -(-end // each_round))
        there = np.arange(self.world_size)[:, None]
        starts = self.block * (n * self.world_size + np.where(n % 2, there[::-1], there))
        firsts, ends = np.maximum(starts, begin), np.minimum(starts + self.block, end)
        return np.stack([firsts, np.maximum(ends - firsts, 0)], axis=2).astype(np.int32)


MAX_ROUNDS = 2**20
"""Blocks that a block-cyclic rank has at most."""


class Layout(ABC):
    """Deals the positions `0 ... seq_len - 1` to `world_size` ranks.

    A layout is a hashable value without state.
    """

    name: ClassVar[str]
    per_batch: ClassVar[bool] = False
    """Whether it is made for one batch, and so travels with it as a table of runs."""
    parameters: ClassVar[tuple[str, ...]] = ()
    """Names of its parameters, which are integers, in the order of its spelling."""

    @abstractmethod
    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        """The runs of `rank`, in the order of its local tokens.

        A layout promises, and the planner checks once for each sequence length:

        - the runs of a rank ascend: each starts after the last position of the one before;
        - none is empty, and all runs of all ranks have one stride;
        - rank r holds `num_tokens(r, world_size, seq_len)` tokens;
        - all ranks together hold every position exactly once.

        Args:
            rank: index on the ring.
            world_size: ranks on the ring.
            seq_len: global length, in tokens.

        Raises:
            ValueError: if this layout cannot deal `seq_len` tokens to `world_size` ranks.
        """

    def num_tokens(self, rank: int, world_size: int, seq_len: int) -> int:
        """Tokens that `rank` holds: as DTensor's `Shard` says, unless runs are written out."""
        return shard_length(rank, world_size, seq_len)

    @property
    def spec(self) -> str:
        """The spelling that `as_layout` reads: the name, and the parameters after a colon."""
        values = ",".join(str(getattr(self, name)) for name in self.parameters)
        return f"{self.name}:{values}" if values else self.name

    def positions(self, rank: int, world_size: int, seq_len: int) -> list[int]:
        """Global position of each local token of `rank`."""
        runs = self.runs(rank, world_size, seq_len)
        return [run.position(index) for run in runs for index in range(run.length)]

    def padded_length(self, seq_len: int, world_size: int) -> int:
        """The length to pad to: every rank gets equally many tokens, in equally long pieces.

        It is the smallest such length from `seq_len` on, in tokens.
        """
        return -(-seq_len // world_size) * world_size

    def dealt_length(self, seq_len: int, world_size: int) -> int:
        """The smallest length from `seq_len` on that leaves no rank without tokens.

        Shards may differ in length, where the layout allows it.
        """
        # Shards are of equal length but for the last one, which needs a token.
        chunk = max(1, -(-seq_len // world_size))
        return max(seq_len, (world_size - 1) * chunk + 1)


@dataclass(frozen=True)
class Contiguous(Layout):
    """Rank r holds the r-th slice of the sequence. Under a causal mask the last rank works most.

    >>> Contiguous().positions(rank=1, world_size=2, seq_len=8)
    [4, 5, 6, 7]
    """

    name: ClassVar[str] = "contiguous"

    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        # Shards are full up to the first that is not, after which they are empty.
        start = min(seq_len, rank * -(-seq_len // world_size))
        return non_empty(Run(start, shard_length(rank, world_size, seq_len)))


@dataclass(frozen=True)
class Striped(Layout):
    """Rank r holds every `world_size`-th token from r on (Brandon et al., 2023, arXiv 2311.09431).

    >>> Striped().positions(rank=1, world_size=2, seq_len=8)
    [1, 3, 5, 7]
    """

    name: ClassVar[str] = "striped"

    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        if seq_len % world_size:
            raise ValueError(
                f"the striped layout needs a sequence length that is a multiple of the "
                f"{world_size} ranks of the ring, got {seq_len}; pad it to "
                f"{self.padded_length(seq_len, world_size)} tokens or use zigzag or contiguous"
            )
        return non_empty(Run(rank, seq_len // world_size, world_size))

    def dealt_length(self, seq_len: int, world_size: int) -> int:
        return self.padded_length(max(1, seq_len), world_size)


@dataclass(frozen=True)
class ZigZag(Layout):
    """Rank r holds chunks r and 2W-1-r of 2W (as Llama 3 did, arXiv 2407.21783, section 3.3.2).

    Where 2W does not divide the length, each shard is halved: the first halves are dealt
    in rank order from the front, the second halves from the back.

    >>> ZigZag().positions(rank=0, world_size=2, seq_len=8)
    [0, 1, 6, 7]
    """

    name: ClassVar[str] = "zigzag"

    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        # Early chunks see few keys, late ones many: one of each evens the work out.
        return _halves(rank, -(-seq_len // world_size), 0, seq_len)

    def padded_length(self, seq_len: int, world_size: int) -> int:
        # Two chunks for each rank, all of one length.
        return -(-seq_len // (2 * world_size)) * 2 * world_size


@dataclass(frozen=True)
class BlockCyclic(Layout):
    """Blocks of `block` tokens are dealt there and back: to ranks 0 to W-1, then W-1 to 0, ...

    So causal work is even at any length. Tokens that are left after whole rounds there and back are
    dealt as zigzag does: halves from the front in rank order, halves from the back.

    Args:
        block: tokens of a block; small ones make many runs, hence many tiles.

    Raises:
        ValueError: if a block has no tokens.
        TypeError: if `block` is not an integer.

    >>> BlockCyclic(2).positions(rank=0, world_size=2, seq_len=12)
    [0, 1, 6, 7, 8, 11]
    """

    name: ClassVar[str] = "block_cyclic"
    parameters: ClassVar[tuple[str, ...]] = ("block",)

    block: int

    def __post_init__(self) -> None:
        if isinstance(self.block, bool) or not isinstance(self.block, int):
            raise TypeError(f"block counts tokens, an int, got {self.block!r}")
        if self.block < 1:
            raise ValueError(f"a block holds at least one token, got {self.block}")

    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        # The shortest shard bounds the rounds. Each round there has one back, which evens work out.
        shortest = shard_length(world_size - 1, world_size, seq_len)
        num_rounds = 2 * (shortest // (2 * self.block))
        if num_rounds > MAX_ROUNDS:
            raise ValueError(
                f"{self.spec} deals {seq_len} tokens to {world_size} ranks in {num_rounds:,} "
                f"blocks for each, at most {MAX_ROUNDS:,} can be planned; take a larger block"
            )
        blocks = [nth_block(rank, n, world_size) for n in range(num_rounds)]
        per_rank = -(-seq_len // world_size) - num_rounds * self.block
        rest = _halves(rank, per_rank, num_rounds * world_size * self.block, seq_len)
        return joined([*(Run(n * self.block, self.block) for n in blocks), *rest])

    def padded_length(self, seq_len: int, world_size: int) -> int:
        return ZigZag().padded_length(seq_len, world_size)


def _halves(rank: int, per_rank: int, begin: int, end: int) -> tuple[Run, ...]:
    """Deal positions `begin` to `end`: first halves in rank order, second halves in reverse.

    A rank gets `per_rank` positions, but the last rank that has any may get fewer.
    """
    # No divmod: a compiler traces this with a length that is a symbol, and knows none.
    num_full = (end - begin) // per_rank if per_rank else 0
    rest = end - begin - num_full * per_rank
    length = per_rank if rank < num_full else rest if rank == num_full else 0
    # All ranks before this one are full, but for the shorter one and those after it.
    full, has_rest = min(rank, num_full), rank > num_full
    front = full * -(-per_rank // 2) + has_rest * -(-rest // 2)
    back = full * (per_rank // 2) + has_rest * (rest // 2)
    first = Run(begin + front, -(-length // 2))
    return non_empty(first, Run(end - back - length // 2, length // 2))


def non_empty(*runs: Run) -> tuple[Run, ...]:
    """The runs that hold a token."""
    return tuple([run for run in runs if run.length])


@dataclass(frozen=True)
class Joined(Layout):
    """Group g holds what ranks `g * heads` to `(g + 1) * heads - 1` of a layout hold together.

    Its ranks are the groups. Their tokens are in the order of positions.

    >>> from dtensor_ring.planning.layout import ZigZag
    >>> Joined(ZigZag(), 2).positions(rank=0, world_size=2, seq_len=16)
    [0, 1, 2, 3, 12, 13, 14, 15]
    """

    name: ClassVar[str] = "joined"
    parameters: ClassVar[tuple[str, ...]] = ("layout", "heads")

    layout: Layout
    heads: int

    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        num_ranks = world_size * self.heads
        runs = [run for x in self._ranks(rank) for run in self.layout.runs(x, num_ranks, seq_len)]
        starts, lengths, strides = (
            np.array([(run.start, run.length, run.stride) for run in runs], dtype=np.int64)
            .reshape(-1, 3)
            .T
        )
        # Runs of a stride lie between one another: what is left of them are their single tokens.
        pieces = np.where(strides > 1, lengths, 1)
        whose, number = expanded(np.zeros_like(pieces), pieces)
        firsts = starts[whose] + number * strides[whose]
        sizes = np.where(strides > 1, 1, lengths)[whose]
        _, firsts, ends = united(np.zeros_like(firsts), firsts, firsts + sizes)
        return tuple(map(Run, firsts.tolist(), (ends - firsts).tolist()))

    def num_tokens(self, rank: int, world_size: int, seq_len: int) -> int:
        num_ranks = world_size * self.heads
        return sum(self.layout.num_tokens(x, num_ranks, seq_len) for x in self._ranks(rank))

    def _ranks(self, group: int) -> range:
        """The ranks of a group."""
        return range(group * self.heads, (group + 1) * self.heads)
