"""Which slots of a table have the states of which sequences, and which states are kept for others.

A layer with a state has one for each sequence, however long that is. All of its states are in a
table, and a sequence has the same slot in the tables of all layers. These are numbers only: all
ranks decide alike, and `StateMemory` has the tensors.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

from dtensor_ring import BlockPool, OutOfBlocks
from dtensor_ring.extension import PooledSequence


class SlotCopy(NamedTuple):
    """A copy of the states in one slot to another one.

    Attributes:
        source: the slot that is read.
        target: the slot that is written.
    """

    source: int
    target: int


# The slot that no sequence has: its states are those before the first token.
NO_TOKENS = 0


class StateSlots(BlockPool):
    """A pool of blocks whose sequences have a slot each.

    Args:
        num_blocks: see `BlockPool`.
        block: see `BlockPool`.
        world_size: see `BlockPool`.

    Attributes:
        num_slots: how many slots a table must have.
    """

    def __init__(self, num_blocks: int, block: int, world_size: int) -> None:
        super().__init__(num_blocks, block, world_size)
        self.num_slots = 1 + NO_TOKENS
        self._unused: list[int] = []
        self._slots: dict[int, int] = {}  # by number of their sequence
        self._copies: list[SlotCopy] = []

    def slot(self, sequence: PooledSequence) -> int:
        """Return the slot of a sequence."""
        return self._slots[sequence.number]

    def take_copies(self) -> list[SlotCopy]:
        """Return the copies to make before the next tokens are computed, in order, and forget them.

        All that the calls before have decided is as if it had been copied at once.
        """
        found, self._copies = self._copies, []
        return found

    def add(self, tokens: Any) -> PooledSequence:
        """Add a sequence, see `BlockPool.add`; somebody writes its states."""
        return self._begun(super().add(tokens))

    def fork(self, sequence: PooledSequence) -> PooledSequence:
        """Return a second sequence with the same tokens, and a copy of the states after them."""
        forked = self._begun(super().fork(sequence))
        self._copies.append(SlotCopy(self.slot(sequence), self.slot(forked)))
        return forked

    def free(self, sequence: PooledSequence) -> None:
        """Give back the blocks of a sequence, and its slot."""
        super().free(sequence)
        self._give_back(self._slots.pop(sequence.number))

    def _begun(self, sequence: PooledSequence) -> PooledSequence:
        self._slots[sequence.number] = self._take()
        return sequence

    def _take(self) -> int:
        """Return the lowest slot that nobody has."""
        if self._unused:
            return self._unused.pop(0)
        self.num_slots += 1
        return self.num_slots - 1

    def _give_back(self, slot: int) -> None:
        insort(self._unused, slot)


# Note [Known states]: keys are known for each token that a pool keeps, a state only where it was
# copied. So a prompt goes on from the last end of a block at which the pool has both, and computes
# what comes after that again. A state is kept where a prompt leaves what the pool has, where one
# that waits leaves one that is being computed, and of each sequence at the last end of a block that
# it reached. The first two are kept in any case, and the third until the sequence reaches the next
# one. If there are too many, the least recently used one goes.
class KnownStates(StateSlots):
    """`StateSlots` that also keep states for prompts that begin alike, see Note [Known states].

    Args:
        num_blocks: see `BlockPool`.
        block: see `BlockPool`.
        world_size: see `BlockPool`.
        max_known: how many states are kept for others.
    """

    def __init__(self, num_blocks: int, block: int, world_size: int, max_known: int) -> None:
        super().__init__(num_blocks, block, world_size)
        self._max_known = max_known
        # By node of the block at whose end they are known, the least recently used first.
        self._known: OrderedDict[Any, int] = OrderedDict()
        self._last: dict[int, Any] = {}  # by number of a sequence, the node of its last one
        self._wanted: defaultdict[int, set[int]] = defaultdict(set)

    def add(self, tokens: Any) -> PooledSequence:
        """Add a sequence, which goes on from the last state that is known.

        Raises:
            OutOfBlocks: if the pool has too few blocks for them.
        """
        sequence = super().add(tokens)
        try:
            self._go_on(sequence, tokens)
        except OutOfBlocks:
            self.free(sequence)
            raise
        return sequence

    def _go_on(self, sequence: PooledSequence, tokens: Any) -> None:
        """Let a sequence begin where its state is known, and note where others will need one."""
        found = [x for x in sequence.nodes if x in self._known]
        slot, num_cached, begin = NO_TOKENS, sequence.num_cached, 0
        if found:
            slot = self._used(found[-1])
            begin = (sequence.nodes.index(found[-1]) + 1) * self.dealing.block
        # The state is known up to `begin` only, so the tokens after it are computed again.
        if begin < num_cached:
            self.crop(sequence, begin)
            self.append(sequence, tokens[begin:])
            self._wanted[sequence.number].add(num_cached)
        self._copies.append(SlotCopy(slot, self.slot(sequence)))

    def _used(self, node: Any) -> int:
        """Return the slot of a known state that another sequence goes on from."""
        self._known.move_to_end(node)
        self._last = {number: x for number, x in self._last.items() if x is not node}
        return self._known[node]

    def expect(self, sequence: PooledSequence, tokens: array[int]) -> None:
        """Note that another prompt waits for the blocks with which a sequence begins like it."""
        block, end, theirs = self.dealing.block, 0, sequence.tokens
        longest = min(len(tokens), len(theirs))
        while (after := end + block) <= longest and tokens[end:after] == theirs[end:after]:
            end = after
        self._wanted[sequence.number].add(end)

    def num_until(self, sequence: PooledSequence, num_tokens: int) -> int:
        """Return how many of the next tokens a step may have: it ends where a state is wanted."""
        ends = [x - sequence.num_written for x in self._wanted[sequence.number]]
        return min([num_tokens, *(x for x in ends if x > 0)])

    def commit(self, sequence: PooledSequence, length: int | None = None) -> None:
        """Mark tokens as written, see `BlockPool.commit`; the state after them may be kept."""
        super().commit(sequence, length)
        written, block = sequence.num_written, self.dealing.block
        if written and written % block == 0:
            self._keep(sequence, sequence.nodes[written // block - 1])

    def free(self, sequence: PooledSequence) -> None:
        """Give back the blocks of a sequence, and its slot."""
        super().free(sequence)
        self._last.pop(sequence.number, None)
        self._wanted.pop(sequence.number, None)

    def _keep(self, sequence: PooledSequence, node: Any) -> None:
        """Keep the state of a sequence, which is at the end of this block."""
        number = sequence.number
        # Its state is known further on now, so the last one stays only if others want it.
        before = self._known.pop(self._last.pop(number, None), None)
        if before is not None:
            self._give_back(before)
        if node not in self._known:
            while len(self._known) >= self._max_known:
                # The state that was used longest ago makes room.
                self._give_back(self._known.popitem(last=False)[1])
            self._known[node] = self._take()
            self._copies.append(SlotCopy(self.slot(sequence), self._known[node]))
            if sequence.num_written not in self._wanted[number]:
                self._last[number] = node
        self._known.move_to_end(node)
