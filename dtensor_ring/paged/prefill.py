"""The next tokens of pooled prompts, as one sequence that is sharded over the ranks.

The sequence has two parts. First come the tokens that the pool holds already, block by block: a
block that several prompts share is there once. Then come the new tokens, prompt by prompt. So the
queries are the last tokens of the sequence, as for any cache, and slices say what they see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dtensor_ring.compute.memory import Numbers
from dtensor_ring.paged.api import PagedCache, check_current, check_new_tokens
from dtensor_ring.paged.block_pool import BlockPool
from dtensor_ring.paged.blocks import PooledSequence
from dtensor_ring.paged.plan import slots_of
from dtensor_ring.planning.layout import Layout, Serpentine
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.ranges import Span, as_count, length
from dtensor_ring.planning.run_table import RunTable
from dtensor_ring.planning.slice_tables import UNBOUNDED, stacked
from dtensor_ring.planning.slices import Slices, slices_of


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


Chunk = tuple[PooledSequence, int]


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
        # Prompts b and c share their first block. What is held comes first, then new tokens:
        #     sequence    b0 b1 c1 | new of b | new of c
        #     prompt b    b0 b1 as one piece, and its new tokens
        #     prompt c    b0 and c1 as two, since b1 is between them, and its new tokens
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
            # Prompts that share a prefix share its blocks, which are gathered once.
            if cached not in self.cached:
                self.cached[cached] = self.num_cached
                self.num_cached += length(tokens)
            piece = PromptPiece(self.cached[cached], tokens)
            # Blocks that lie side by side in both orders are one piece, so masks have fewer slices.
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
        runs = [np.add(self._dealing.runs(x.tokens[0], x.tokens[1]), (x.shift, 0)) for x in new]
        return np.concatenate(runs, axis=1).astype(np.int32)

    @property
    def key_runs(self) -> np.ndarray:
        """Return the runs of all tokens, in the same form."""
        cached = np.zeros((self._dealing.world_size, len(self.cached), 2), dtype=np.int32)
        for at, (block, start) in enumerate(self.cached.items()):
            cached[block.rank, at] = start, block.num_tokens
        return np.concatenate([cached, self.query_runs], axis=1)

    def slices(self, mask: Mask) -> Slices:
        """Return the slices that the new tokens see, if each prompt has the mask for itself."""
        rows = []
        for pieces in self.prompts:
            begin, end = pieces[-1].tokens
            (table,) = slices_of(mask, (end, end)).tables
            # Queries of tokens that are held already were computed in an earlier step.
            table = table[table[:, 1] > begin]
            rows += [_moved(table, piece, pieces[-1]) for piece in pieces]
        return Slices.of_tables(_joined(stacked(rows)))


def _moved(table: np.ndarray, keys: PromptPiece, queries: PromptPiece) -> np.ndarray:
    """Return the slices of a piece of queries and a piece of keys, moved to where both lie."""
    (first, end), (first_key, end_key) = queries.tokens, keys.tokens
    q_begin, q_end = (np.clip(x, first, end) + queries.shift for x in table.T[:2])
    k_begin, k_end = (np.clip(x, first_key, end_key) + keys.shift for x in table.T[2:4])
    # Lags in the sequence are larger: what comes between the pieces is not of the prompt.
    apart = queries.shift - keys.shift
    left, right = table.T[4] + apart, table.T[5] - apart
    pieces = np.stack([q_begin, q_end, k_begin, k_end, left, right], axis=1)
    pieces = pieces[(q_begin < q_end) & (k_begin < k_end)]
    # Bounds that hide nothing are dropped, so that prompts which see the same can be joined.
    q_begin, q_end, k_begin, k_end, left, right = pieces.T
    pieces[left >= q_end - 1 - k_begin, 4] = UNBOUNDED
    pieces[right >= k_end - 1 - q_begin, 5] = UNBOUNDED
    return pieces


def _joined(table: np.ndarray) -> np.ndarray:
    """Join neighbouring queries that see all of the same keys: one tile instead of many."""
    # In the order of keys, then queries, so that rows that can be joined are neighbours.
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


def prompt_layout(pool: BlockPool, chunks: Sequence[tuple[PooledSequence, int]]) -> Layout:
    """Return where a pool keeps the next tokens of prompts, counted one prompt after another.

    With it `relayout` brings tokens of a prefill into an order that layers other than attention
    need, and back.

    Args:
        pool: the pool.
        chunks: sequences, whose first `num_written` tokens were committed, and the number of
            tokens after those, of each.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if a sequence is not in the pool, or has fewer tokens, or there is none.

    >>> pool = BlockPool(num_blocks=4, block=2, world_size=2)
    >>> chunks = [(pool.add([5, 6, 7]), 3), (pool.add([8, 9]), 2)]
    >>> [prompt_layout(pool, chunks).positions(rank, 2, seq_len=5) for rank in range(2)]
    [[0, 1, 3, 4], [2]]
    """
    if not isinstance(pool, BlockPool):
        raise TypeError(f"pool must be a BlockPool, got {pool!r}")
    runs, start = [], 0
    for sequence, num_tokens in chunks:
        pool.check(sequence)
        begin = sequence.num_written
        end = begin + as_count("num_tokens", num_tokens, 1, len(sequence) - begin)
        runs.append(pool.dealing.runs(begin, end) + np.array([start - begin, 0]))
        start += num_tokens
    if not runs:
        raise ValueError("a step has tokens of one sequence or several, got no chunks")
    return RunTable(np.concatenate(runs, axis=1))


class PagedPrefill:
    """A step of a model: the next tokens of prompts, each computed by the rank that keeps it.

    Each layer writes this rank's keys and values, gathers what this rank has of the prompts, and
    attends by one ring for all of them. What several prompts share travels once. Then
    `BlockPool.commit` takes the length of each. A prompt may come in several steps.

    Args:
        cache: the cache of this rank.
        chunks: sequences, whose first `num_written` tokens were committed, and the number of
            tokens after those, of each.

    Attributes:
        positions: the positions of this rank's new tokens in their sequences, `(L,)`, int64,
            sequence by sequence.
        runs: the runs of all new tokens by rank, for `ring_attention`.
        key_runs: the runs of the keys by rank.
        num_columns: the number of keys that `gather` returns.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if a sequence is not in the pool, or has fewer tokens.

    >>> pool = BlockPool(num_blocks=4, block=4)
    >>> cache = PagedCache(pool, num_kv_heads=2, head_dim=8, num_layers=1)
    >>> prompt, other = pool.add([5, 6, 7]), pool.add([8, 9])
    >>> step = PagedPrefill(cache, [(prompt, 2), (other, 2)])
    >>> new = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    >>> step.write(0, *new)
    >>> keys, values = step.gather(0, *new)
    >>> pool.commit(prompt, 2)
    >>> step.positions, keys.shape
    (tensor([0, 1, 0, 1]), torch.Size([1, 2, 4, 8]))
    """

    def __init__(self, cache: PagedCache, chunks: Sequence[tuple[PooledSequence, int]]) -> None:
        if not isinstance(cache, PagedCache):
            raise TypeError(f"cache must be a PagedCache, got {cache!r}")
        for sequence, num_tokens in chunks:
            cache.pool.check(sequence)
            as_count("num_tokens", num_tokens, 1, len(sequence) - sequence.num_written)
        self._cache, self._sequences = cache, [sequence for sequence, _ in chunks]
        if not len({x.number for x in self._sequences}) == len(chunks) > 0:
            raise ValueError(
                f"a step has tokens of one sequence or several, each once, got {chunks}"
            )
        self._versions = [sequence.version for sequence in self._sequences]
        dealing, rank = cache.pool.dealing, cache.rank
        positions, slots = [], []
        for sequence, num_tokens in chunks:
            begin = sequence.num_written
            mine, columns = dealing.columns(begin, begin + num_tokens, rank)
            positions.append(mine + begin)
            slots.append(slots_of(cache.pool.block_table(sequence, rank), columns, dealing.block))
        self._slots = Numbers(torch.int64, torch.from_numpy(np.concatenate(slots)))
        self.positions = torch.from_numpy(np.concatenate(positions))
        self._packed = PackedPrompts(chunks, dealing)
        self.runs = torch.from_numpy(self._packed.query_runs)
        self.key_runs = torch.from_numpy(self._packed.key_runs)
        self._mine = [x for x in self._packed.cached if x.rank == rank]
        self.num_columns = sum(x.num_tokens for x in self._mine) + len(self.positions)
        self._slices: dict[Mask, Tensor] = {}

    def slices(self, mask: Mask) -> Tensor:
        """Return the slices for `ring_attention`, if each prompt has this mask for itself."""
        if mask not in self._slices:
            self._slices[mask] = torch.from_numpy(self._packed.slices(mask).numbers)
        return self._slices[mask]

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the keys and values of this rank's new tokens in a layer.

        Args:
            layer: the index of the layer.
            key: `(1, Nkv, L, H)`, in the order of `positions`.
            value: `(1, Nkv, L, Hv)`.

        Raises:
            TypeError: if an argument has the wrong type.
            ValueError: if shapes, dtypes or devices do not fit, there is no such layer, or a
                sequence has changed since the step was made.
        """
        self._check_current()
        number = self._cache._number(layer)
        check_new_tokens(self._cache, key, value, 1, len(self.positions))
        keys, values = (x[0].transpose(0, 1) for x in (key, value))
        with torch.inference_mode(False), torch.no_grad():
            self._cache._memory.write(number, self._slots, (keys, values))

    def gather(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's keys `(1, Nkv, C, H)` and values: those of earlier steps, then these.

        Args:
            layer: the index of the layer.
            key: `(1, Nkv, L, H)`, as for `write`.
            value: `(1, Nkv, L, Hv)`.

        Raises:
            TypeError: if `layer` is not an int.
            ValueError: if there is no such layer, or a sequence has changed since the step was
                made.
        """
        self._check_current()
        number = self._cache._number(layer)
        if not self._mine:
            return key, value
        pages = self._cache._memory.read(number, np.array([x.index for x in self._mine]))
        cached = ([x.flatten(0, 1)[first:end] for first, end in self._spans] for x in pages)
        keys, values = (
            torch.cat([*(x.transpose(0, 1).unsqueeze(0) for x in parts), new], 2)
            for parts, new in zip(cached, (key, value), strict=True)
        )
        return keys, values

    @property
    def _spans(self) -> list[Span]:
        """Return the ranges of tokens that are cached, in pages side by side."""
        block = self._cache.pool.dealing.block
        # A page that is not full ends a range.
        ends = [i + 1 for i, x in enumerate(self._mine) if x.num_tokens < block]
        firsts = [0, *ends, *([len(self._mine)] if ends[-1:] != [len(self._mine)] else [])]
        return [
            (first * block, (end - 1) * block + self._mine[end - 1].num_tokens)
            for first, end in pairwise(firsts)
        ]

    def _check_current(self) -> None:
        check_current(self._sequences, self._versions, "step")
