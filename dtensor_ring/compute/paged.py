"""Attention of a few queries of many sequences to keys in blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from dtensor_ring.compute.execute import forward_step
from dtensor_ring.compute.kernels.paged import PagedKernel, Pages
from dtensor_ring.compute.kernels.paged_blocks import block_kernel
from dtensor_ring.compute.kernels.scores import Scores
from dtensor_ring.compute.memory import part_of, region
from dtensor_ring.compute.numbers import Numbers
from dtensor_ring.compute.partial import Partial
from dtensor_ring.compute.trace import Label
from dtensor_ring.planning.paging.paged import BlockReads, Read, slots_of
from dtensor_ring.planning.plan import Step
from dtensor_ring.planning.routes.columns import Cols
from dtensor_ring.planning.values.span import length


@dataclass(frozen=True)
class Entries:
    """One launch of a paged kernel: entries with equally many queries."""

    reads: tuple[Read, ...]
    pages: Pages

    def queries(self, query: Tensor) -> Tensor:
        """`(E, R, N, H)` of the queries `(B, N, M, H)`."""
        if self.are_all(query):
            return query.transpose(1, 2)
        return torch.cat([part_of(query, region(x.batch, x.rows)) for x in self.reads]).transpose(
            1, 2
        )

    def are_all(self, query: Tensor) -> bool:
        """Whether there is one entry for each batch row, with all its queries."""
        rows = [(row, (0, query.shape[2])) for row in range(len(query))]
        return [(x.batch, x.rows) for x in self.reads] == rows


class PagedStep:
    """What a rank computes for a batch of sequences: made once, for all layers.

    Args:
        reads: what the queries see.
        tables: by batch row, the blocks of the row's sequence on this rank.
        block: tokens of a block.
    """

    def __init__(self, reads: BlockReads, tables: Sequence[np.ndarray], block: int) -> None:
        self._reads, self._tables, self._block = reads, tables, block
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
        """Where the columns of the edges are in the pool, `(B, C)`; short rows are filled up."""
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
        """`(out, lse)` of the queries over the keys of this rank, float32 or wider.

        Args:
            query: `(B, N, M, H)`.
            key_blocks: `(num_blocks, block, Nkv, H)`.
            value_blocks: `(num_blocks, block, Nkv, Hv)`.
            kernel: reads whole blocks.
            scores: scale and softcap.
        """
        wide = torch.promote_types(query.dtype, torch.float32)
        partial = Partial(query, value_blocks.shape[3], dtype=wide)
        for entries in self._launches:
            found = kernel.forward(
                entries.queries(query), key_blocks, value_blocks, entries.pages, scores
            )
            self._add(partial, query, entries, *found)
        if self._reads.edges:
            slots = self._slots.on(query.device)[0]
            kv = tuple(x.flatten(0, 1)[slots].transpose(1, 2) for x in (key_blocks, value_blocks))
            edge_kernel = block_kernel(query, key_blocks.shape[2], value_blocks.shape[3], scores)
            forward_step(
                *(
                    self._edges,
                    query,
                    (kv[0], kv[1]),
                    partial,
                    edge_kernel,
                    scores,
                    Label("decode", 0, 0),
                ),
                with_segments=False,
            )
        return partial.result()

    def _add(
        self, partial: Partial, query: Tensor, entries: Entries, out: Tensor, lse: Tensor
    ) -> None:
        """Merge what a kernel returned, `(E, R, N, Hv)` and `(E, N, R)`."""
        out = out.transpose(1, 2)
        if entries.are_all(query):
            partial.add(region(None, (0, query.shape[2])), out, lse)
            return
        for number, read in enumerate(entries.reads):
            one = slice(number, number + 1)
            partial.add(region(read.batch, read.rows), out[one], lse[one])
