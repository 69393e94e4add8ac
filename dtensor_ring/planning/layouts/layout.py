"""How the tokens of a sequence are dealt to the ranks of a ring."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from dtensor_ring.planning.layouts.run import Run, joined, shard_length
from dtensor_ring.planning.layouts.serpentine import nth_block

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
