"""A rank's memory of a pool, as the tests play it: a token at each place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dtensor_ring.paged.block_pool import BlockPool
from dtensor_ring.paged.blocks import BlockCopy, PooledSequence


class Memory:
    """What a rank has written, by block and place in it."""

    def __init__(self, pool: BlockPool, rank: int) -> None:
        self.pool, self.rank = pool, rank
        self._content: dict[tuple[int, int], int] = {}

    def places(self, sequence: PooledSequence) -> Iterator[tuple[int, tuple[int, int]]]:
        """This rank's positions of a sequence, and where they are; from the definition alone."""
        block, ranks = self.pool.dealing
        there_and_back = [*range(ranks), *reversed(range(ranks))]
        table = iter(self.pool.block_table(sequence, self.rank).tolist())
        for number in range(-(-len(sequence) // block)):
            if there_and_back[number % (2 * ranks)] == self.rank:
                index = next(table)
                for place in range(min(block, len(sequence) - number * block)):
                    yield number * block + place, (index, place)
        assert not list(table)

    def write(self, sequence: PooledSequence) -> None:
        for position, at in self.places(sequence):
            if position >= sequence.num_written:
                self._content[at] = sequence.tokens[position]

    def read(self, sequence: PooledSequence) -> Iterator[tuple[int, int | None]]:
        for position, at in self.places(sequence):
            yield position, self._content.get(at)

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        for rank, source, target in copies:
            if rank == self.rank:
                for place in range(self.pool.dealing.block):
                    self._content[target, place] = self._content.get((source, place), -1)
