"""How the tokens of a sequence are dealt to the ranks of a ring."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar


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
        first = max(0, -((self.start - begin) // self.stride))
        last = min(self.length, -((self.start - end) // self.stride))
        return first, max(first, last)


def shard_length(rank: int, world_size: int, seq_len: int) -> int:
    """Tokens that `rank` holds: the sizes of `torch.chunk`, hence of DTensor's `Shard`."""
    chunk = -(-seq_len // world_size)
    return max(0, min(chunk, seq_len - rank * chunk))


class Layout(ABC):
    """Deals the positions `0 ... seq_len - 1` to `world_size` ranks.

    A layout is a hashable value without state. `runs` tells which positions a rank holds, in
    ascending order; each rank holds `shard_length` tokens, so that a local shard is what DTensor's
    `Shard` expects.
    """

    name: ClassVar[str]

    @abstractmethod
    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        """The runs of `rank`, each behind the one before, none of them empty.

        Raises:
            ValueError: if this layout cannot deal `seq_len` tokens to `world_size` ranks.
        """

    def positions(self, rank: int, world_size: int, seq_len: int) -> list[int]:
        """Global position of each local token of `rank`."""
        runs = self.runs(rank, world_size, seq_len)
        return [run.position(index) for run in runs for index in range(run.length)]

    def padded_length(self, seq_len: int, world_size: int) -> int:
        """The smallest length from `seq_len` on that this layout deals evenly, in tokens."""
        return -(-seq_len // world_size) * world_size


@dataclass(frozen=True)
class Contiguous(Layout):
    """Rank r holds the r-th slice of the sequence. Under a causal mask the last rank works most.

    >>> Contiguous().positions(rank=1, world_size=2, seq_len=8)
    [4, 5, 6, 7]
    """

    name: ClassVar[str] = "contiguous"

    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        start = sum(shard_length(other, world_size, seq_len) for other in range(rank))
        return _non_empty(Run(start, shard_length(rank, world_size, seq_len)))


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
        return _non_empty(Run(rank, seq_len // world_size, world_size))


@dataclass(frozen=True)
class ZigZag(Layout):
    """Rank r holds chunks r and 2W-1-r of 2W (as Llama 3 did, arXiv 2407.21783, section 3.3.2).

    Where 2W does not divide the length, each rank's share is halved: the first halves are dealt
    in rank order from the front, the second halves from the back.

    >>> ZigZag().positions(rank=0, world_size=2, seq_len=8)
    [0, 1, 6, 7]
    """

    name: ClassVar[str] = "zigzag"

    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        lengths = [shard_length(other, world_size, seq_len) for other in range(rank + 1)]
        front = [-(-length // 2) for length in lengths]
        back = [length // 2 for length in lengths]
        return _non_empty(Run(sum(front[:-1]), front[-1]), Run(seq_len - sum(back), back[-1]))

    def padded_length(self, seq_len: int, world_size: int) -> int:
        return -(-seq_len // (2 * world_size)) * 2 * world_size


@dataclass(frozen=True)
class RunTable(Layout):
    """Runs written out as data, as a layout that belongs to one batch travels.

    `table` holds, for each rank, `(start, length)` of its runs of neighbouring positions; runs
    without a token fill its rows up.

    Raises:
        ValueError: if the runs do not hold each position once, those of a rank do not ascend, or
            they are not as many as `shard_length` says.
    """

    name: ClassVar[str] = "balanced"

    table: tuple[tuple[tuple[int, int], ...], ...]

    def __post_init__(self) -> None:
        end = 0
        for start, length in sorted(run for row in self.table for run in row if run[1]):
            if start != end or length < 0:
                raise ValueError(f"runs must hold each position once, not so position {end}")
            end += length
        filled = ([run for run in row if run[1]] for row in self.table)
        if any(row != sorted(row) for row in filled):
            raise ValueError("the runs of a rank must be in ascending order, see sequence_runs")
        lengths = [sum(length for _, length in row) for row in self.table]
        expected = [shard_length(rank, len(lengths), end) for rank in range(len(lengths))]
        if lengths != expected:
            raise ValueError(f"runs must give the ranks {expected} tokens, got {lengths}")

    def runs(self, rank: int, world_size: int, seq_len: int) -> tuple[Run, ...]:
        dealt = sum(length for row in self.table for _, length in row)
        if (len(self.table), dealt) != (world_size, seq_len):
            raise ValueError(
                f"these runs deal {dealt} tokens to {len(self.table)} ranks, not {seq_len} tokens "
                f"to {world_size}; make a layout for each batch, see sequence_runs"
            )
        return _non_empty(*(Run(start, length) for start, length in self.table[rank]))


LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (Contiguous(), Striped(), ZigZag())}


def as_layout(layout: Layout | str) -> Layout:
    """The layout itself, or the one of that name.

    Raises:
        ValueError: if no layout has that name, or what has it belongs to one batch.
        TypeError: if `layout` is neither a layout nor a name.
    """
    name = layout.name if isinstance(layout, Layout) else layout
    if not isinstance(name, str):
        raise TypeError(f"a layout is a Layout or its name, got {type(layout).__name__}")
    known = LAYOUTS.get(name)
    if name == RunTable.name:
        raise ValueError(
            "the balanced layout belongs to one batch, so it is passed with it: "
            "ring_attention(..., runs=sequence_runs(Balanced(...))), and so to shard_sequence"
        )
    if known is None or (isinstance(layout, Layout) and layout != known):
        raise ValueError(f"unknown layout {layout!r}; known layouts: {', '.join(LAYOUTS)}")
    return known


def _non_empty(*runs: Run) -> tuple[Run, ...]:
    return tuple(run for run in runs if run.length)
