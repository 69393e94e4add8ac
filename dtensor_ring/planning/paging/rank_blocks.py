"""The blocks of one rank: which are free, held by sequences, or kept for later ones."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from heapq import heappop, heappush

from dtensor_ring.planning.paging.prefix import Node


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
