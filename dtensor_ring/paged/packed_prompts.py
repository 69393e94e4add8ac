"""The next tokens of several prompts as one sequence, so that one ring computes all of them.

The sequence has two parts. First come the tokens that the pool holds already, block by block: a
block that several prompts share is there once. Then come the new tokens, prompt by prompt. So the
queries are the last tokens of the sequence, as for any cache, and slices say what they see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dtensor_ring.paged.blocks import PooledSequence
from dtensor_ring.planning.layout import Serpentine
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.ranges import Span, length
from dtensor_ring.planning.slice_tables import UNBOUNDED, stacked
from dtensor_ring.planning.slices import Slices, slices_of

Chunk = tuple[PooledSequence, int]


class PromptPiece(NamedTuple):
    """Tokens of a prompt that are neighbours in the sequence, too.

    Attributes:
        start: position of the first one in the sequence.
        tokens: range of their positions in the prompt.
    """

    start: int
    tokens: Span

    @property
    def shift(self) -> int:
        """What is added to a position in the prompt."""
        return self.start - self.tokens[0]

    def joined(self, other: PromptPiece) -> PromptPiece | None:
        """Return both as one piece, if the other one continues this one everywhere."""
        if (other.tokens[0], other.shift) != (self.tokens[1], self.shift):
            return None
        return PromptPiece(self.start, (self.tokens[0], other.tokens[1]))


class CachedBlock(NamedTuple):
    """The tokens of a block that prompts hold already.

    Attributes:
        number: the number of the block in the prompt.
        rank: the rank that holds it.
        index: its index among the blocks of this rank.
        num_tokens: the number of tokens; fewer than a block only at the end of what is held.
    """

    number: int
    rank: int
    index: int
    num_tokens: int


class PackedPrompts:
    """Where the tokens of several prompts are in one sequence; all ranks compute the same.

    Args:
        chunks: the prompts, whose first `num_written` tokens the pool holds, and the number of new
            tokens of each.
        dealing: the rule that shards blocks over ranks.

    Attributes:
        cached: the blocks of the first part, each with its position in the sequence.
        prompts: the pieces of each prompt; the last one has its new tokens.
        num_cached: the number of tokens of the first part.
    """

    def __init__(self, chunks: Sequence[Chunk], dealing: Serpentine) -> None:
        self._dealing = dealing
        self.cached: dict[CachedBlock, int] = {}
        self.num_cached = 0
        held = [[*self._held(sequence)] for sequence, _ in chunks]
        self.prompts: list[list[PromptPiece]] = []
        start = self.num_cached
        for pieces, (sequence, num_tokens) in zip(held, chunks, strict=True):
            new = sequence.num_written, sequence.num_written + num_tokens
            self.prompts.append([*pieces, PromptPiece(start, new)])
            start += num_tokens

    def _held(self, sequence: PooledSequence) -> Iterator[PromptPiece]:
        """Enter the blocks of a prompt that are not there yet, and yield its pieces."""
        block, last = self._dealing.block, None
        for number in range(-(-sequence.num_written // block)):
            rank = self._dealing.owner(number)
            index = sequence.blocks[rank][number // self._dealing.world_size]
            tokens = number * block, min((number + 1) * block, sequence.num_written)
            cached = CachedBlock(number, rank, index, length(tokens))
            if cached not in self.cached:
                self.cached[cached] = self.num_cached
                self.num_cached += length(tokens)
            piece = PromptPiece(self.cached[cached], tokens)
            joined = None if last is None else last.joined(piece)
            if last is not None and joined is None:
                yield last
            last = joined or piece
        if last is not None:
            yield last

    @property
    def query_runs(self) -> np.ndarray:
        """Return start and length of each rank's runs of new tokens, `(W, R, 2)`, int32."""
        new = [x[-1] for x in self.prompts]
        runs = [np.add(self._dealing.runs(*x.tokens), (x.shift, 0)) for x in new]
        return np.concatenate(runs, axis=1).astype(np.int32)

    @property
    def key_runs(self) -> np.ndarray:
        """Return the runs of all tokens, in the same form."""
        cached = np.zeros((self._dealing.world_size, len(self.cached), 2), dtype=np.int32)
        for at, (block, start) in enumerate(self.cached.items()):
            cached[block.rank, at] = start, block.num_tokens
        return np.concatenate([cached, self.query_runs], axis=1)

    def slices(self, mask: Mask) -> Slices:
        """Return what the new tokens see, if each prompt has the mask for itself."""
        rows = []
        for pieces in self.prompts:
            begin, end = pieces[-1].tokens
            (table,) = slices_of(mask, (end, end)).tables
            table = table[table[:, 1] > begin]
            rows += [_moved(table, piece, pieces[-1]) for piece in pieces]
        return Slices.of_tables(_joined(stacked(rows)))


def _moved(table: np.ndarray, keys: PromptPiece, queries: PromptPiece) -> np.ndarray:
    """Return what the queries of a piece see of the keys of a piece, in the sequence."""
    q_begin, q_end = (np.clip(x, *queries.tokens) + queries.shift for x in table.T[:2])
    k_begin, k_end = (np.clip(x, *keys.tokens) + keys.shift for x in table.T[2:4])
    # Lags in the sequence are larger: what comes between the pieces is not of the prompt.
    apart = queries.shift - keys.shift
    left, right = table.T[4] + apart, table.T[5] - apart
    found = np.stack([q_begin, q_end, k_begin, k_end, left, right], axis=1)
    found = found[(q_begin < q_end) & (k_begin < k_end)]
    # Bounds that hide nothing are dropped, so that prompts which see the same can be joined.
    q_begin, q_end, k_begin, k_end, left, right = found.T
    found[left >= q_end - 1 - k_begin, 4] = UNBOUNDED
    found[right >= k_end - 1 - q_begin, 5] = UNBOUNDED
    return found


def _joined(table: np.ndarray) -> np.ndarray:
    """Join neighbouring queries that see all of the same keys: one tile instead of many."""
    table = table[np.lexsort((table[:, 0], table[:, 3], table[:, 2]))]
    is_whole = (table[:, 4:] == UNBOUNDED).all(1)
    follows = (
        (table[1:, 2:4] == table[:-1, 2:4]).all(1)
        & (table[1:, 0] == table[:-1, 1])
        & is_whole[1:]
        & is_whole[:-1]
    )
    firsts = np.flatnonzero(np.append(True, ~follows))
    joined = table[firsts]
    joined[:, 1] = table[np.append(firsts[1:], len(table)) - 1, 1]
    return joined
