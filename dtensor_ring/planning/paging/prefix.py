"""Blocks that are kept for sequences which begin alike, as a tree: a node for each full block."""

from __future__ import annotations

from dataclasses import dataclass, field


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
