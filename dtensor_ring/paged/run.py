"""Attention of a few queries of many sequences to keys in blocks, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from dtensor_ring.compute.accumulate import RunningOutput
from dtensor_ring.compute.kernels.kernel import PagedKernel, Pages, Scores
from dtensor_ring.compute.kernels.reference import attend_visible
from dtensor_ring.compute.memory import Numbers
from dtensor_ring.decode.plan import DecodeRequest, decode_step
from dtensor_ring.paged.block_pool import BlockPool
from dtensor_ring.paged.blocks import PooledSequence
from dtensor_ring.paged.plan import (
    BlockReads,
    EdgeReads,
    Reads,
    block_reads,
    last_token_reads,
    slots_of,
)
from dtensor_ring.paged.rows import BatchRows, QueryRows, TokenRows
from dtensor_ring.planning.mask import Documents, Mask
from dtensor_ring.planning.ranges import Span
from dtensor_ring.planning.run_table import MARKED, RunTable


@dataclass(frozen=True)
class Entries:
    """One launch of a paged kernel: entries with the same queries of different batch rows."""

    rows: QueryRows
    pages: Pages


class Edges:
    """One launch for keys that no paged kernel reads: those of all batch rows that have some.

    Args:
        reads: the columns of each row.
        tables: by row, the blocks of its sequence, `(B, P)`.
        block: tokens of a block.
        rows: the queries of these rows.
    """

    def __init__(self, reads: EdgeReads, tables: np.ndarray, block: int, rows: QueryRows) -> None:
        self.rows = rows
        slots = slots_of(tables[reads.rows], reads.cols, block)
        self._slots = Numbers(torch.int64, torch.from_numpy(slots))
        self._visible = Numbers(torch.bool, torch.from_numpy(reads.visible))

    def attend(
        self, query: Tensor, key_blocks: Tensor, value_blocks: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """Return `(out, lse)` of the rows' queries among all queries `(B, N, M, H)`."""
        (slots,), (visible,) = self._slots.on(query.device), self._visible.on(query.device)
        keys, values = (x.flatten(0, 1)[slots].transpose(1, 2) for x in (key_blocks, value_blocks))
        return attend_visible(self.rows.select(query), keys, values, visible, scores)


def pages_of(reads: BlockReads, tables: np.ndarray, block: int) -> np.ndarray:
    """Return the blocks that are read, ascending and each once.

    Args:
        reads: the keys that the queries see.
        tables: by batch row, the blocks of the row's sequence on this rank, `(B, P)`.
        block: tokens of a block.
    """
    blocks_read = [tables[:0, :0].ravel()]
    for x in reads.whole:
        ends = x.firsts + -(-x.num_keys // block)
        numbers = np.arange(tables.shape[1])
        is_read = (x.firsts[:, None] <= numbers) & (numbers < ends[:, None])
        blocks_read.append(tables[x.rows][is_read])
    if reads.edges is not None:
        edges = reads.edges
        blocks_read.append(np.take_along_axis(tables[edges.rows], edges.cols // block, 1).ravel())
    return np.unique(np.concatenate(blocks_read))


class PagedStep:
    """The attention of a batch of sequences on one rank; all layers use the same object.

    Args:
        reads: the keys that the queries see.
        tables: by row, the blocks of its sequence on this rank, `(B, P)`.
        block: tokens of a block.
        rows_of: returns the queries of some rows, given a range of the queries of each.
        pages: the blocks that `forward` gets copies of, ascending, all that are read among them;
            `None` if it gets the memory of all blocks.
    """

    def __init__(
        self,
        reads: BlockReads,
        tables: np.ndarray,
        block: int,
        rows_of: Callable[[np.ndarray, Span], QueryRows],
        pages: np.ndarray | None = None,
    ) -> None:
        self.pages = pages
        if pages is not None:  # blocks count from 0 among the pages; those nobody reads, anyhow
            last = max(0, len(pages) - 1)
            tables = np.minimum(np.searchsorted(pages, tables), last)
        self._entries = tuple(
            Entries(rows_of(x.rows, x.queries), _pages_read(x, tables, block)) for x in reads.whole
        )
        self._edges = None
        if (edges := reads.edges) is not None:
            rows = rows_of(edges.rows, (0, edges.visible.shape[1]))
            self._edges = Edges(edges, tables, block, rows)

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
        # Queries see whole blocks by a kernel that reads tables, and parts of blocks by their
        # columns.
        for entries in self._entries:
            queries = entries.rows.select(query).transpose(1, 2)
            out, lse = kernel.forward(queries, key_blocks, value_blocks, entries.pages, scores)
            entries.rows.add_to(running, out.transpose(1, 2), lse)
        if self._edges is not None:
            out, lse = self._edges.attend(query, key_blocks, value_blocks, scores)
            self._edges.rows.add_to(running, out, lse)
        return running.result()


def _pages_read(reads: Reads, tables: np.ndarray, block: int) -> Pages:
    num_blocks = -(-reads.num_keys // block)
    numbers = np.arange(num_blocks.max())
    # Rows that read fewer blocks are padded with block 0, which nobody reads there.
    at = np.minimum(reads.firsts[:, None] + numbers, tables.shape[1] - 1)
    read = np.where(numbers < num_blocks[:, None], np.take_along_axis(tables[reads.rows], at, 1), 0)
    return Pages(read.astype(np.int32), reads.num_keys.astype(np.int32), block)


class PagedPlan:
    """The plan of a step for all layers; each part is computed at its first use.

    Args:
        pool: the pool of the sequences.
        rank: the rank of the pool that owns the blocks.
        sequences: the sequences, in the order of the batch.
        num_tokens: M, the number of new tokens of each sequence, each of which is a batch row; or
            the number of each, if each token is a batch row of its own.
        kv_dtype: the format of full blocks, if they are rounded: attention then reads copies.

    Attributes:
        counts: the number of new tokens of each sequence.
        num_rows: the number of batch rows.
        num_queries: the number of queries of each.
    """

    def __init__(
        self,
        pool: BlockPool,
        rank: int,
        sequences: Sequence[PooledSequence],
        num_tokens: int | Sequence[int],
        kv_dtype: str | None = None,
    ) -> None:
        self._pool, self._rank, self._kv_dtype = pool, rank, kv_dtype
        self._sequences, self._is_ragged = sequences, not isinstance(num_tokens, int)
        each = [num_tokens] * len(sequences) if isinstance(num_tokens, int) else num_tokens
        self._counts = np.array(each, dtype=np.int64)
        self.counts = each
        self.num_queries = num_tokens if isinstance(num_tokens, int) else 1
        self.num_rows = int(self._counts.sum()) if self._is_ragged else len(sequences)
        self._steps: dict[tuple[Mask, bool, bool], PagedStep] = {}
        self._requests: dict[Mask, DecodeRequest] = {}

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
        dealing, starts = self._pool.dealing, self._ends - self.num_queries
        mine, cols = dealing.located(starts[:, None] + np.arange(self.num_queries), self._rank)
        rows, numbers = mine.nonzero()
        # A rank without blocks has a table without columns, and no tokens.
        tables = self._owners[rows], cols[mine] // dealing.block
        slots = self._tables[tables].astype(np.int64) * dealing.block + cols[mine] % dealing.block
        lists = rows * self.num_queries + numbers, slots
        return tuple(Numbers(torch.int64, torch.from_numpy(x)) for x in lists)

    @cached_property
    def _lengths(self) -> np.ndarray:
        """Return the number of tokens of each sequence, `(B,)`."""
        return np.array([len(x.tokens) for x in self._sequences], dtype=np.int64)

    @cached_property
    def _owners(self) -> np.ndarray:
        """Return the number of the sequence of each batch row."""
        return np.repeat(np.arange(len(self._counts)), self._counts if self._is_ragged else 1)

    @cached_property
    def _ends(self) -> np.ndarray:
        """Return the number of tokens of a sequence up to the last query of each batch row."""
        if not self._is_ragged:
            return self._lengths
        rows = np.arange(self.num_rows)
        return self._lengths[self._owners] - (np.cumsum(self._counts)[self._owners] - 1 - rows)

    @cached_property
    def pages(self) -> np.ndarray:
        """Return the blocks of all sequences on this rank, ascending; block 0 if there is none."""
        # Tables are padded with block 0. Models that expand what they keep cannot view an empty
        # tensor, so a rank without blocks has that one, too.
        return np.unique(np.append(self._tables, 0)).astype(np.int32)

    def step(self, mask: Mask, whole_blocks: bool, from_pages: bool = False) -> PagedStep:
        """Return the step for a mask.

        Args:
            mask: which keys a query sees.
            whole_blocks: whether the paged kernel reads whole blocks only.
            from_pages: whether it gets copies of all `pages`, in any form.
        """
        step = self._steps.get((mask, whole_blocks, from_pages))
        if step is None:
            block, pages = self._pool.dealing.block, self.pages if from_pages else None
            reads = self._reads(mask, whole_blocks)
            if pages is None and self._kv_dtype is not None:
                # Blocks in eight bits are dequantised before a step, so only those that are read.
                pages = pages_of(reads, self._tables, block)
            step = PagedStep(reads, self._tables, block, self._rows_of, pages)
            self._steps[mask, whole_blocks, from_pages] = step
        return step

    def _rows_of(self, sequences: np.ndarray, queries: Span) -> QueryRows:
        if self._is_ragged:
            return TokenRows(sequences, self._counts)
        return BatchRows(sequences, queries, len(self._counts))

    def _reads(self, mask: Mask, whole_blocks: bool) -> BlockReads:
        """Return the keys that the queries of each sequence see on this rank."""
        dealing = self._pool.dealing
        if self.num_queries == 1:
            most = self._counts.max(initial=1)
            # Sequences with fewer tokens repeat their last query, as `TokenRows` does.
            numbers = np.minimum(np.arange(most), self._counts[:, None] - 1)
            ends = (self._lengths - self._counts)[:, None] + numbers + 1
            return last_token_reads(ends, mask, dealing, self._rank, whole_blocks)
        tiles = decode_step(self.request(mask)).tiles
        shape = len(self._lengths), self.num_queries
        return block_reads(tiles, dealing.block, shape, whole_blocks)

    def request(self, mask: Mask) -> DecodeRequest:
        """Return the input of the planner; ranks differ in their rank only."""
        if mask not in self._requests:
            self._requests[mask] = self._request(mask)
        return self._requests[mask]

    def _request(self, mask: Mask) -> DecodeRequest:
        # The end of a sequence hides stale content in the rest of its last block; so does a causal
        # mask.
        is_hidden = mask.right == 0 and mask.prefix is None
        documents = None if is_hidden else Documents([(0, x) for x in self._ends])
        starts, runs = tuple((self._ends - self.num_queries).tolist()), self._runs
        size = self._pool.dealing.world_size
        return DecodeRequest(
            runs, mask, self._rank, size, runs.end, starts, self.num_queries, documents, None
        )

    def agreed(self, layer: int) -> Tensor:
        """Return the integers that ranks compare, to detect that they have drifted apart."""
        return torch.cat([torch.tensor([layer], device="cpu"), self._drifting])

    @cached_property
    def _drifting(self) -> Tensor:
        """Return the number, length, written length and new tokens of all sequences."""
        each = zip(self._sequences, self._counts.tolist(), strict=True)
        last = [x.tokens[len(x) - num_tokens :] for x, num_tokens in each]
        numbers = [y for x in self._sequences for y in (x.number, len(x), x.num_written)]
        # Tokens, too: ranks that sampled differently would go on without a difference in lengths.
        numbers += [y for x in last for y in x]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    @cached_property
    def _runs(self) -> RunTable:
        """Return the runs of all ranks."""
        # One table serves all sequences: the owner of a token depends on its position only.
        numbers = self._pool.dealing.runs(0, int(self._lengths.max(initial=0)))
        if self._kv_dtype is not None:  # ranks compare the mark of the runs
            numbers = np.pad(numbers, ((0, 0), (0, 1), (0, 0)))
            numbers[0, -1, 0] = MARKED | crc32(self._kv_dtype.encode()) & (MARKED - 1)
        return RunTable(numbers)

    @cached_property
    def _tables(self) -> np.ndarray:
        """Return the blocks of each sequence on this rank, `(B, P)`, int32, padded with block 0."""
        rows = [x.blocks[self._rank] for x in self._sequences]
        found = np.zeros((len(rows), max(map(len, rows), default=0)), dtype=np.int32)
        for row, blocks in zip(found, rows, strict=True):
            row[: len(blocks)] = blocks
        return found
