"""Layouts: how the tokens of a sequence are sharded over the ranks of a ring."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
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
        """Return the global position of the run's token `index`."""
        return self.start + index * self.stride

    @property
    def last(self) -> int:
        """Global position of the run's last token."""
        return self.position(self.length - 1)

    def indices(self, begin: int, end: int) -> tuple[int, int]:
        """Return the half-open range of the run's tokens with positions in `[begin, end)`."""
        # Rounded up, as -(-a // b): the first token at or after each end.
        first = max(0, -((self.start - begin) // self.stride))
        last = min(self.length, -((self.start - end) // self.stride))
        return first, max(first, last)


def shard_length(rank: int, world_size: int, seq_len: int) -> int:
    """Return the shard size of `rank`, as in `torch.chunk` and therefore DTensor's `Shard`."""
    # All ranks get a full chunk until the tokens run out.
    chunk = -(-seq_len // world_size)
    return max(0, min(chunk, seq_len - rank * chunk))


def run_positions(runs: Iterable[Run], dtype: type[np.integer] = np.int64) -> np.ndarray:
    """Return the positions that runs hold, run by run."""
    each = (run.start + run.stride * np.arange(run.length, dtype=dtype) for run in runs)
    return np.concatenate([np.empty(0, dtype), *each])


def joined(runs: list[Run]) -> tuple[Run, ...]:
    """Merge adjacent runs; they have stride 1 and ascend."""
    result: list[Run] = []
    for run in runs:
        if result and result[-1].start + result[-1].length == run.start:
            run = Run(result[-1].start, result.pop().length + run.length)
        result.append(run)
    return tuple(result)


def nth_block(rank: int, n: int, world_size: int) -> int:
    """Return the number of a rank's n-th block.

    >>> [nth_block(0, n, 2) for n in range(4)], [nth_block(1, n, 2) for n in range(4)]
    ([0, 3, 4, 7], [1, 2, 5, 6])
    """
    # Odd rounds run backwards, so the last rank of a round is the first of the next one.
    return n * world_size + (world_size - 1 - rank if n % 2 else rank)


class Serpentine(NamedTuple):
    """Shards blocks of `block` tokens over `world_size` ranks W, back and forth.

    Each rank gets one block of every round of W blocks. The owner of a position does not depend on
    the length of the sequence, so prompts with a common prefix have its blocks on the same ranks.
    A rank's *columns* are its tokens in the order of their positions: its n-th block begins at
    column `n * block`.
    """

    block: int
    world_size: int

    def owner(self, number: int) -> int:
        """Return the rank that holds a block.

        >>> [Serpentine(64, 3).owner(number) for number in range(7)]
        [0, 1, 2, 2, 1, 0, 0]
        """
        n, place = divmod(number, self.world_size)
        return self.world_size - 1 - place if n % 2 else place

    def num_before(self, position: int, rank: int) -> int:
        """Count the columns of a rank that come before a position.

        >>> Serpentine(4, 2).num_before(10, rank=0), Serpentine(4, 2).num_before(10, rank=1)
        (4, 6)
        """
        n = position // (self.block * self.world_size)
        # All blocks of earlier rounds, and the part of this round's block before the position.
        start = nth_block(rank, n, self.world_size) * self.block
        return n * self.block + min(self.block, max(0, position - start))

    def nums_before(self, positions: np.ndarray, rank: int) -> np.ndarray:
        """Return `num_before` of each of many positions.

        >>> Serpentine(4, 2).nums_before(np.array([3, 10]), rank=0)
        array([3, 4])
        """
        n = positions // (self.block * self.world_size)
        place = np.where(n % 2, self.world_size - 1 - rank, rank)
        starts = (n * self.world_size + place) * self.block
        return n * self.block + np.clip(positions - starts, 0, self.block)

    def columns(self, begin: int, end: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a rank's positions in `[begin, end)`, minus `begin`, and their columns, int64.

        >>> Serpentine(4, 2).columns(2, 14, rank=0)
        (array([ 0,  1, 10, 11]), array([2, 3, 4, 5]))
        """
        mine, columns = self.located(np.arange(begin, end), rank)
        return np.flatnonzero(mine), columns[mine]

    def located(self, positions: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which positions a rank holds, bool, and their columns, in the same shape.

        >>> Serpentine(4, 2).located(np.array([3, 4, 13]), rank=0)
        (array([ True, False,  True]), array([3, 0, 5]))
        """
        numbers, offsets = np.divmod(positions, self.block)
        n, places = np.divmod(numbers, self.world_size)
        # Each rank has one block in each round, so what it does not hold has a column, too.
        columns = n * self.block + offsets
        return np.where(n % 2, self.world_size - 1 - places, places) == rank, columns

    def runs(self, begin: int, end: int) -> np.ndarray:
        """Return start and length of each rank's runs in `[begin, end)`, `(W, R, 2)`, int32.

        There is one run for each block. Runs of length 0 pad the rows.

        >>> Serpentine(4, 2).runs(2, 10).tolist()
        [[[2, 2], [12, 0]], [[4, 4], [8, 2]]]
        """
        each_round = self.block * self.world_size
        n = np.arange(begin // each_round, -(-end // each_round))
        there = np.arange(self.world_size)[:, None]
        starts = self.block * (n * self.world_size + np.where(n % 2, there[::-1], there))
        firsts, ends = np.maximum(starts, begin), np.minimum(starts + self.block, end)
        return np.stack([firsts, np.maximum(ends - firsts, 0)], axis=2).astype(np.int32)


# Largest number of blocks of a block-cyclic rank.
MAX_ROUNDS = 2**20


class Layout(ABC):
    """Shards the positions `0 ... seq_len - 1` over `world_size` ranks.

    A layout is a hashable value without state.

    Attributes:
        per_batch: whether it is made for one batch, and so travels with it as a table of runs.
        parameters: names of its parameters, which are integers, in the order of its `spec`.
    """

    name: ClassVar[str]
    per_batch: ClassVar[bool] = False
    parameters: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        """Return the runs of `rank`, in the order of its local tokens.

        A layout promises the following, and the planner checks it once for each sequence length:

        - the runs of a rank ascend: each starts after the last position of the previous one;
        - no run is empty, and all runs of all ranks have the same stride;
        - rank r holds `num_tokens(r, world_size, seq_len)` tokens;
        - all ranks together hold every position exactly once.

        Args:
            rank: index on the ring.
            world_size: ranks on the ring.
            seq_len: global length, in tokens.

        Raises:
            ValueError: if this layout cannot shard `seq_len` tokens over `world_size` ranks.
        """

    def num_tokens(self, rank: int, world_size: int, seq_len: int) -> int:
        """Return the number of tokens of `rank`: DTensor's shard size, unless overridden."""
        return shard_length(rank, world_size, seq_len)

    @property
    def spec(self) -> str:
        """The layout as text for `as_layout`: its name, and its parameters after a colon."""
        values = ",".join(str(getattr(self, name)) for name in self.parameters)
        return f"{self.name}:{values}" if values else self.name

    def positions(self, rank: int, world_size: int, seq_len: int) -> list[int]:
        """Return the global position of each local token of `rank`."""
        runs = self.runs(rank, world_size, seq_len)
        return [run.position(index) for run in runs for index in range(run.length)]

    def padded_length(self, seq_len: int, world_size: int) -> int:
        """Return the length to pad to: all ranks get the same number of tokens, in equal pieces.

        It is the smallest one from `seq_len` on, in tokens.
        """
        return -(-seq_len // world_size) * world_size

    def dealt_length(self, seq_len: int, world_size: int) -> int:
        """Return the smallest length from `seq_len` on that leaves no rank without tokens.

        Shards may differ in length if the layout allows it.
        """
        # All shards have equal length except the last one, which needs at least one token.
        chunk = max(1, -(-seq_len // world_size))
        return max(seq_len, (world_size - 1) * chunk + 1)


@dataclass(frozen=True)
class Contiguous(Layout):
    """Rank r holds the r-th chunk of the sequence. Under a causal mask the last rank works most.

    >>> Contiguous().positions(rank=1, world_size=2, seq_len=8)
    [4, 5, 6, 7]
    """

    name: ClassVar[str] = "contiguous"

    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        # Ranks get full shards until the tokens run out; at most one shard is partly full.
        start = min(seq_len, rank * -(-seq_len // world_size))
        return non_empty([Run(start, shard_length(rank, world_size, seq_len))])


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
        return non_empty([Run(rank, seq_len // world_size, world_size)])

    def dealt_length(self, seq_len: int, world_size: int) -> int:
        return self.padded_length(max(1, seq_len), world_size)


@dataclass(frozen=True)
class ZigZag(Layout):
    """Rank r holds chunks r and 2W-1-r of 2W (as Llama 3 did, arXiv 2407.21783, section 3.3.2).

    Where 2W does not divide the length, each shard is halved: the first halves lie in rank order
    from the front, the second halves from the back.

    >>> ZigZag().positions(rank=0, world_size=2, seq_len=8)
    [0, 1, 6, 7]
    """

    name: ClassVar[str] = "zigzag"

    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        # Early chunks see few keys, late ones many: one of each balances the work.
        return _halves(rank, -(-seq_len // world_size), 0, seq_len)

    def padded_length(self, seq_len: int, world_size: int) -> int:
        # Two chunks for each rank, all of one length.
        return -(-seq_len // (2 * world_size)) * 2 * world_size


@dataclass(frozen=True)
class _OfBlocks(Layout):
    """A layout by blocks of `block` tokens.

    Raises:
        ValueError: if a block has no tokens.
        TypeError: if `block` is not an integer.
    """

    parameters: ClassVar[tuple[str, ...]] = ("block",)

    block: int

    def __post_init__(self) -> None:
        check_block(self.block)


@dataclass(frozen=True)
class BlockCyclic(_OfBlocks):
    """Blocks of `block` tokens go back and forth: to ranks 0 to W-1, then W-1 to 0, and so on.

    Causal work is balanced at any length. The tokens left after an even number of rounds are
    sharded as in zigzag: first halves from the front in rank order, second halves from the back.

    Args:
        block: tokens of a block; small blocks make many runs and therefore many tiles.

    Raises:
        ValueError: if a block has no tokens.
        TypeError: if `block` is not an integer.

    >>> BlockCyclic(2).positions(rank=0, world_size=2, seq_len=12)
    [0, 1, 6, 7, 8, 11]
    """

    name: ClassVar[str] = "block_cyclic"

    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        # The shortest shard bounds the rounds. Rounds come in pairs, which balances the work.
        shortest = shard_length(world_size - 1, world_size, seq_len)
        num_rounds = 2 * (shortest // (2 * self.block))
        if num_rounds > MAX_ROUNDS:
            raise ValueError(
                f"{self.spec} shards {seq_len} tokens over {world_size} ranks in {num_rounds:,} "
                f"blocks for each, at most {MAX_ROUNDS:,} can be planned; take a larger block"
            )
        blocks = [nth_block(rank, n, world_size) for n in range(num_rounds)]
        per_rank = -(-seq_len // world_size) - num_rounds * self.block
        rest = _halves(rank, per_rank, num_rounds * world_size * self.block, seq_len)
        return joined([*(Run(n * self.block, self.block) for n in blocks), *rest])

    def padded_length(self, seq_len: int, world_size: int) -> int:
        return ZigZag().padded_length(seq_len, world_size)


def _halves(rank: int, per_rank: int, begin: int, end: int) -> tuple[Run, ...]:
    """Shard positions `begin` to `end`: first halves in rank order, second halves in reverse."""
    # A rank gets `per_rank` positions, but the last rank that has any may get fewer.
    # No divmod: a compiler traces this with a symbolic length, which does not support it.
    num_full = (end - begin) // per_rank if per_rank else 0
    rest = end - begin - num_full * per_rank
    length = per_rank if rank < num_full else rest if rank == num_full else 0
    # Of the ranks before this one, `full` are full, and one more may hold the rest.
    full, has_rest = min(rank, num_full), rank > num_full
    front = full * -(-per_rank // 2) + has_rest * -(-rest // 2)
    back = full * (per_rank // 2) + has_rest * (rest // 2)
    half = -(-length // 2)
    # What is left, and not `length // 2`: symbols of both cancel where a compiler adds them up.
    left = length - half
    return non_empty([Run(begin + front, half), Run(end - back - left, left)])


def non_empty(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Return the runs that hold a token."""
    return tuple([run for run in runs if run.length])


@dataclass(frozen=True)
class WholeBlocks(_OfBlocks):
    """Zigzag of whole blocks: positions from a multiple of `block` to the next one are on one rank.

    This is the layout of sums in a fixed order, see `TransferPolicy`: the blocks are those of the
    sequence, whatever the number of ranks. Shards differ by a block or two, and may be empty.

    Args:
        block: tokens of a block; the last one of a sequence may have fewer.

    Raises:
        ValueError: if a block has no tokens.
        TypeError: if `block` is not an integer.

    >>> WholeBlocks(2).positions(rank=0, world_size=2, seq_len=9)
    [0, 1, 2, 3, 8]
    """

    name: ClassVar[str] = "whole_blocks"

    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        # Zigzag counts blocks here, as it else counts tokens; only the last block may be short.
        blocks = ZigZag().runs(rank, world_size, -(-seq_len // self.block))
        ends = [(run.start * self.block, (run.last + 1) * self.block) for run in blocks]
        return joined([Run(start, min(end, seq_len) - start) for start, end in ends])

    def num_tokens(self, rank: int, world_size: int, seq_len: int) -> int:
        return sum(run.length for run in self.runs(rank, world_size, seq_len))

    def padded_length(self, seq_len: int, world_size: int) -> int:
        return ZigZag().padded_length(-(-seq_len // self.block), world_size) * self.block

    def dealt_length(self, seq_len: int, world_size: int) -> int:
        # The last block may have one token.
        blocks = ZigZag().dealt_length(-(-seq_len // self.block), world_size)
        return max(seq_len, (blocks - 1) * self.block + 1)


def check_block(block: object) -> None:
    """Refuse what is not the number of tokens of a block."""
    if isinstance(block, bool) or not isinstance(block, int):
        raise TypeError(f"block counts tokens, an int, got {block!r}")
    if block < 1:
        raise ValueError(f"a block holds at least one token, got {block}")


@dataclass(frozen=True)
class Joined(Layout):
    """Group g holds what ranks `g * heads` to `(g + 1) * heads - 1` of a layout hold together.

    The groups are the ranks of this layout. Their tokens are in the order of positions.

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
        # Runs with a stride interleave, so split them into single tokens before they are united.
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
        """Return the ranks of a group."""
        return range(group * self.heads, (group + 1) * self.heads)


@dataclass(frozen=True)
class Padded(Layout):
    """The tokens of a sequence that another layout shards with padding at its end, without it.

    Args:
        layout: shards the padded sequence.
        is_even: whether it was padded until all ranks have as many tokens, at least two each, in
            equal pieces; else until no rank is without.

    >>> Padded(Contiguous(), is_even=True).positions(rank=2, world_size=3, seq_len=10)
    [8, 9]
    """

    name: ClassVar[str] = "padded"

    layout: Layout
    is_even: bool = False

    @property
    def per_batch(self) -> bool:  # type: ignore[override]
        """Whether the other layout belongs to a batch."""
        return self.layout.per_batch

    @property
    def spec(self) -> str:
        return f"{'evenly ' * self.is_even}padded {self.layout.spec}"

    @property
    def seq_len(self) -> int | None:
        """The length of the padded sequence, if the other layout is made for one."""
        return getattr(self.layout, "seq_len", None)

    def whole_length(self, seq_len: int, world_size: int) -> int:
        """Return the length of the padded sequence, in tokens."""
        if self.seq_len is not None:
            return self.seq_len
        if self.is_even:
            return self.layout.padded_length(max(seq_len, 2 * world_size), world_size)
        return self.layout.dealt_length(seq_len, world_size)

    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        runs = self.layout.runs(rank, world_size, self.whole_length(seq_len, world_size))
        # Padding is at the end of the sequence, and so at the end of each run.
        return non_empty(Run(run.start, run.indices(0, seq_len)[1], run.stride) for run in runs)

    def num_tokens(self, rank: int, world_size: int, seq_len: int) -> int:
        return sum(run.length for run in self.runs(rank, world_size, seq_len))


# Layouts whose shards may have other lengths than those into which DTensor cuts a tensor.
UNEVEN = Padded, WholeBlocks
