"""A sequence in a pool of blocks, and the blocks that are to be copied for it."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import numpy as np

from dtensor_ring.planning.paging.prefix import Node
from dtensor_ring.planning.values.integers import integer_array


class BlockCopy(NamedTuple):
    """Copy a block before the next write: its sequence is about to differ from others.

    Attributes:
        rank: who holds both blocks.
        source: index of the block that others keep.
        target: index of the block that gets its content.
    """

    rank: int
    source: int
    target: int


class PooledSequence:
    """A sequence of a `BlockPool`: made by `add` and `fork`, changed by the pool alone.

    Attributes:
        number: of the sequence; counted from 0 in each pool.
        num_cached: tokens whose keys and values were there when it was added. They need no prefill.
        num_written: tokens whose keys and values were written, as `commit` was told.
        version: how often its tokens or blocks have changed.
    """

    def __init__(self, number: int, world_size: int) -> None:
        self.number = number
        self.num_cached = self.num_written = self.version = 0
        self.tokens = array("q")
        self.blocks: list[list[int]] = [[] for _ in range(world_size)]
        """By rank, indices of its blocks."""
        self.nodes: list[Node] = []
        """Its first blocks, as far as they are in the tree of prefixes."""

    @property
    def num_blocks(self) -> int:
        """Blocks on all ranks."""
        return sum(map(len, self.blocks))

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"<sequence {self.number}: {len(self)} tokens, {self.num_written} written>"


def as_tokens(given: Any) -> array[int]:
    """Tokens as users give them, as int64.

    Raises:
        TypeError: if they are not integers.
        ValueError: if they are not in one row, or beyond int64.
    """
    if isinstance(given, range):
        given = list(given)
    found = integer_array(given, "tokens", "token ids", "(T,)", (1,), given)
    if found.dtype == np.uint64 and found.size and found.max() >= 2**63:
        raise ValueError(f"tokens must be below 2**63, got {given!r}")
    return array("q", found.astype(np.int64).tobytes())
