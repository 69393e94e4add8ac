"""Converts and checks the arguments of the builders of slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.ranges import integer_array, integer_rows
from dtensor_ring.planning.slice_tables import LARGEST, UNBOUNDED

# One array for each batch row, or a single one that serves all rows.
Rows = list[np.ndarray]


def slices_given(query_ranges: Any, key_ranges: Any, bands: Any) -> np.ndarray:
    """Return slices as one array `(N, 6)` or `(B, N, 6)`.

    Raises:
        ValueError: if an argument does not hold pairs, or their shapes differ.
        TypeError: if an argument does not hold integers.
    """
    given = {"query_ranges": query_ranges, "key_ranges": key_ranges, "bands": _without_none(bands)}
    parts = [_pairs(name, x) for name, x in given.items()]
    if len({part.shape for part in parts}) > 1:
        shapes = ", ".join(str(part.shape) for part in parts)
        raise ValueError(f"query_ranges, key_ranges and bands must be of one shape, got {shapes}")
    return np.concatenate(parts, axis=-1)


def _without_none(bands: Any) -> Any:
    """Replace each bound that is `None` by `LARGEST`."""
    if isinstance(bands, (list, tuple)):
        return [_without_none(band) for band in bands]
    return LARGEST if bands is None else bands


def _pairs(name: str, given: Any) -> np.ndarray:
    """Convert an argument to `(N, 2)` or `(B, N, 2)`."""
    shape = "(N, 2) or (B, N, 2)"
    array = integer_array(given, name, "pairs of integers", shape, (1, 2, 3), given)
    if array.shape == (0,):  # an empty sequence
        array = array.reshape(0, 2)
    if array.shape[-1] != 2:
        raise ValueError(f"{name} must be pairs of integers {shape}, got {given!r}")
    if array.size and array.max() > LARGEST:
        array = np.minimum(array, LARGEST + 1)  # uint64 would become negative; refused below
    return array.astype(np.int64)


def unbounded(content: np.ndarray) -> np.ndarray:
    """Return tables `(B, N, 6)` in which bounds from `LARGEST` on are `UNBOUNDED`.

    Raises:
        ValueError: if a position or a band is out of range, or a range ends before it begins.
    """
    tables = np.array(content, dtype=np.int64, ndmin=3)
    for name, begin, end in (
        ("query_ranges", tables[..., 0], tables[..., 1]),
        ("key_ranges", tables[..., 2], tables[..., 3]),
    ):
        wrong = (begin < 0) | (end < begin) | (end > LARGEST)
        if wrong.any():
            raise ValueError(
                f"{name} of slices must begin at 0 or later, not end before they begin and be "
                f"int32, got {begin[wrong][0]} to {end[wrong][0]}"
            )
    bands = tables[..., 4:]
    if (bands < -LARGEST).any():
        raise ValueError(f"bands of slices must be int32, got {bands.min()}")
    # One number for all bounds that hide nothing, so that equal slices are equal tables.
    bands[bands >= LARGEST] = UNBOUNDED
    return tables


def boundaries(name: str, given: Any) -> Rows:
    """Convert boundaries of documents; the first one may be at any position."""
    rows = integer_rows(given, name, "boundaries", "(D+1,) or (B, D+1)")
    for row in rows:
        _check_positions(name, row)
        if not row.size or (row[1:] < row[:-1]).any():
            raise ValueError(f"{name} must have a begin and never decrease, got {row.tolist()}")
    return [row.astype(np.int64) for row in rows]


def integers(name: str, given: Any, size: str, smallest: int = 0) -> Rows:
    """Convert positions, lengths or numbers of parts, `(size,)` or `(B, size)`."""
    rows = integer_rows(given, name, "integers", f"({size},) or (B, {size})")
    for row in rows:
        _check_positions(name, row, smallest)
    return [row.astype(np.int64) for row in rows]


def edges(name: str, given: Any) -> Rows:
    """Convert the positions of queries; a row of shape `(S,)` or `(S, R)` becomes `(R, S)`."""
    rows = integer_rows(given, name, "positions", "(S,), (B, S) or (B, S, R)", (1, 2, 3))
    for row in rows:
        _check_positions(name, row)
    return [np.atleast_2d(row.astype(np.int64).T) for row in rows]


def part_lengths(name: str, given: Any) -> Rows:
    """Convert the lengths of consecutive parts, whose sum must be int32, too."""
    rows = integers(name, given, "N")
    for row in rows:
        _check_positions(f"the sum of {name}", row.sum(keepdims=True))
    return rows


def counts(name: str, given: Any) -> Rows:
    """Convert a number of tokens for each document, or a scalar for all documents."""
    rows = integer_rows(given, name, "integers", "one for all, (D,) or (B, D)", (0, 1, 2))
    for row in rows:
        _check_positions(name, row)
    return [row.astype(np.int64) for row in rows]


def _check_positions(name: str, row: np.ndarray, smallest: int = 0) -> None:
    if row.size and not smallest <= row.min() <= row.max() <= LARGEST:
        raise ValueError(f"{name} must be from {smallest} to {LARGEST}, got {row.tolist()}")


def one_row(name: str, rows: Rows) -> np.ndarray:
    """Return the only row, which serves the whole batch.

    Raises:
        ValueError: if there are several rows, or none.
    """
    if len(rows) != 1:
        raise ValueError(
            f"{name} must be of one row, got {len(rows)}; Slices.batched makes a batch of rows"
        )
    return rows[0]


def of_each(name: str, row: np.ndarray, total: int, of: str) -> np.ndarray:
    """Return `row` with one entry for each of `total` items, named `of`; a scalar is repeated.

    Raises:
        ValueError: if the row is longer or shorter.
    """
    if row.ndim and len(row) != total:
        raise ValueError(
            f"{name} must be as many as {of}, {total}, or a single one, got {len(row)}"
        )
    return np.broadcast_to(row, (total,))


def masks(name: str, given: Any) -> Rows:
    """Convert masks to arrays of objects: one for each document, or a scalar for all."""
    if isinstance(given, Mask):
        return [np.array(given)]
    is_nested = isinstance(given, Sequence) and bool(given) and isinstance(given[0], (list, tuple))
    rows = given if is_nested else [given]
    for row in rows:
        if not isinstance(row, (list, tuple)) or not all(isinstance(x, Mask) for x in row):
            raise TypeError(
                f"{name} must be a Mask, or a list of one for each document, or a list of those "
                f"for each batch row, got {given!r}"
            )
    return [np.array(row, dtype=object) for row in rows]


def plain(name: str, mask: Any) -> Mask:
    """Return `mask` if it is a band without chunk and prefix.

    Raises:
        TypeError: if it is not a mask.
        ValueError: if it has chunks or a prefix.
    """
    if not isinstance(mask, Mask):
        raise TypeError(f"{name} must be a Mask, such as Mask.causal(), got {mask!r}")
    if mask.chunk is not None or mask.prefix is not None:
        raise ValueError(
            f"{name} must be a band of left and right here, without chunk and prefix, got {mask}; "
            "chunks are possible as documents"
        )
    return mask


def check_blocks(bounds: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> None:
    """Refuse blocks that overlap, or are not within one document.

    Raises:
        ValueError: with the first bad block.
    """
    if len(begins) != len(ends):
        raise ValueError(
            f"begins and ends of blocks must be as many, got {len(begins)} and {len(ends)}"
        )
    # Empty blocks show nothing, so they may lie anywhere.
    blocks = np.stack([begins, ends], axis=1)[begins != ends]
    # In the order of positions, only neighbours can overlap.
    blocks = blocks[np.argsort(blocks[:, 0])]
    for is_wrong, what in (
        (blocks[:, 0] > blocks[:, 1], "not end before they begin"),
        (np.append(blocks[:-1, 1] > blocks[1:, 0], False), "be disjoint"),
        (
            _document(bounds, blocks[:, 0]) != _document(bounds, blocks[:, 1] - 1),
            "be in one document",
        ),
        (_document(bounds, blocks[:, 0]) < 0, "begin in a document"),
    ):
        if is_wrong.any():
            wrong = int(is_wrong.argmax())
            raise ValueError(
                f"blocks from begins to ends must {what}, got {blocks[wrong : wrong + 2].tolist()} "
                f"in documents of cu_seqlens {bounds.tolist()}"
            )


def _document(bounds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the document index of each position, -1 before the first and after the last."""
    number = np.searchsorted(bounds, positions, "right") - 1
    return np.where(positions < bounds[-1], number, -1)


def check_parents(parents: np.ndarray, lengths: np.ndarray) -> None:
    """Refuse trees in which a parent does not come before its children.

    Raises:
        ValueError: with the first bad node.
    """
    if len(parents) != len(lengths):
        raise ValueError(
            f"parents and lengths must be as many, got {len(parents)} and {len(lengths)}"
        )
    late = parents >= np.arange(len(parents))
    if late.any():
        node = int(late.argmax())
        raise ValueError(
            "parents must come before their children in the sequence, as keys come before queries, "
            f"got parent {parents[node]} of node {node}; number the nodes in the order of a walk"
        )
