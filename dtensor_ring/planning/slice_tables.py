"""Tables of slices, one slice in each row, computed from arrays of positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.ranges import numbered

UNBOUNDED = 2**60
"""A bound of a band that is none, in tables: more than any lag, and sums of it fit."""

LARGEST = 2**31 - 1
"""The same where users say it, in int32; no position is that large."""

NUM_FIELDS = 6
"""Of a slice, in its row of a table: begin and end of its queries and of its keys, left, right."""

MAX_SLICES = 2**16
"""Of all rows together."""

RangeArray = tuple[np.ndarray, np.ndarray]
"""Begins and ends."""


def table_of(queries: RangeArray, keys: RangeArray, left: Any, right: Any) -> np.ndarray:
    """`(N, 6)` of N ranges, and bounds of each or of all."""
    return np.stack(np.broadcast_arrays(*queries, *keys, left, right), axis=-1)


def stacked(tables: Sequence[np.ndarray]) -> np.ndarray:
    """All slices of some tables, or of none."""
    return np.concatenate([np.zeros((0, NUM_FIELDS), dtype=np.int64), *tables])


def masked_table(queries: RangeArray, keys: RangeArray, mask: Mask) -> np.ndarray:
    """Documents, each with the band and the prefix of a mask."""
    left, right = band_of(mask)
    if not mask.prefix or right == UNBOUNDED:
        return table_of(queries, keys, left, right)
    begins, ends = keys
    inner = begins + np.minimum(ends - begins, mask.prefix)
    prefix = table_of(queries, (begins, inner), left, UNBOUNDED)
    return np.concatenate([prefix, table_of(queries, (inner, ends), left, right)])


def band_of(mask: Mask) -> tuple[int, int]:
    """The bounds of a mask as numbers."""
    left, right = (UNBOUNDED if x is None else min(x, UNBOUNDED) for x in (mask.left, mask.right))
    return left, right


def document_table(bounds: np.ndarray, masks: Iterable[Mask]) -> np.ndarray:
    """Documents between boundaries, with a mask for each."""
    numbers: dict[Mask, Any] = {}
    for number, mask in enumerate(masks):
        numbers.setdefault(mask, []).append(number)
    tables = []
    for mask, chosen in numbers.items():
        ranges = bounds[:-1][chosen], bounds[1:][chosen]
        if mask.chunk is not None:
            ranges = chunks(*ranges, mask.chunk)
        tables.append(masked_table(ranges, ranges, mask))
    return stacked(tables)


def chunks(begins: np.ndarray, ends: np.ndarray, chunk: int) -> RangeArray:
    """Ranges, cut at the multiples of a number of positions.

    Raises:
        ValueError: if they become too many slices.
    """
    check_count(int((ends - begins).sum()) // chunk)  # before they are made
    first = begins // chunk
    document, number = numbered(np.where(begins < ends, (ends - 1) // chunk - first + 1, 0))
    number += first[document]
    return (
        np.maximum(begins[document], number * chunk),
        # A chunk may be longer than int64 has room for after the last one.
        np.minimum(ends[document], (number * chunk) + min(chunk, UNBOUNDED)),
    )


def check_count(num_slices: int) -> None:
    """Refuse more slices than can be planned in reasonable time.

    Raises:
        ValueError: if there are too many.
    """
    if num_slices > MAX_SLICES:
        raise ValueError(
            f"slices of all rows must be at most {MAX_SLICES:,}, which take seconds to plan, got "
            f"{num_slices:,}; fewer are larger chunks, documents or blocks, and a tree whose nodes "
            "are in the order of a walk"
        )


def block_table(bounds: np.ndarray, ranges: RangeArray, left: int) -> np.ndarray:
    """Causal documents, of some window, with blocks in them that see themselves both ways."""
    blocks = np.stack(ranges)[:, ranges[0] < ranges[1]]
    cuts = np.unique(np.concatenate([bounds, *blocks]))
    begins, ends = cuts[:-1], cuts[1:]
    is_block = np.isin(begins, blocks[0])
    document = bounds[np.searchsorted(bounds, begins, "right") - 1]
    # Queries of a block see as far as its end, others as far as themselves.
    table = table_of((begins, ends), (document, ends), left, np.where(is_block, UNBOUNDED, 0))
    if left == UNBOUNDED:
        return table
    # A window holds for what is before a block, not for the block itself.
    block = table[is_block]
    itself = table_of((block[:, 0], block[:, 1]), (block[:, 0], block[:, 1]), UNBOUNDED, UNBOUNDED)
    block[:, 3] = block[:, 0]
    return np.concatenate([table[~is_block], itself, block])


def beginnings(bounds: np.ndarray, counts: np.ndarray) -> RangeArray:
    """The first tokens of documents: so many, or all."""
    begins, ends = bounds[:-1], bounds[1:]
    # Positions fit into int64 however many are asked for.
    return begins, begins + np.minimum(ends - begins, counts)


def block_causal_table(lengths: np.ndarray, num_earlier: int | None) -> np.ndarray:
    """Blocks that see themselves and so many before them, or all."""
    bounds = bounds_of(lengths)
    number = np.arange(len(lengths))
    reach = len(lengths) if num_earlier is None else min(num_earlier, len(lengths))
    first = bounds[np.maximum(number - reach, 0)]
    return table_of((bounds[:-1], bounds[1:]), (first, bounds[1:]), UNBOUNDED, UNBOUNDED)


def block_diffusion_table(lengths: np.ndarray) -> np.ndarray:
    """Noisy blocks, and the same blocks once more, clean."""
    bounds = bounds_of(lengths)
    noisy, end = (bounds[:-1], bounds[1:]), bounds[-1:]
    clean = noisy[0] + end, noisy[1] + end
    parts = (noisy, noisy), (noisy, (end, clean[0])), (clean, (end, clean[1]))
    return np.concatenate([table_of(*ranges, UNBOUNDED, UNBOUNDED) for ranges in parts])


def bounds_of(lengths: np.ndarray) -> np.ndarray:
    """Boundaries of parts that follow one another from 0."""
    return np.append(0, np.cumsum(lengths, dtype=np.int64))


def tree_table(parents: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Nodes that see themselves causally, and all their ancestors."""
    bounds = bounds_of(lengths)
    nodes = bounds[:-1], bounds[1:]
    # By ancestor: in the order of a walk, all that see one follow it in one range.
    ancestor, first, end = np.array(_seen(parents.tolist()), dtype=np.int64).reshape(-1, 3).T
    keys = bounds[ancestor], bounds[ancestor + 1]
    earlier = table_of((bounds[first], bounds[end]), keys, UNBOUNDED, UNBOUNDED)
    return np.concatenate([table_of(nodes, nodes, UNBOUNDED, 0), earlier])


def _seen(parents: Sequence[int]) -> list[tuple[int, int, int]]:
    """Of each ancestor, the ranges of nodes, from one up to another, that see it."""
    ranges, seen = [], {}  # the ancestors of the last node, root first: since when they are seen
    for node, parent in enumerate((*parents, -1)):
        fresh = []
        while parent != -1 and parent not in seen:
            fresh.append(parent)
            parent = parents[parent]
        # That is now the lowest ancestor of both nodes: those below it are seen no more.
        while seen and next(reversed(seen)) != parent:
            ancestor, first = seen.popitem()
            ranges.append((ancestor, first, node))
        check_count(len(ranges))  # of nodes in any other order there may be as many as pairs
        seen |= dict.fromkeys(reversed(fresh), node)
    return ranges


def global_table(bounds: np.ndarray, counts: np.ndarray, window: int) -> np.ndarray:
    """Causal windows in documents whose first tokens are seen by all later ones."""
    documents = bounds[:-1], bounds[1:]
    begins, inner = beginnings(bounds, counts)
    tokens = table_of(documents, (begins, inner), UNBOUNDED, 0)
    return np.concatenate([tokens, table_of(documents, (inner, bounds[1:]), window, 0)])


def aligned_table(bounds: np.ndarray, key_bounds: np.ndarray, mask: Mask) -> np.ndarray:
    """Documents of queries and of keys whose last tokens are at the same place."""
    ahead = key_bounds[1:] - bounds[1:]
    left, right = (
        np.full_like(ahead, UNBOUNDED) if x == UNBOUNDED else x + sign * ahead
        for x, sign in zip(band_of(mask), (-1, 1), strict=True)
    )
    ranges = (bounds[:-1], bounds[1:]), (key_bounds[:-1], key_bounds[1:])
    return table_of(*ranges, left, right)


def query_table(begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """A range of keys for each query; those that stand or move along with the queries are one."""
    moves = np.stack([np.diff(begins), np.diff(ends)])
    is_one = ((moves == 0) | (moves == 1)).all(axis=0)
    # Where a series of equal moves ends.
    changes = np.append((np.diff(moves) != 0).any(axis=0).nonzero()[0], moves.shape[1] - 1)
    table, query = [], 0
    while query < len(begins):
        last = query
        if query < len(is_one) and is_one[query]:
            last = int(changes[np.searchsorted(changes, query)]) + 1
        row = query, last + 1, begins[query], ends[last]
        left = query - begins[query] if last > query and moves[0, query] else UNBOUNDED
        right = ends[query] - 1 - query if last > query and moves[1, query] else UNBOUNDED
        table.append((*row, left, right))
        query = last + 1
    return np.array(table, dtype=np.int64).reshape(-1, NUM_FIELDS)
