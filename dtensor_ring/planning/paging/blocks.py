"""The blocks of all ranks, and the tree of those that serve prompts which begin alike."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from dtensor_ring.planning.layouts.serpentine import Serpentine
from dtensor_ring.planning.paging.pool_usage import PoolUsage, check_room
from dtensor_ring.planning.paging.prefix import Node
from dtensor_ring.planning.paging.rank_blocks import RankBlocks


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
