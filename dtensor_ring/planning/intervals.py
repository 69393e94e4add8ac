"""Intervals of keys: what each query of a step sees, for kernels that take a mask as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dtensor_ring.planning.ranges import Span, expanded, length, numbered, united
from dtensor_ring.planning.tile import Tile


@dataclass(frozen=True, eq=False)
class KeyIntervals:
    """The keys that each query of a box sees.

    With `F = ends[b, :, i]`, query i of batch row b sees the keys `[0, F[0])`, `[F[1], F[2])`,
    `[F[3], F[4])` and so on. The numbers of a query never descend, so an interval may be empty.

    Attributes:
        batches: range of batch rows of the box.
        rows: range of queries, from the first to the last that a tile has.
        cols: range of keys, likewise. The numbers count from its first key.
        ends: int32 `(B, F, R)`, F is odd. B is 1 if all batch rows see the same.
    """

    batches: Span
    rows: Span
    cols: Span
    ends: np.ndarray


def intervals_of(tiles: Sequence[Tile], batch_size: int) -> KeyIntervals:
    """Return the keys that the queries of tiles see, by the fewest numbers that serve all of them.

    Args:
        tiles: one or more tiles of a step; no pair of a query and a key is in two of them.
        batch_size: number of batch rows.

    Example:
        >>> from dtensor_ring import Mask
        >>> intervals_of([Tile((0, 3), (5, 8), Mask(1, 0))], 1).ends[0].tolist()
        [[1, 2, 0], [1, 2, 1], [1, 2, 3]]
    """
    alone = [tile.batch for tile in tiles if tile.batch is not None]
    # A tile without a batch row is for all of them, so the box must have them all.
    batches = (0, batch_size) if len(alone) < len(tiles) else (min(alone), max(alone) + 1)
    rows, cols = (_hull([getattr(x, side) for x in tiles]) for side in ("rows", "cols"))
    # Lines are the queries of one batch row after the other; of one row if all see the same.
    num_batches = length(batches) if alone else 1
    lines, firsts, ends = _seen(tiles, (batches[0], rows[0], cols[0]), num_batches, rows)
    lines, firsts, ends = united(lines, firsts, ends)
    table = _table(lines, firsts, ends, num_batches * length(rows))
    table = table.reshape(num_batches, length(rows), table.shape[1])
    return KeyIntervals(batches, rows, cols, np.ascontiguousarray(table.transpose(0, 2, 1)))


def _hull(spans: Sequence[Span]) -> Span:
    return min(span[0] for span in spans), max(span[1] for span in spans)


def _seen(
    tiles: Sequence[Tile], origin: tuple[int, int, int], num_batches: int, rows: Span
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the line, the first key and the end of the keys of each query of each tile.

    Args:
        tiles: the tiles.
        origin: the batch row, the query and the key that are counted from.
        num_batches: batch rows that have lines of their own.
        rows: range of all queries.
    """
    numbers = []
    for tile in tiles:
        (begin, end), cols, mask = tile.rows, tile.cols, tile.mask
        far = length(tile.rows) + length(cols)  # further than any key of the tile
        bounds = [far if x is None else x for x in (mask.left, mask.right)]
        every = range(num_batches) if tile.batch is None else (tile.batch - origin[0],)
        for batch in every:
            line = batch * length(rows) + begin - origin[1]
            numbers.append((line, line + end - begin, *(x - origin[2] for x in cols), *bounds))
    line, line_end, begin, end, left, right = np.array(numbers, dtype=np.int64).T
    whose, lines = expanded(line, line_end)
    # On the diagonal of its tile, row i stands at the key `begin + i`.
    own = begin[whose] + lines - line[whose]
    firsts = np.maximum(begin[whose], own - left[whose])
    return lines, firsts, np.minimum(end[whose], own + right[whose] + 1)


def _table(lines: np.ndarray, firsts: np.ndarray, ends: np.ndarray, num_lines: int) -> np.ndarray:
    """Return the numbers of all lines `(lines, F)`, from intervals that neither overlap nor touch.

    Args:
        lines: the line of each interval, ascending.
        firsts: its first key; ascending in a line.
        ends: the key after its last one.
        num_lines: number of lines; some may have no interval.
    """
    # A line that sees the keys 0, 1 and 4, one that sees 2 to 4, and one that sees none:
    #     2 4 5    [0, 2) and [4, 5)
    #     0 2 5    [0, 0) and [2, 5)
    #     0 0 0    [0, 0) and [0, 0)
    counts = np.bincount(lines, minlength=num_lines)
    _, place = numbered(counts)
    # The first interval of a table begins at key 0, and is empty if a line sees that one not.
    is_late = np.zeros(num_lines, dtype=bool)
    is_late[lines[place == 0]] = firsts[place == 0] > 0
    place += is_late[lines]
    table = np.zeros((num_lines, 2 * max(1, int(place.max(initial=0)) + 1) - 1), dtype=np.int32)
    is_last = np.append(lines[1:] != lines[:-1], True)[: len(lines)]
    # Empty intervals after the last one stand at its end, as numbers never descend.
    table[lines[is_last]] = ends[is_last, None]
    table[is_late, 0] = 0
    table[lines, 2 * place] = ends
    later = place > 0
    table[lines[later], 2 * place[later] - 1] = firsts[later]
    return table
