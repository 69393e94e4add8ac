"""Runs: the pieces in which a layout deals positions."""

from __future__ import annotations

from dataclasses import dataclass


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
