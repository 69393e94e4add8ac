"""Tables of slices, one slice in each row, computed from arrays of positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.ranges import numbered

# An unbounded side of a band, in tables: larger than any lag, and sums of it fit into int64.
UNBOUNDED = 2**60

# An unbounded side of a band in the int32 arguments of users; no position is as large.
LARGEST = 2**31 - 1

# Columns of a table: begin and end of the queries, begin and end of the keys, left, right.
NUM_FIELDS = 6

# The largest number of slices, summed over all batch rows.
MAX_SLICES = 2**16

# Begins and ends of ranges.
RangeArray = tuple[np.ndarray, np.ndarray]


def table_of(queries: RangeArray, keys: RangeArray, left: Any, right: Any) -> np.ndarray:
    """Return a table `(N, 6)` of N ranges; a bound is one number or an array of N."""
    (begin, end), (key_begin, key_end) = queries, keys
    fields = np.broadcast_arrays(begin, end, key_begin, key_end, left, right)
    return np.stack(fields, axis=-1)


def stacked(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate tables; without any, return a table without slices."""
    return np.concatenate([np.zeros((0, NUM_FIELDS), dtype=np.int64), *tables])


def masked_table(queries: RangeArray, keys: RangeArray, mask: Mask) -> np.ndarray:
    """Return the table of documents that each have the band and the prefix of a mask."""
    left, right = band_of(mask)
    # Without a bound ahead, the prefix is seen anyway.
    if not mask.prefix or right == UNBOUNDED:
        return table_of(queries, keys, left, right)
    # Keys of the prefix have no bound ahead, so they are slices of their own.
    begins, ends = keys
    inner = begins + np.minimum(ends - begins, mask.prefix)
    prefix = table_of(queries, (begins, inner), left, UNBOUNDED)
    return np.concatenate([prefix, table_of(queries, (inner, ends), left, right)])


def band_of(mask: Mask) -> tuple[int, int]:
    """Return the bounds of a mask as numbers."""
    left, right = (UNBOUNDED if x is None else min(x, UNBOUNDED) for x in (mask.left, mask.right))
    return left, right


def document_table(bounds: np.ndarray, masks: Iterable[Mask]) -> np.ndarray:
    """Return the table of documents between boundaries, with one mask for each document."""
    # Documents with one mask are one table: Python runs once for each mask, not for each document.
    numbers: dict[Mask, Any] = {}
    for number, mask in enumerate(masks):
        numbers.setdefault(mask, []).append(number)
    tables = []
    for mask, chosen in numbers.items():
        begins, ends = bounds[:-1][chosen], bounds[1:][chosen]
        ranges = (begins, ends) if mask.chunk is None else chunks(begins, ends, mask.chunk)
        tables.append(masked_table(ranges, ranges, mask))
    return stacked(tables)


def chunks(begins: np.ndarray, ends: np.ndarray, chunk: int) -> RangeArray:
    """Cut ranges at the multiples of `chunk`.

    Raises:
        ValueError: if the result has too many slices.
    """
    check_count(int((ends - begins).sum()) // chunk)  # before they are allocated
    first = begins // chunk
    document, number = numbered(np.where(begins < ends, (ends - 1) // chunk - first + 1, 0))
    number += first[document]
    return (
        np.maximum(begins[document], number * chunk),
        # Limit the chunk: a larger one could overflow int64.
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
    """Return the table of causal documents with a window, and blocks that see themselves fully."""
    # Six tokens, of which 2 and 3 are a block:
    #     #.....
    #     ##....
    #     ####..
    #     ####..
    #     #####.
    #     ######
    blocks = np.stack(ranges)[:, ranges[0] < ranges[1]]
    cuts = np.unique(np.concatenate([bounds, *blocks]))
    begins, ends = cuts[:-1], cuts[1:]
    is_block = np.isin(begins, blocks[0])
    document = bounds[np.searchsorted(bounds, begins, "right") - 1]
    # Queries of a block see up to its end, other queries up to themselves.
    table = table_of((begins, ends), (document, ends), left, np.where(is_block, UNBOUNDED, 0))
    if left == UNBOUNDED:
        return table
    # The window limits the keys before a block, but not the block itself.
    block = table[is_block]
    itself = table_of((block[:, 0], block[:, 1]), (block[:, 0], block[:, 1]), UNBOUNDED, UNBOUNDED)
    block[:, 3] = block[:, 0]
    return np.concatenate([table[~is_block], itself, block])


def beginnings(bounds: np.ndarray, counts: np.ndarray) -> RangeArray:
    """Return the ranges of the first `counts` tokens of documents, or of all tokens."""
    begins, ends = bounds[:-1], bounds[1:]
    # Take the minimum first, as `begins + counts` might overflow int64.
    return begins, begins + np.minimum(ends - begins, counts)


def block_causal_table(lengths: np.ndarray, num_earlier: int | None) -> np.ndarray:
    """Return the table of blocks that see themselves and `num_earlier` blocks before, or all."""
    bounds = bounds_of(lengths)
    number = np.arange(len(lengths))
    reach = len(lengths) if num_earlier is None else min(num_earlier, len(lengths))
    first = bounds[np.maximum(number - reach, 0)]
    return table_of((bounds[:-1], bounds[1:]), (first, bounds[1:]), UNBOUNDED, UNBOUNDED)


def block_diffusion_table(lengths: np.ndarray) -> np.ndarray:
    """Return the table of a sequence of noisy blocks, followed by the same blocks without noise."""
    bounds = bounds_of(lengths)
    # Blocks of 2 and 1 tokens, noisy ones first. Clean blocks see clean ones only:
    #     ##....
    #     ##....
    #     ..###.
    #     ...##.
    #     ...##.
    #     ...###
    noisy, end = (bounds[:-1], bounds[1:]), bounds[-1:]
    clean = noisy[0] + end, noisy[1] + end
    parts = (noisy, noisy), (noisy, (end, clean[0])), (clean, (end, clean[1]))
    tables = [table_of(queries, keys, UNBOUNDED, UNBOUNDED) for queries, keys in parts]
    return np.concatenate(tables)


def pool_table(num_tokens: int, size: int) -> np.ndarray:
    """Return the table of tokens that see the pools of `size` tokens which end before them."""
    # Six tokens and pools of two: a token sees the pools that end at it, or before it.
    #     ...
    #     #..
    #     #..
    #     ##.
    #     ##.
    #     ###
    number = np.arange(num_tokens // size)
    check_count(len(number))
    begins = (number + 1) * size - 1  # a token is the last of one pool, and sees that
    ends = np.minimum(begins + size, num_tokens)
    return table_of((begins, ends), (np.zeros_like(number), number + 1), UNBOUNDED, UNBOUNDED)


def bounds_of(lengths: np.ndarray) -> np.ndarray:
    """Return the boundaries of consecutive parts that begin at 0."""
    return np.append(0, np.cumsum(lengths, dtype=np.int64))


def tree_table(parents: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the table of nodes that see themselves causally, and all their ancestors."""
    bounds = bounds_of(lengths)
    nodes = bounds[:-1], bounds[1:]
    # If nodes are in the order of a walk, the descendants of a node follow it in one range.
    # A root of two tokens, its two children, and another root of one token:
    #     #....
    #     ##...
    #     ###..
    #     ##.#.
    #     ....#
    ancestor, first, end = np.array(_seen(parents.tolist()), dtype=np.int64).reshape(-1, 3).T
    keys = bounds[ancestor], bounds[ancestor + 1]
    earlier = table_of((bounds[first], bounds[end]), keys, UNBOUNDED, UNBOUNDED)
    return np.concatenate([table_of(nodes, nodes, UNBOUNDED, 0), earlier])


def _seen(parents: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (ancestor, first, end): the nodes from `first` to `end - 1` see the ancestor."""
    ranges, seen = [], {}  # seen: ancestor of the last node -> first node that sees it, root first
    for node, parent in enumerate((*parents, -1)):
        fresh = []
        while parent != -1 and parent not in seen:
            fresh.append(parent)
            parent = parents[parent]
        # `parent` is now the lowest common ancestor: this node sees no ancestor below it.
        while seen and next(reversed(seen)) != parent:
            ancestor, first = seen.popitem()
            ranges.append((ancestor, first, node))
        check_count(len(ranges))  # in another order of nodes, the number may be quadratic
        seen |= dict.fromkeys(reversed(fresh), node)
    return ranges


def global_table(bounds: np.ndarray, counts: np.ndarray, window: int) -> np.ndarray:
    """Return the table of documents with causal windows, whose first tokens all later ones see."""
    documents = bounds[:-1], bounds[1:]
    begins, inner = beginnings(bounds, counts)
    # Six tokens with a window of one before them, and the first seen by all:
    #     #.....
    #     ##....
    #     ###...
    #     #.##..
    #     #..##.
    #     #...##
    tokens = table_of(documents, (begins, inner), UNBOUNDED, 0)
    return np.concatenate([tokens, table_of(documents, (inner, bounds[1:]), window, 0)])


def aligned_table(bounds: np.ndarray, key_bounds: np.ndarray, mask: Mask) -> np.ndarray:
    """Return the table of query and key documents, with the mask aligned at their last tokens."""
    # A lag of 0 lies between the last query and the last key of a document, not the first ones.
    # Two queries that continue three cached keys, under a causal mask:
    #     ####.
    #     #####
    ahead = key_bounds[1:] - bounds[1:]
    left, right = (
        np.full_like(ahead, UNBOUNDED) if x == UNBOUNDED else x + sign * ahead
        for x, sign in zip(band_of(mask), (-1, 1), strict=True)
    )
    return table_of(
        queries=(bounds[:-1], bounds[1:]),
        keys=(key_bounds[:-1], key_bounds[1:]),
        left=left,
        right=right,
    )


def query_table(begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the table of one key range for each query; ranges that stay or move in step join."""
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
        # An end that moves along with the queries bounds the lag; one that stays is the range's.
        left = query - begins[query] if last > query and moves[0, query] else UNBOUNDED
        right = ends[query] - 1 - query if last > query and moves[1, query] else UNBOUNDED
        table.append((*row, left, right))
        query = last + 1
    return np.array(table, dtype=np.int64).reshape(-1, NUM_FIELDS)
