"""Draws docs/slices.svg: what the builders of `Slices` show, one panel each, a color by slice.

    python -m docs.slices --write

Without the option, the slices are printed as text.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from docs.program import run
from dtensor_ring import Mask, Slices

PICTURE = Path(__file__).with_suffix(".svg")

EXAMPLES = {
    "documents": Slices.documents([0, 8, 16, 24], [Mask.causal(), Mask.full(), Mask.sliding(2)]),
    "prefix": Slices.prefix([0, 14, 24], prefix_lengths=[6, 3]),
    "blocks": Slices.blocks([0, 24], begins=[3, 14], ends=[9, 19]),
    "global_tokens": Slices.global_tokens([0, 24], num_global=2, window=4),
    "bottom_right": Slices.bottom_right([0, 10], [0, 24]),
    "per_query": Slices.per_query([0] * 6 + [4] * 10 + [14] * 8, [4] * 6 + [14] * 10 + [24] * 8),
    "pools": Slices.pools(24, size=2),
    "block_causal": Slices.block_causal([6] * 4, num_earlier=2),
    "block_diffusion": Slices.block_diffusion([4] * 3),
    "shared_prefix": Slices.shared_prefix([6, 2], [[4, 5], [4, 3]]),
    "tree": Slices.tree(parents=[-1, 0, 1, 1, 0, 4], lengths=[4] * 6),
}
"""By builder."""

COLORS = "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2"
"""Of the slices in turn; they can be distinguished on white and on black."""

SIDE, CELL, COLUMNS = 24, 6, 6
"""Cells of a panel, pixels of a cell, panels in a row."""


def picture() -> str:
    """All panels as SVG."""
    step = (SIDE + 4) * CELL
    panels = [
        f'<g transform="translate({number % COLUMNS * step} {number // COLUMNS * step})">\n'
        f"{_panel(name, slices)}</g>\n"
        for number, (name, slices) in enumerate(EXAMPLES.items())
    ]
    width, height = COLUMNS * step, -(-len(panels) // COLUMNS) * step
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">\n'
        f"{''.join(panels)}</svg>\n"
    )


def _panel(name: str, slices: Slices) -> str:
    """Queries down, keys across, below the name of the builder."""
    (table,) = slices.tables
    num_queries, num_keys = table[:, [1, 3]].max(axis=0).tolist()
    paths = [
        f'<path d="{_path(row)}" fill="{COLORS[number % len(COLORS)]}"/>\n'
        for number, row in enumerate(table.tolist())
    ]
    return (
        f'<text x="6" y="14" font-family="monospace" font-size="13" fill="#808080">{name}</text>\n'
        f'<g transform="translate({CELL} {3 * CELL}) scale({CELL})">\n'
        f'<rect width="{num_keys}" height="{num_queries}" fill="#808080" fill-opacity="0.15"/>\n'
        f"{''.join(paths)}</g>\n"
    )


def _path(row: list[int]) -> str:
    """The pairs of a slice as rectangles, queries that see the same keys in one."""
    q_begin, q_end, k_begin, k_end, left, right = row
    spans = [(max(k_begin, q - left), min(k_end, q + right + 1)) for q in range(q_begin, q_end)]
    top, parts = q_begin, []
    for (begin, end), alike in groupby(spans):
        height = len(list(alike))
        if begin < end:
            parts.append(f"M{begin} {top}h{end - begin}v{height}h{begin - end}z")
        top += height
    return "".join(parts)


if __name__ == "__main__":
    run(__doc__, PICTURE, picture, (f"{name}\n{slices}\n" for name, slices in EXAMPLES.items()))
