"""A paged pool of keys and values, sharded over ranks: block tables, shared prefixes, eviction.

The pool holds no tensors. Every rank keeps the tables of all ranks: the same calls in the same
order give every rank the same tables, without a message.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from dtensor_ring.paged.blocks import BlockCopy, Blocks, PooledSequence, PoolUsage, as_tokens
from dtensor_ring.planning.layout import Serpentine
from dtensor_ring.planning.ranges import MAX_RANKS, as_count

# The limit of blocks of all ranks, and of tokens of a block. A block costs the host a few bytes.
MAX_BLOCK = 2**24  # tokens of a block
MAX_BLOCKS = 2**24  # of all ranks


class BlockPool:
    """Maps the tokens of sequences to blocks of each rank.

    The keys and values of a sequence are cut into blocks of `block` tokens. The blocks are sharded
    over the ranks in alternating direction, as in `BlockCyclic`. The owner of a token depends on
    its position only, so prompts with the same beginning share their common full blocks, on any
    number of ranks (vLLM's paged attention does so on one: Kwon et al., 2023, arXiv 2309.06180).

    `commit` marks the content of blocks as written; full blocks then serve later prompts. A block
    stays when its sequences are freed, until its memory is needed. Then the least recently held
    block of the rank is evicted, together with the blocks that follow it in its prompt.

    `PagedCache` has the tensors. Every rank must make the same calls in the same order; all ranks
    then decide alike. An error leaves the pool unchanged.

    Args:
        num_blocks: the number of blocks of each rank.
        block: tokens of a block. On a CPU 64 is good; all paged GPU kernels support 256.
        world_size: the number of ranks.

    Raises:
        TypeError: if an argument is not an int.
        ValueError: if an argument is out of range.

    >>> pool = BlockPool(num_blocks=4, block=2, world_size=2)
    >>> first = pool.add([5, 6, 7, 8, 9])
    >>> pool.commit(first)  # once its keys and values were written
    >>> second = pool.add([5, 6, 7, 8, 1, 2])
    >>> second.num_cached  # so two tokens are left to prefill
    4
    >>> pool.block_table(first, rank=1), pool.block_table(second, rank=1)
    (array([0, 1], dtype=int32), array([0, 2], dtype=int32))
    """

    def __init__(self, num_blocks: int, block: int = 256, world_size: int = 1) -> None:
        block = as_count("block", block, 1, MAX_BLOCK)
        world_size = as_count("world_size", world_size, 1, MAX_RANKS)
        num_blocks = as_count("num_blocks", num_blocks, 1, MAX_BLOCKS // world_size)
        # The first six blocks of a sequence on three ranks, in alternating direction:
        #     rank 0: 0 5    rank 1: 1 4    rank 2: 2 3
        self._blocks = Blocks(num_blocks, Serpentine(block, world_size))
        self._sequences: dict[int, PooledSequence] = {}
        self._num_added = 0

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of each rank."""
        return self._blocks.num_blocks

    @property
    def dealing(self) -> Serpentine:
        """Return the rule that shards blocks of `block` tokens over `world_size` ranks."""
        return self._blocks.dealing

    def add(self, tokens: Any) -> PooledSequence:
        """Add a sequence. It shares committed full blocks that hold the beginning of its prompt.

        The first `num_cached` tokens need no prefill. If that is the whole prompt, compute the
        query of its last token without a write, to get its logits. Write the keys and values of all
        other tokens, and commit them.

        Args:
            tokens: the prompt: integers in any form. Prompts with equal integers share keys, so
                content that is not text needs integers that identify it.

        Raises:
            TypeError: if `tokens` are not integers.
            ValueError: if `tokens` are not one row.
            OutOfBlocks: if the pool has too few blocks for them.
        """
        given = as_tokens(tokens)
        hits = self._blocks.match(given)
        self._blocks.check_room(len(hits), self._num_blocks_of(len(given)), hits)
        sequence = PooledSequence(self._num_added, self.dealing.world_size)
        # Hold the shared blocks before new ones are taken: a take may evict blocks nobody holds.
        for node in hits:
            self._blocks.ranks[node.rank].hold(node.index)
            sequence.blocks[node.rank].append(node.index)
        sequence.nodes = hits
        sequence.num_cached = sequence.num_written = len(hits) * self.dealing.block
        self._extend(sequence, given)
        return self._enter(sequence)

    def append(self, sequence: PooledSequence, tokens: Any) -> tuple[BlockCopy, ...]:
        """Make room for tokens at the end of a sequence.

        If the last block is not full and other sequences hold it, the sequence gets its own copy
        (copy-on-write).

        Args:
            sequence: the sequence to extend.
            tokens: the next tokens: integers in any form.

        Returns:
            The blocks to copy before the new tokens are written, see `PagedCache.copy`: at most one
            block, on one rank.

        Raises:
            TypeError: if `tokens` are not integers.
            ValueError: if `sequence` is not in this pool, or `tokens` are not one row.
            OutOfBlocks: if the pool has too few blocks for them.
        """
        self.check(sequence)
        given = as_tokens(tokens)
        if not given:
            return ()
        last, num_in_last = divmod(len(sequence), self.dealing.block)
        rank, at = self.dealing.owner(last), last // self.dealing.world_size
        blocks = self._blocks.ranks[rank]
        before = sequence.blocks[rank][at] if num_in_last else -1
        # An empty place after a full block needs a new block anyhow, which is nobody else's.
        is_shared = num_in_last > 0 and blocks.counts[before] > 1
        is_kept = num_in_last > 0 and not is_shared
        self._blocks.check_room(last + is_kept, self._num_blocks_of(len(sequence) + len(given)))
        if is_shared:
            blocks.release(sequence.blocks[rank].pop())
        elif before in blocks.nodes:
            # The block is about to change, see Note [What comes after a block in the tree].
            self._blocks.drop(blocks.nodes[before])
        self._extend(sequence, given)
        return (BlockCopy(rank, before, sequence.blocks[rank][at]),) if is_shared else ()

    def crop(self, sequence: PooledSequence, length: int) -> None:
        """Keep the first `length` tokens of a sequence, and give back the blocks of the others.

        Raises:
            TypeError: if `length` is not an int.
            ValueError: if `sequence` is not in this pool, or has fewer tokens.
        """
        self.check(sequence)
        length = as_count("length", length, 0, len(sequence))
        self._release(sequence, self._num_blocks_of(length))
        del sequence.tokens[length:]
        del sequence.nodes[length // self.dealing.block :]
        sequence.num_written = min(sequence.num_written, length)
        sequence.num_cached = min(sequence.num_cached, length)
        # Plans of steps that were made before are out of date.
        sequence.version += 1

    def fork(self, sequence: PooledSequence) -> PooledSequence:
        """Return a second sequence with the same tokens. It shares all blocks until a write to one.

        Raises:
            ValueError: if `sequence` is not in this pool, or has uncommitted tokens.
        """
        self.check(sequence)
        if sequence.num_written < len(sequence):
            raise ValueError(
                f"{len(sequence) - sequence.num_written} tokens of sequence {sequence.number} were "
                "not committed, so both would have to write them; write their keys and values, "
                "and commit them, before it is forked"
            )
        forked = PooledSequence(self._num_added, self.dealing.world_size)
        forked.tokens, forked.nodes = sequence.tokens[:], sequence.nodes[:]
        forked.num_cached = forked.num_written = len(sequence)
        # Lists are copied, blocks are not: each of them is held once more.
        forked.blocks = [row[:] for row in sequence.blocks]
        for blocks, row in zip(self._blocks.ranks, forked.blocks, strict=True):
            for index in row:
                blocks.hold(index)
        return self._enter(forked)

    def free(self, sequence: PooledSequence) -> None:
        """Give back the blocks of a sequence. Committed full ones stay until memory is needed.

        Raises:
            ValueError: if `sequence` is not in this pool, for example because it was freed.
        """
        self.check(sequence)
        self._release(sequence, 0)
        del self._sequences[sequence.number]
        sequence.version += 1

    def commit(self, sequence: PooledSequence, length: int | None = None) -> None:
        """Mark the keys and values of the first `length` tokens as written, in all layers.

        Full blocks then serve other prompts. If another sequence has committed a block with the
        same tokens and the same tokens before it, that block replaces this sequence's own.

        Args:
            sequence: the sequence that was written.
            length: the number of tokens; by default all.

        Raises:
            TypeError: if `length` is not an int.
            ValueError: if `sequence` is not in this pool, or `length` is below the committed length
                or above the length of the sequence.
        """
        self.check(sequence)
        length = len(sequence) if length is None else length
        sequence.num_written = as_count("length", length, sequence.num_written, len(sequence))
        # Its first blocks are in the tree already: a node's parent must come before it.
        for number in range(len(sequence.nodes), sequence.num_written // self.dealing.block):
            self._publish(sequence, number)

    def usage(self) -> PoolUsage:
        """Return the numbers of held, shared, cached and free blocks of every rank."""
        return self._blocks.usage(len(self._sequences))

    def block_table(self, sequence: PooledSequence, rank: int) -> np.ndarray:
        """Return the indices of a sequence's blocks on a rank, in the order of positions, int32.

        Raises:
            TypeError: if `rank` is not an int.
            ValueError: if `sequence` is not in this pool, or there is no such rank.
        """
        self.check(sequence)
        rank = as_count("rank", rank, 0, self.dealing.world_size - 1)
        return np.array(sequence.blocks[rank], dtype=np.int32)

    def held_blocks(self, rank: int) -> np.ndarray:
        """Return whether sequences hold each block of a rank, `(num_blocks,)`, bool.

        Raises:
            TypeError: if `rank` is not an int.
            ValueError: if there is no such rank.
        """
        rank = as_count("rank", rank, 0, self.dealing.world_size - 1)
        return np.array(self._blocks.ranks[rank].counts) > 0

    def runs(self, sequence: PooledSequence, begin: int = 0) -> np.ndarray:
        """Return start and length of the runs of positions of each rank, `(W, R, 2)`, int32.

        As a tensor, they are the `key_runs` of `ring_attention` and `decode_attention`. With
        `begin`, the runs start at that token: they are the `runs` of a prefill.

        Raises:
            TypeError: if `begin` is not an int.
            ValueError: if `sequence` is not in this pool, or has fewer tokens.
        """
        self.check(sequence)
        return self.dealing.runs(as_count("begin", begin, 0, len(sequence)), len(sequence))

    def check(self, sequence: Any) -> None:
        """Refuse anything but a sequence of this pool.

        Raises:
            TypeError: if it is not a sequence.
            ValueError: if it was freed, or belongs to another pool.
        """
        if not isinstance(sequence, PooledSequence):
            raise TypeError(f"sequence must be one that add or fork returned, got {sequence!r}")
        if self._sequences.get(sequence.number) is not sequence:
            raise ValueError(
                f"sequence {sequence.number} is not in this pool: it was freed already, or belongs "
                "to another pool"
            )

    def _num_blocks_of(self, length: int) -> int:
        return -(-length // self.dealing.block)

    def _extend(self, sequence: PooledSequence, tokens: array[int]) -> None:
        """Add tokens to a sequence, and take the blocks that they need; room was checked."""
        sequence.tokens.extend(tokens)
        for number in range(sequence.num_blocks, self._num_blocks_of(len(sequence))):
            rank = self.dealing.owner(number)
            sequence.blocks[rank].append(self._blocks.take(rank))
        sequence.version += 1

    def _enter(self, sequence: PooledSequence) -> PooledSequence:
        self._sequences[sequence.number] = sequence
        self._num_added += 1
        return sequence

    def _release(self, sequence: PooledSequence, num_kept: int) -> None:
        """Give back all blocks but the first `num_kept`, the last block first."""
        # The order in which blocks are released is that in which they are evicted later.
        for number in reversed(range(num_kept, sequence.num_blocks)):
            rank = self.dealing.owner(number)
            self._blocks.ranks[rank].release(sequence.blocks[rank].pop())

    def _publish(self, sequence: PooledSequence, number: int) -> None:
        """Enter a full block of a sequence into the tree, which has the earlier blocks already."""
        rank, start = self.dealing.owner(number), number * self.dealing.block
        row, at = sequence.blocks[rank], number // self.dealing.world_size
        parent = sequence.nodes[-1] if sequence.nodes else self._blocks.root
        tokens = sequence.tokens[start : start + self.dealing.block].tobytes()
        node = self._blocks.publish(parent, tokens, rank, row[at])
        # The tree has a block of the same tokens already: from now on the sequence uses that one.
        if node.index != row[at]:
            row[at] = node.index
            sequence.version += 1
        sequence.nodes.append(node)
