"""Random slices, and what they show, pair by pair."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from dtensor_ring.planning.slices import UNBOUNDED, Slices


def shown(table: np.ndarray, seq_lens: tuple[int, int]) -> np.ndarray:
    """`(S, T)`: in how many slices each pair of a query (row) and a key (column) is."""
    count = np.zeros(seq_lens, dtype=np.int64)
    lag = np.arange(seq_lens[0])[:, None] - np.arange(seq_lens[1])
    for q_begin, q_end, k_begin, k_end, left, right in table.tolist():
        part = slice(q_begin, q_end), slice(k_begin, k_end)
        count[part] += (lag[part] <= left) & (-lag[part] <= right)
    return count


@st.composite
def tables(draw: st.DrawFn, seq_lens: tuple[int, int], max_size: int = 8) -> np.ndarray:
    """Slices in any order, no pair in two of them."""
    spans = [
        st.tuples(st.integers(0, seq_len), st.integers(0, seq_len)).map(sorted)
        for seq_len in seq_lens
    ]
    bounds = st.just(UNBOUNDED) | st.integers(-max(seq_lens), max(seq_lens))
    rows = st.tuples(*spans, bounds, bounds).map(lambda x: (*x[0], *x[1], *x[2:]))
    kept, count = [], np.zeros(seq_lens, dtype=np.int64)
    for row in draw(st.lists(rows, max_size=max_size)):
        seen = shown(np.array([row], dtype=np.int64), seq_lens)
        if not (seen & count).any():
            kept.append(row)
            count += seen
    return np.array(kept, dtype=np.int64).reshape(-1, 6)


@st.composite
def grids(draw: st.DrawFn, seq_lens: tuple[int, int], max_size: int) -> np.ndarray:
    """Many slices: a grid of cells, each with a band of its own, or with nothing."""
    most = max(1, int(max_size**0.5))
    edges = [
        sorted(
            {0, seq_len, *draw(st.lists(st.integers(0, seq_len), min_size=most - 1, max_size=most))}
        )
        for seq_len in seq_lens
    ]
    sides = st.integers(-max(seq_lens), max(seq_lens))
    # A band of no width shows nothing.
    bands = st.sampled_from([(UNBOUNDED, UNBOUNDED), (UNBOUNDED, 0), (-1, UNBOUNDED)]) | st.tuples(
        sides, st.integers(0, max(seq_lens))
    ).map(lambda band: (band[0], band[1] - band[0]))
    cells = [(*q, *k) for q in pairwise(edges[0]) for k in pairwise(edges[1])]
    rows = [(*cell, *draw(bands)) for cell in cells if draw(st.integers(0, 3))]
    return np.array(rows, dtype=np.int64).reshape(-1, 6)


def slices(
    seq_lens: tuple[int, int], num_rows: int, max_size: int = 8
) -> st.SearchStrategy[Slices]:
    """Slices of so many batch rows; 1 is the whole batch."""
    rows = tables(seq_lens, max_size) | grids(seq_lens, max_size)
    return st.lists(rows, min_size=num_rows, max_size=num_rows).map(Slices.of_tables)
