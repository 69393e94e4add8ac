"""The blocks of all ranks: who holds them, which prefixes they serve, and how full they are."""

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
class Node:
    """A full block whose content was written, after the blocks of its ancestors.

    Attributes:
        parent: the block before it; `None` at the root, which stands for no block.
        tokens: its tokens, int64, as bytes. A dict compares them whole when it looks a child up, so
            no hash collision gives a prompt the keys of another.
        rank: who holds it.
        index: which of that rank's blocks it is.
        children: the blocks that come after it, by their tokens.
    """

    parent: Node | None
    tokens: bytes
    rank: int
    index: int
    children: dict[bytes, Node] = field(default_factory=dict)

    def extend(self, tokens: bytes, rank: int, index: int) -> Node:
        """A new child."""
        child = self.children[tokens] = Node(self, tokens, rank, index)
        return child

    def cut(self) -> list[Node]:
        """Take this node off the tree, with all that come after it."""
        assert self.parent is not None
        del self.parent.children[self.tokens]
        # A list, not recursion: a prompt of a million tokens is a chain of thousands of blocks.
        found: list[Node] = [self]
        for node in found:
            found.extend(node.children.values())
        return found


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


class RankBlocks:
    """Reference counts of the blocks of a rank.

    A block is *free*, *held* by as many sequences as its count says, or *cached*: no sequence holds
    it, but its content is in the tree of prefixes.

    Args:
        num_blocks: how many there are.
    """

    def __init__(self, num_blocks: int) -> None:
        self.counts = array("i", bytes(4 * num_blocks))
        self.num_shared = 0  # counted along, since usage is asked at every step
        self.nodes: dict[int, Node] = {}
        """Of the blocks that are in the tree."""
        self.cached: OrderedDict[int, Node] = OrderedDict()
        """Those that no sequence holds, the least recently held first: a clock of events."""
        # The first of all free ones is given out, so that kernels read neighbours as one.
        self._num_touched = 0
        self._returned: list[int] = []

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return len(self.counts) - self._num_touched + len(self._returned)

    @property
    def num_held(self) -> int:
        """Blocks that sequences hold."""
        return len(self.counts) - self.num_free - len(self.cached)

    def take(self) -> int:
        """A free block, for a sequence that then holds it."""
        if self._returned:
            index = heappop(self._returned)
        else:
            index, self._num_touched = self._num_touched, self._num_touched + 1
        self.counts[index] = 1
        return index

    def hold(self, index: int) -> None:
        """One sequence more has this block."""
        self.counts[index] += 1
        self.num_shared += self.counts[index] == 2
        self.cached.pop(index, None)

    def release(self, index: int) -> None:
        """One sequence fewer has this block."""
        self.counts[index] -= 1
        self.num_shared -= self.counts[index] == 1
        if self.counts[index]:
            return
        if index in self.nodes:
            self.cached[index] = self.nodes[index]  # the most recently held
        else:
            heappush(self._returned, index)

    def forget(self, index: int) -> None:
        """The content of a block is not in the tree any more."""
        del self.nodes[index]
        if self.cached.pop(index, None) is not None:
            heappush(self._returned, index)


class Blocks:
    """Takes blocks, gives them back, and finds those with a given content.

    Note [What comes after a block in the tree]: a sequence that holds a block of the tree holds all
    that come before it there. So nobody holds what comes after a block that nobody holds, and
    cutting such a block off the tree takes nothing from anybody. Sequences give blocks back from
    their ends, so of a prompt the last block on each rank is the first to be evicted.

    Args:
        num_blocks: blocks of each rank.
        dealing: how blocks are dealt to ranks.
    """

    def __init__(self, num_blocks: int, dealing: Serpentine) -> None:
        self.num_blocks, self.dealing = num_blocks, dealing
        self.ranks = [RankBlocks(num_blocks) for _ in range(dealing.world_size)]
        self.root = Node(None, b"", -1, -1)

    def match(self, tokens: array[int]) -> list[Node]:
        """The longest chain of full blocks with these tokens."""
        found, node = [], self.root
        for start in range(0, len(tokens) - self.dealing.block + 1, self.dealing.block):
            child = node.children.get(tokens[start : start + self.dealing.block].tobytes())
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def check_room(self, first: int, end: int, hits: Sequence[Node] = ()) -> None:
        """Refuse new blocks number `first` to `end` of a sequence that do not fit.

        Args:
            first: number of the first new block.
            end: number after the last one.
            hits: blocks of the tree that the sequence takes into use first.

        Raises:
            OutOfBlocks: if a rank has too few blocks.
        """
        block, num_hits = self.dealing.block, [0] * len(self.ranks)
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
        """A block of a rank: if none is free, the least recently held of the cached ones."""
        blocks = self.ranks[rank]
        if not blocks.num_free:
            self.drop(next(iter(blocks.cached.values())))
        return blocks.take()

    def publish(self, parent: Node, tokens: bytes, rank: int, index: int) -> Node:
        """Enter a block into the tree, or give it back for one that is there already.

        Returns:
            The node; its sequence then holds the block of the node in place of its own.
        """
        node = parent.children.get(tokens)
        if node is None:
            node = self.ranks[rank].nodes[index] = parent.extend(tokens, rank, index)
        elif node.index != index:
            self.ranks[rank].hold(node.index)
            self.ranks[rank].release(index)
        return node

    def drop(self, node: Node) -> None:
        """Forget the content of a block, and of what comes after it in the tree."""
        for found in node.cut():
            self.ranks[found.rank].forget(found.index)

    def usage(self, num_sequences: int = 0) -> PoolUsage:
        """How many blocks of each rank are in which state."""
        return PoolUsage(
            self.num_blocks,
            self.dealing.block,
            tuple(blocks.num_held for blocks in self.ranks),
            tuple(blocks.num_shared for blocks in self.ranks),
            tuple(len(blocks.cached) for blocks in self.ranks),
            tuple(blocks.num_free for blocks in self.ranks),
            num_sequences,
        )
