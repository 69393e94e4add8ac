"""The batch rows of a problem, and what is seen in each: slices, whatever they were given as."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dtensor_ring.planning.masks.documents import Documents
from dtensor_ring.planning.masks.mask import Mask
from dtensor_ring.planning.masks.slices import Slices
from dtensor_ring.planning.masks.tables import Ranges, chunks, masked_table
from dtensor_ring.planning.values.broadcast import broadcast
from dtensor_ring.planning.values.cache import cached_bytes

Rows = tuple[tuple[int | None, np.ndarray], ...]
"""Batch row, `None` for all of them, and its slices: a table of `Slices`."""


def rows_of(slices: Slices) -> Rows:
    """The batch rows of slices; one table covers all rows in one launch."""
    if len(slices) == 1:
        return ((None, slices.tables[0]),)
    return tuple(enumerate(slices.tables))


@cached_bytes(2**26, lambda slices: slices.num_bytes)
def slices_of(
    mask: Mask,
    seq_lens: tuple[int, int],
    documents: Documents | None = None,
    key_documents: Documents | None = None,
) -> Slices:
    """What a mask shows within documents; at most 64 MiB of slices are kept.

    Args:
        mask: its chunks are cut out of the documents, and a prefix is a slice of its own.
        seq_lens: global lengths of queries and of keys.
        documents: boundaries of the queries; without any, the sequence is one document.
        key_documents: boundaries of the keys; those of the queries by default.
    """
    queries, keys = (
        # An empty batch has no boundaries, and nothing that it would matter to.
        [_ranges(row, mask.chunk) for row in (given.arrays if given else ((0, seq_len),))]
        for seq_len, given in zip(seq_lens, (documents, key_documents or documents), strict=True)
    )
    rows = broadcast(cu_seqlens=queries, key_cu_seqlens=keys)
    return Slices.of_tables(
        [masked_table(of_queries, of_keys, mask) for of_queries, of_keys in rows]
    )


def _ranges(row: Sequence[int] | np.ndarray, chunk: int | None) -> Ranges:
    """Begins and ends of documents, or of the chunks within them."""
    bounds = np.asarray(row, dtype=np.int64)
    ranges = bounds[:-1], bounds[1:]
    return ranges if chunk is None else chunks(*ranges, chunk)
