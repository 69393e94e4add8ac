"""How full a pool of blocks is, and what is said when it is too full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PoolUsage:
    """Blocks of a pool, by rank; `held + cached + free` is `num_blocks` on each.

    Attributes:
        num_blocks: blocks of each rank.
        block: tokens of a block.
        held: blocks that sequences hold.
        shared: those among them that several sequences hold.
        cached: blocks that no sequence holds, kept for prompts that begin alike; given up as soon
            as their memory is needed.
        free: blocks without content.
        num_sequences: sequences in the pool.
    """

    num_blocks: int
    block: int
    held: tuple[int, ...]
    shared: tuple[int, ...]
    cached: tuple[int, ...]
    free: tuple[int, ...]
    num_sequences: int


class OutOfBlocks(RuntimeError):
    """A pool has too few blocks for what was asked of it. The pool is as it was before.

    It is decided from the tables of all ranks, so every rank raises it at the same call.

    >>> try:
    ...     BlockPool(num_blocks=1, block=64, world_size=2).add(range(300))
    ... except OutOfBlocks as error:
    ...     print(error.need, error.free, error.cached)
    (3, 2) (1, 1) (0, 0)

    Attributes:
        need: new blocks that the call needs, by rank.
        free: blocks without content, by rank.
        cached: blocks that could be given up, by rank.
    """

    def __init__(
        self,
        message: str,
        *,
        need: tuple[int, ...] = (),
        free: tuple[int, ...] = (),
        cached: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.need, self.free, self.cached = need, free, cached


def check_room(usage: PoolUsage, need: Sequence[int], hits: Sequence[int]) -> None:
    """Refuse what does not fit.

    Args:
        usage: of the pool as it is.
        need: new blocks, by rank.
        hits: cached blocks that the same call takes into use, so that they cannot be given up.

    Raises:
        OutOfBlocks: if a rank has too few blocks.
    """
    cached = tuple(c - h for c, h in zip(usage.cached, hits, strict=True))
    missing = [n - f - c for n, f, c in zip(need, usage.free, cached, strict=True)]
    most = max(missing)
    if most <= 0:
        return
    raise OutOfBlocks(
        f"out of blocks: rank {missing.index(most)} lacks {most} (by rank, needed {tuple(need)}, "
        f"free {usage.free}, cached and evictable {cached}); free or crop a sequence, or make the "
        f"pool with num_blocks={usage.num_blocks + most}",
        need=tuple(need),
        free=usage.free,
        cached=cached,
    )
