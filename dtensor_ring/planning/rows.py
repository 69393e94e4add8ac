"""The batch rows of a problem, and what is seen in each: slices, whatever they were given as."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import numpy as np

from dtensor_ring.planning.cache import cached_bytes
from dtensor_ring.planning.documents import Documents
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.slices import UNBOUNDED, Slices

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
    sides = [
        # An empty batch has no boundaries, and nothing that it would matter to.
        [_cut(row, mask.chunk) for row in (given.arrays if given else ((0, seq_len),))]
        for seq_len, given in zip(seq_lens, (documents, key_documents or documents), strict=True)
    ]
    # One row stands for the whole batch, so it is repeated where the other side has several.
    bounds = zip(*(cycle(x) if len(x) == 1 < max(map(len, sides)) else x for x in sides))  # noqa: B905
    return Slices.of_tables([_table(queries, keys, mask) for queries, keys in bounds])


def _cut(row: Sequence[int] | np.ndarray, chunk: int | None) -> np.ndarray:
    """Boundaries of documents, and of the chunks within them."""
    bounds = np.asarray(row, dtype=np.int64)
    if chunk is None:
        return bounds
    return np.unique(np.concatenate([bounds, np.arange(0, bounds[-1], chunk)]))


def _table(queries: np.ndarray, keys: np.ndarray, mask: Mask) -> np.ndarray:
    """The slices of documents between boundaries: each has its band, its prefix has none ahead."""
    left, right = (UNBOUNDED if x is None else min(x, UNBOUNDED) for x in (mask.left, mask.right))
    begins, ends = keys[:-1], keys[1:]
    whole = np.stack([queries[:-1], queries[1:], begins, ends], axis=1)
    if not mask.prefix or right == UNBOUNDED:
        return _banded(whole, left, right)
    # Positions fit into int64 however long the prefix is.
    inner = begins + np.minimum(ends - begins, mask.prefix)
    prefix, rest = whole.copy(), whole
    prefix[:, 3] = rest[:, 2] = inner
    return np.concatenate([_banded(prefix, left, UNBOUNDED), _banded(rest, left, right)])


def _banded(ranges: np.ndarray, left: int, right: int) -> np.ndarray:
    """The ranges, with one band for all."""
    bands = np.broadcast_to(np.array([left, right], dtype=np.int64), (len(ranges), 2))
    return np.concatenate([ranges, bands], axis=1)
