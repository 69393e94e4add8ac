"""What a step of a model over sequences in a pool reads and writes on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from dtensor_ring.compute.numbers import Numbers
from dtensor_ring.compute.paged import PagedStep
from dtensor_ring.ops.decode_options import DecodeQuestion
from dtensor_ring.planning.decode import decode_step
from dtensor_ring.planning.layouts.run_table import RunTable
from dtensor_ring.planning.masks.documents import Documents
from dtensor_ring.planning.masks.mask import Mask
from dtensor_ring.planning.paging.block_pool import BlockPool
from dtensor_ring.planning.paging.paged import block_reads, slots_of
from dtensor_ring.planning.paging.pooled import PooledSequence


class PagedPlan:
    """Made once, for all layers of a step, and only as far as it is asked for.

    Args:
        pool: of the sequences.
        rank: of the pool, whose blocks these are.
        sequences: in the order of the batch rows.
        num_tokens: M, the new tokens of each sequence.
    """

    def __init__(
        self, pool: BlockPool, rank: int, sequences: Sequence[PooledSequence], num_tokens: int
    ) -> None:
        self._pool, self._rank = pool, rank
        self._sequences, self._num_tokens = sequences, num_tokens
        self._steps: dict[Mask, PagedStep] = {}

    @cached_property
    def places(self) -> Numbers:
        """Which of the B * M tokens are on this rank, and where."""
        sources, slots = [], []
        for row, sequence in enumerate(self._sequences):
            begin, dealing = len(sequence) - self._num_tokens, self._pool.dealing
            mine, columns = dealing.columns(begin, len(sequence), self._rank)
            sources.append(mine + row * self._num_tokens)
            slots.append(slots_of(self._table(sequence), columns, dealing.block))
        lists = (np.concatenate([np.arange(0), *x]) for x in (sources, slots))
        return Numbers(torch.int64, *map(torch.from_numpy, lists))

    def step(self, mask: Mask) -> PagedStep:
        """What is computed under a mask."""
        if mask not in self._steps:
            block, tables = self._pool.dealing.block, [self._table(x) for x in self._sequences]
            reads = block_reads(decode_step(*self.question(mask)).tiles, block, len(tables))
            self._steps[mask] = PagedStep(reads, tables, block)
        return self._steps[mask]

    def question(self, mask: Mask) -> DecodeQuestion:
        """What the planner is asked: the same on all ranks, but for the rank."""
        runs, ends, starts = self._lengths
        where = self._rank, self._pool.dealing.world_size, runs.end
        return DecodeQuestion(runs, mask, *where, starts, self._num_tokens, ends, None)

    def agreed(self, layer: int) -> Tensor:
        """Integers that are the same on all ranks, unless they have drifted apart."""
        return torch.cat([torch.tensor([layer], device="cpu"), self._drifting])

    @cached_property
    def _drifting(self) -> Tensor:
        """Of each sequence its number, its length, what was written and its new tokens."""
        last = [x.tokens[len(x) - self._num_tokens :] for x in self._sequences]
        numbers = [y for x in self._sequences for y in (x.number, len(x), x.num_written)]
        numbers += [y for x in last for y in x]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    @cached_property
    def _lengths(self) -> tuple[RunTable, Documents, tuple[int, ...]]:
        """Where tokens are, where each sequence ends, and where its new tokens start."""
        lengths = [len(x) for x in self._sequences]
        # One table for all: where a token is depends on its position alone.
        runs = RunTable(self._pool.dealing.runs(0, max(lengths, default=0)))
        # A sequence ends where its tokens do, whatever its blocks held before.
        ends = Documents([(0, length) for length in lengths])
        return runs, ends, tuple(length - self._num_tokens for length in lengths)

    def _table(self, sequence: PooledSequence) -> np.ndarray:
        return self._pool.block_table(sequence, self._rank)
