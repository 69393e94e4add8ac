"""The batch rows of a problem, and the boundaries that hold in each."""

from __future__ import annotations

from itertools import cycle

from dtensor_ring.planning.cache import cached_bytes
from dtensor_ring.planning.documents import Documents
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.tile import Bounds

Rows = tuple[tuple[int | None, Bounds], ...]
"""Batch row, `None` for all of them, and its boundaries, those of the mask's chunks included."""


def _num_bytes(rows: Rows) -> int:
    return 64 + sum(48 * len(side) for _, bounds in rows for side in bounds)


@cached_bytes(2**26, _num_bytes)
def rows_of(
    mask: Mask,
    seq_lens: tuple[int, int],
    documents: Documents | None,
    key_documents: Documents | None,
) -> Rows:
    """The rows of the boundaries of queries and keys; at most 64 MiB of them are kept.

    Args:
        mask: its chunks are cut out of the documents.
        seq_lens: global lengths of queries and of keys.
        documents: boundaries of the queries; without any, the sequence is one document.
        key_documents: boundaries of the keys, likewise.
    """
    sides = [
        tuple(_cut(row, mask.chunk) for row in given or ((0, seq_len),))
        for seq_len, given in zip(seq_lens, (documents, key_documents), strict=True)
    ]
    if max(map(len, sides)) == 1:
        # Tiles without a batch row cover all rows in one launch.
        return ((None, (sides[0][0], sides[1][0])),)
    # One row stands for the whole batch, so it is repeated where the other side has several.
    bounds = zip(*(cycle(side) if len(side) == 1 else side for side in sides), strict=False)
    return tuple(enumerate(bounds))


def _cut(row: tuple[int, ...], chunk: int | None) -> tuple[int, ...]:
    """Boundaries of documents, and of the chunks within them."""
    return row if chunk is None else tuple(sorted({*row, *range(0, row[-1], chunk)}))
