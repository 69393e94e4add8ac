"""The blocks of all ranks: their reference counts, the tree of prefixes, and their usage."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from dtensor_ring.planning.layout import Serpentine
from dtensor_ring.planning.ranges import integer_array


@dataclass(eq=False, slots=True)
class BlockNode:
    """A full, committed block; its ancestors are the blocks before it in the prompt.

    Attributes:
        parent: the block before it; `None` at the root, which stands for no block.
        tokens: its tokens, int64, as bytes. A dict lookup compares all of them, so no hash
            collision gives a prompt the keys of another.
        rank: the rank that holds it.
        index: its index among the blocks of that rank.
        children: the blocks that follow it, by their tokens.
    """

    parent: BlockNode | None
    tokens: bytes
    rank: int
    index: int
    children: dict[bytes, BlockNode] = field(default_factory=dict)

    def extend(self, tokens: bytes, rank: int, index: int) -> BlockNode:
        """Add a child, and return it."""
        child = self.children[tokens] = BlockNode(self, tokens, rank, index)
        return child

    def cut(self) -> list[BlockNode]:
        """Cut this node and its descendants off the tree, and return them all."""
        assert self.parent is not None
        del self.parent.children[self.tokens]
        # No recursion: a prompt of a million tokens is a chain of thousands of blocks.
        found: list[BlockNode] = [self]
        for node in found:
            found.extend(node.children.values())
        return found


@dataclass(frozen=True)
class PoolUsage:
    """The usage of a pool; `held + cached + free` is `num_blocks` on each rank.

    Attributes:
        num_blocks: the number of blocks of each rank.
        block: tokens of a block.
        held: by rank, blocks that sequences hold.
        shared: by rank, blocks among them that several sequences hold.
        cached: by rank, blocks that no sequence holds, kept for prompts with the same beginning,
            and evicted when their memory is needed.
        free: by rank, blocks without content.
        num_sequences: the number of sequences in the pool.
    """

    num_blocks: int
    block: int
    held: tuple[int, ...]
    shared: tuple[int, ...]
    cached: tuple[int, ...]
    free: tuple[int, ...]
    num_sequences: int


class OutOfBlocks(RuntimeError):
    """A pool has too few blocks for a call. The pool is unchanged.

    The tables of all ranks decide this, so every rank raises it at the same call.

    >>> try:
    ...     BlockPool(num_blocks=1, block=64, world_size=2).add(range(300))
    ... except OutOfBlocks as error:
    ...     print(error.need, error.free, error.cached)
    (3, 2) (1, 1) (0, 0)

    Attributes:
        need: new blocks that the call needs, by rank.
        free: blocks without content, by rank.
        cached: blocks that could be evicted, by rank.
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
    """Refuse a call that needs more blocks than a rank can provide.

    Args:
        usage: the current usage of the pool.
        need: new blocks, by rank.
        hits: cached blocks that the same call uses, by rank; they cannot be evicted.

    Raises:
        OutOfBlocks: if a rank has too few blocks.
    """
    # Cached blocks that the call itself reads cannot be evicted for it.
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


class BlockCopy(NamedTuple):
    """A copy of a shared block that must happen before the next write to its sequence.

    Attributes:
        rank: the rank that holds both blocks.
        source: the index of the shared block, which other sequences keep.
        target: the index of the block that gets its content.
    """

    rank: int
    source: int
    target: int


class PooledSequence:
    """A sequence of a `BlockPool`. `add` and `fork` make it, and only the pool changes it.

    Attributes:
        number: the number of the sequence, counted from 0 in each pool.
        num_cached: tokens whose keys and values were cached when it was added; they need no
            prefill.
        num_written: tokens whose keys and values `commit` has marked as written.
        version: how often its tokens or blocks have changed.
        tokens: all tokens, int64.
        blocks: by rank, the indices of its blocks.
        nodes: the nodes of its first blocks, as far as they are in the tree of prefixes.
    """

    def __init__(self, number: int, world_size: int) -> None:
        self.number = number
        self.num_cached = self.num_written = self.version = 0
        self.tokens = array("q")
        self.blocks: list[list[int]] = [[] for _ in range(world_size)]
        self.nodes: list[BlockNode] = []

    @property
    def num_blocks(self) -> int:
        """Return the number of its blocks on all ranks."""
        return sum(map(len, self.blocks))

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"<sequence {self.number}: {len(self)} tokens, {self.num_written} written>"


def as_tokens(given: Any) -> array[int]:
    """Convert a user's tokens to an array of int64.

    Raises:
        TypeError: if they are not integers.
        ValueError: if they are not one row, or exceed int64.
    """
    if isinstance(given, range):
        given = list(given)
    found = integer_array(given, "tokens", "token ids", "(T,)", (1,), given)
    if found.dtype == np.uint64 and found.size and found.max() >= 2**63:
        raise ValueError(f"tokens must be below 2**63, got {given!r}")
    return array("q", found.astype(np.int64).tobytes())


class RankBlocks:
    """The reference counts of the blocks of a rank.

    A block is *free*, *held* by one or more sequences, or *cached*: no sequence holds it, but its
    content is in the tree of prefixes.

    Args:
        num_blocks: the number of blocks.

    Attributes:
        counts: how many sequences hold each block.
        num_shared: the number of blocks that several sequences hold.
        nodes: the nodes of blocks that are in the tree, by index.
        cached: the nodes of cached blocks, by index, the least recently held first.
    """

    def __init__(self, num_blocks: int) -> None:
        # A block's way, where only blocks of the tree are ever cached:
        #     free --take--> held --release--> cached --forget--> free
        #                    held <--hold----- cached
        #                    held --release--> free, if it is not in the tree
        self.counts = array("i", bytes(4 * num_blocks))
        self.num_shared = 0  # updated at each change, because every step may read the usage
        self.nodes: dict[int, BlockNode] = {}
        self.cached: OrderedDict[int, BlockNode] = OrderedDict()
        # The lowest free index is taken first, so sequences get neighbours, which kernels read as
        # one range. Indices from `_num_touched` on have never been taken.
        self._num_touched = 0
        self._returned: list[int] = []

    @property
    def num_free(self) -> int:
        """Return the number of blocks without content."""
        return len(self.counts) - self._num_touched + len(self._returned)

    @property
    def num_held(self) -> int:
        """Return the number of blocks that sequences hold."""
        return len(self.counts) - self.num_free - len(self.cached)

    def take(self) -> int:
        """Return the index of a free block, which one sequence then holds."""
        if self._returned:
            index = heappop(self._returned)
        else:
            index, self._num_touched = self._num_touched, self._num_touched + 1
        self.counts[index] = 1
        return index

    def hold(self, index: int) -> None:
        """Count one more sequence that holds this block."""
        self.counts[index] += 1
        self.num_shared += self.counts[index] == 2
        self.cached.pop(index, None)

    def release(self, index: int) -> None:
        """Count one fewer sequence that holds this block."""
        self.counts[index] -= 1
        self.num_shared -= self.counts[index] == 1
        if self.counts[index]:
            return
        if index in self.nodes:
            self.cached[index] = self.nodes[index]  # the most recently held
        else:
            heappush(self._returned, index)

    def forget(self, index: int) -> None:
        """Note that a block is no longer in the tree; if nobody holds it, it is free."""
        del self.nodes[index]
        if self.cached.pop(index, None) is not None:
            heappush(self._returned, index)


class Blocks:
    """Takes blocks, gives them back, and finds the blocks with a given content.

    Note [What comes after a block in the tree]: a sequence that holds a block of the tree holds all
    ancestors of the block, too. So if nobody holds a block, nobody holds its descendants, and it
    can be cut off the tree without an effect on any sequence. Sequences give blocks back from their
    ends, so the last block of a prompt on each rank is evicted first.

    Args:
        num_blocks: the number of blocks of each rank.
        dealing: the rule that shards blocks over ranks.
    """

    def __init__(self, num_blocks: int, dealing: Serpentine) -> None:
        self.num_blocks, self.dealing = num_blocks, dealing
        self.ranks = [RankBlocks(num_blocks) for _ in range(dealing.world_size)]
        # Two prompts of three full blocks, of which the first two are alike:
        #     root - A - B - C
        #                  \ D
        self.root = BlockNode(None, b"", -1, -1)

    def match(self, tokens: array[int]) -> list[BlockNode]:
        """Return the longest chain of blocks in the tree that hold the first of these tokens."""
        found, node = [], self.root
        # The tree has full blocks only, so the rest of the tokens cannot match.
        for start in range(0, len(tokens) - self.dealing.block + 1, self.dealing.block):
            child = node.children.get(tokens[start : start + self.dealing.block].tobytes())
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def check_room(self, first: int, end: int, hits: Sequence[BlockNode] = ()) -> None:
        """Refuse the new blocks `first` to `end` of a sequence if a rank has no room for them.

        Args:
            first: the number of the first new block.
            end: the number after the last new block.
            hits: blocks of the tree that the sequence will hold, so they cannot be evicted.

        Raises:
            OutOfBlocks: if a rank has too few blocks.
        """
        if first >= end:
            return  # nothing is needed, as for most decoded tokens
        block, num_hits = self.dealing.block, [0] * len(self.ranks)
        # Columns before both ends of these blocks tell how many are a rank's, without a loop.
        need = [
            (
                self.dealing.num_before(end * block, rank)
                - self.dealing.num_before(first * block, rank)
            )
            // block
            for rank in range(len(self.ranks))
        ]
        for node in hits:
            num_hits[node.rank] += node.index in self.ranks[node.rank].cached
        check_room(self.usage(), need, num_hits)

    def take(self, rank: int) -> int:
        """Take a block of a rank: a free one, else the least recently held cached one."""
        blocks = self.ranks[rank]
        if not blocks.num_free:
            self.drop(next(iter(blocks.cached.values())))
        return blocks.take()

    def publish(self, parent: BlockNode, tokens: bytes, rank: int, index: int) -> BlockNode:
        """Enter a block into the tree, or give it back if an equal one is there already.

        Returns:
            The node in the tree; the sequence must use its block in place of its own.
        """
        node = parent.children.get(tokens)
        if node is None:
            node = self.ranks[rank].nodes[index] = parent.extend(tokens, rank, index)
        # Another sequence wrote the same tokens: its block is held in place of this one.
        elif node.index != index:
            self.ranks[rank].hold(node.index)
            self.ranks[rank].release(index)
        return node

    def drop(self, node: BlockNode) -> None:
        """Remove a block and its descendants from the tree."""
        for found in node.cut():
            self.ranks[found.rank].forget(found.index)

    def usage(self, num_sequences: int = 0) -> PoolUsage:
        """Return the number of blocks of each rank in each state."""
        return PoolUsage(
            self.num_blocks,
            self.dealing.block,
            tuple(blocks.num_held for blocks in self.ranks),
            tuple(blocks.num_shared for blocks in self.ranks),
            tuple(len(blocks.cached) for blocks in self.ranks),
            tuple(blocks.num_free for blocks in self.ranks),
            num_sequences,
        )
