"""Attention of a few queries of many sequences to keys in blocks, on one rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from dtensor_ring.compute.accumulate import RunningOutput
from dtensor_ring.compute.execute import forward_step
from dtensor_ring.compute.kernels.kernel import Scores
from dtensor_ring.compute.kernels.paged_kernel import PagedKernel, Pages
from dtensor_ring.compute.memory import Numbers, part_of, region
from dtensor_ring.compute.trace import Label
from dtensor_ring.decode.op import DecodeRequest
from dtensor_ring.decode.plan import decode_step
from dtensor_ring.paged.block_pool import BlockPool
from dtensor_ring.paged.blocks import PooledSequence
from dtensor_ring.paged.kernels import block_kernel
from dtensor_ring.paged.plan import BlockReads, Read, block_reads, slots_of
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.mask import Documents, Mask
from dtensor_ring.planning.plan import Step
from dtensor_ring.planning.ranges import length
from dtensor_ring.planning.run_table import MARKED, RunTable


@dataclass(frozen=True)
class Entries:
    """One launch of a paged kernel: entries with the same number of queries."""

    reads: tuple[Read, ...]
    pages: Pages

    def queries(self, query: Tensor) -> Tensor:
        """Select the entries' queries `(E, R, N, H)` from `(B, N, M, H)`."""
        if self.are_all(query):
            return query.transpose(1, 2)
        return torch.cat([part_of(query, region(x.batch, x.rows)) for x in self.reads]).transpose(
            1, 2
        )

    def are_all(self, query: Tensor) -> bool:
        """Return whether each batch row is one entry with all its queries, in order."""
        rows = [(row, (0, query.shape[2])) for row in range(len(query))]
        return [(x.batch, x.rows) for x in self.reads] == rows


def pages_of(reads: BlockReads, tables: Sequence[np.ndarray], block: int) -> np.ndarray:
    """Return the blocks that are read, ascending and each once.

    Args:
        reads: the keys that the queries see.
        tables: by batch row, the blocks of the row's sequence on this rank.
        block: tokens of a block.
    """
    spans = [(x.batch, (x.first * block, x.first * block + x.num_keys)) for x in reads.reads]
    spans += [(row, span) for row, cols in enumerate(reads.cols) for span in cols.spans]
    found = [tables[row][begin // block : -(-end // block)] for row, (begin, end) in spans]
    return np.unique(np.concatenate([np.zeros(0, dtype=np.int32), *found]))


class PagedStep:
    """The attention of a batch of sequences on one rank; all layers use the same object.

    Args:
        reads: the keys that the queries see.
        tables: by batch row, the blocks of the row's sequence on this rank.
        block: tokens of a block.
        pages: the blocks that `forward` gets copies of, ascending, all that are read among them;
            `None` if it gets the memory of all blocks.
    """

    def __init__(
        self,
        reads: BlockReads,
        tables: Sequence[np.ndarray],
        block: int,
        pages: np.ndarray | None = None,
    ) -> None:
        self._reads, self._block, self.pages = reads, block, pages
        if pages is not None:  # blocks count from 0 among the pages; those nobody reads, anyhow
            last = max(0, len(pages) - 1)
            tables = [np.minimum(np.searchsorted(pages, table), last) for table in tables]
        self._tables = tables
        self._edges = Step(0, 0, Cols(), reads.edges)

    @cached_property
    def _launches(self) -> tuple[Entries, ...]:
        by_length: dict[int, list[Read]] = defaultdict(list)
        for read in self._reads.reads:
            by_length[length(read.rows)].append(read)
        return tuple(Entries(tuple(reads), self._pages(reads)) for reads in by_length.values())

    def _pages(self, reads: list[Read]) -> Pages:
        lengths = np.array([read.num_keys for read in reads], dtype=np.int32)
        width = -(-int(lengths.max()) // self._block)
        tables = np.zeros((len(reads), width), dtype=np.int32)
        for row, read in zip(tables, reads, strict=True):
            found = self._tables[read.batch][read.first :][:width]
            row[: len(found)] = found
        return Pages(tables, lengths, self._block)

    @cached_property
    def _slots(self) -> Numbers:
        """Return the slots of the edges' columns in the pool, `(B, C)`, padded with 0."""
        width = max(map(len, self._reads.cols))
        slots = np.zeros((len(self._tables), width), dtype=np.int64)
        for row, table, cols in zip(slots, self._tables, self._reads.cols, strict=True):
            spans = [np.arange(*span) for span in cols.spans]
            found = np.concatenate(spans) if spans else np.arange(0)
            row[: len(found)] = slots_of(table, found, self._block)
        return Numbers(torch.int64, torch.from_numpy(slots))

    def forward(
        self,
        query: Tensor,
        key_blocks: Tensor,
        value_blocks: Tensor,
        kernel: PagedKernel,
        scores: Scores,
    ) -> tuple[Tensor, Tensor]:
        """Return `(out, lse)` of the queries over the keys of this rank, float32 or wider.

        Args:
            query: `(B, N, M, H)`.
            key_blocks: all blocks, or copies of `pages`, `(num_blocks, block, Nkv, H)`.
            value_blocks: `(num_blocks, block, Nkv, Hv)`.
            kernel: the paged kernel that reads whole blocks.
            scores: scale and softcap.
        """
        wide = torch.promote_types(query.dtype, torch.float32)
        running = RunningOutput(query, value_blocks.shape[3], dtype=wide)
        for entries in self._launches:
            found = kernel.forward(
                entries.queries(query), key_blocks, value_blocks, entries.pages, scores
            )
            self._add(running, query, entries, *found)
        if self._reads.edges:
            slots = self._slots.on(query.device)[0]
            kv = (
                key_blocks.flatten(0, 1)[slots].transpose(1, 2),
                value_blocks.flatten(0, 1)[slots].transpose(1, 2),
            )
            edge_kernel = block_kernel(query, key_blocks.shape[2], value_blocks.shape[3], scores)
            label = Label("decode", 0, 0)
            forward_step(
                self._edges, query, kv, running, edge_kernel, scores, label, with_segments=False
            )
        return running.result()

    def _add(
        self, running: RunningOutput, query: Tensor, entries: Entries, out: Tensor, lse: Tensor
    ) -> None:
        """Merge a kernel's results `(E, R, N, Hv)` and `(E, N, R)` into the partial."""
        out = out.transpose(1, 2)
        if entries.are_all(query):
            running.make_room()
            running.add(region(None, (0, query.shape[2])), out, lse)
            return
        for number, read in enumerate(entries.reads):
            running.make_room()
            one = slice(number, number + 1)
            running.add(region(read.batch, read.rows), out[one], lse[one])


class PagedPlan:
    """The plan of a step for all layers; each part is computed at its first use.

    Args:
        pool: the pool of the sequences.
        rank: the rank of the pool that owns the blocks.
        sequences: the sequences, in the order of the batch rows.
        num_tokens: M, the number of new tokens of each sequence.
        kv_dtype: the format of full blocks, if they are rounded: attention then reads copies.
    """

    def __init__(
        self,
        pool: BlockPool,
        rank: int,
        sequences: Sequence[PooledSequence],
        num_tokens: int,
        kv_dtype: str | None = None,
    ) -> None:
        self._pool, self._rank, self._kv_dtype = pool, rank, kv_dtype
        self._sequences, self._num_tokens = sequences, num_tokens
        self._steps: dict[tuple[Mask, bool], PagedStep] = {}

    @property
    def sources(self) -> Numbers:
        """Return the indices of this rank's tokens among the B * M new ones."""
        return self._places[0]

    @property
    def slots(self) -> Numbers:
        """Return the slots of this rank's tokens among all tokens of its blocks."""
        return self._places[1]

    @cached_property
    def _places(self) -> tuple[Numbers, ...]:
        sources, slots = [], []
        for row, (sequence, table) in enumerate(zip(self._sequences, self._tables, strict=True)):
            begin, dealing = len(sequence) - self._num_tokens, self._pool.dealing
            mine, columns = dealing.columns(begin, len(sequence), self._rank)
            sources.append(mine + row * self._num_tokens)
            slots.append(slots_of(table, columns, dealing.block))
        lists = (np.concatenate([np.arange(0), *x]) for x in (sources, slots))
        return tuple(Numbers(torch.int64, torch.from_numpy(x)) for x in lists)

    @cached_property
    def pages(self) -> np.ndarray:
        """Return the blocks of all sequences on this rank, ascending; block 0 if there is none."""
        found = np.unique(np.concatenate([np.zeros(0, dtype=np.int32), *self._tables]))
        # Models that expand what they keep cannot view an empty tensor.
        return found if len(found) else np.zeros(1, dtype=np.int32)

    def step(self, mask: Mask, from_pages: bool = False) -> PagedStep:
        """Return the step for a mask.

        Args:
            mask: which keys a query sees.
            from_pages: whether it gets copies of all `pages`, in any form.
        """
        if (mask, from_pages) not in self._steps:
            block, pages = self._pool.dealing.block, self.pages if from_pages else None
            tiles = decode_step(*self.request(mask)).tiles
            reads = block_reads(tiles, block, len(self._tables))
            if pages is None and self._kv_dtype is not None:
                pages = pages_of(reads, self._tables, block)
            self._steps[mask, from_pages] = PagedStep(reads, self._tables, block, pages)
        return self._steps[mask, from_pages]

    def request(self, mask: Mask) -> DecodeRequest:
        """Return the input of the planner; ranks differ in their rank only."""
        runs, ends, starts = self._lengths
        where = self._rank, self._pool.dealing.world_size, runs.end
        return DecodeRequest(runs, mask, *where, starts, self._num_tokens, ends, None)

    def agreed(self, layer: int) -> Tensor:
        """Return the integers that ranks compare, to detect that they have drifted apart."""
        return torch.cat([torch.tensor([layer], device="cpu"), self._drifting])

    @cached_property
    def _drifting(self) -> Tensor:
        """Return the number, length, written length and new tokens of all sequences."""
        last = [x.tokens[len(x) - self._num_tokens :] for x in self._sequences]
        numbers = [y for x in self._sequences for y in (x.number, len(x), x.num_written)]
        numbers += [y for x in last for y in x]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    @cached_property
    def _lengths(self) -> tuple[RunTable, Documents, tuple[int, ...]]:
        """Return the runs of all ranks, the extent of each sequence, and its first new position."""
        lengths = [len(x) for x in self._sequences]
        # One table serves all sequences: the owner of a token depends on its position only.
        numbers = self._pool.dealing.runs(0, max(lengths, default=0))
        if self._kv_dtype is not None:  # ranks compare the mark of the runs
            numbers = np.pad(numbers, ((0, 0), (0, 1), (0, 0)))
            numbers[0, -1, 0] = MARKED | crc32(self._kv_dtype.encode()) & (MARKED - 1)
        runs = RunTable(numbers)
        # The end of a sequence hides stale content in the rest of its last block.
        ends = Documents([(0, length) for length in lengths])
        return runs, ends, tuple(length - self._num_tokens for length in lengths)

    @cached_property
    def _tables(self) -> list[np.ndarray]:
        """Return the blocks of each sequence on this rank."""
        return [self._pool.block_table(x, self._rank) for x in self._sequences]
