"""Draws docs/plans.svg: which rank computes what, and at which step, from plans of small rings.

    python -m docs.plans --write

Without the option, the schedules are printed as text.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from docs.program import run
from dtensor_ring import Mask, describe_schedule
from dtensor_ring.lab.schedule import Schedule
from dtensor_ring.planning.plan import Step

PICTURE = Path(__file__).with_suffix(".svg")

SEQ_LEN, WORLD_SIZE = 32, 4


class Example(NamedTuple):
    """An attention of 32 tokens on 4 ranks."""

    layout: str
    mask: Mask
    cu_seqlens: list[int] | None = None

    @property
    def schedule(self) -> Schedule:
        """The plans of all ranks."""
        return describe_schedule(self.layout, self.mask, SEQ_LEN, WORLD_SIZE, self.cu_seqlens)

    @property
    def positions(self) -> list[np.ndarray]:
        """Of the tokens of each rank."""
        return _positions(self.schedule)


CAUSAL, DOCUMENTS = Mask.causal(), [0, 18, 24, 32]

EXAMPLES = {
    "causal, contiguous": Example("contiguous", CAUSAL),
    "causal, zigzag": Example("zigzag", CAUSAL),
    "window of 4, contiguous": Example("contiguous", Mask.sliding(4)),
    "documents, zigzag": Example("zigzag", CAUSAL, DOCUMENTS),
}
"""By title."""

COLORS = "#4c78a8", "#f58518", "#54a24b", "#b279a2"
"""Of the ranks; they can be distinguished on white and on black."""

CELL, GAP = 6, 3
"""Pixels of a cell, cells between panels."""


def computed(schedule: Schedule) -> np.ndarray:
    """`(S, S, 2)`: the rank and the step at which each pair is computed; -1 where it is hidden."""
    cells = np.full((SEQ_LEN, SEQ_LEN, 2), -1)
    positions = _positions(schedule)
    for plan in schedule.plans:
        for step in plan.steps:
            rows, cols = positions[plan.rank], positions[step.source][_indices(step)]
            for tile in step.tiles:
                queries, keys = rows[slice(*tile.rows)], cols[slice(*tile.cols)]
                # The band of a tile is one of indices.
                ahead = np.arange(len(keys)) - np.arange(len(queries))[:, None]
                is_seen = np.ones_like(ahead, dtype=bool)
                if tile.mask.right is not None:
                    is_seen &= ahead <= tile.mask.right
                if tile.mask.left is not None:
                    is_seen &= -ahead <= tile.mask.left
                i, j = is_seen.nonzero()
                assert (cells[queries[i], keys[j]] == -1).all(), "a pair is computed once"
                cells[queries[i], keys[j]] = plan.rank, step.number
    return cells


def _positions(schedule: Schedule) -> list[np.ndarray]:
    """Of the tokens of each rank."""
    ranks = range(WORLD_SIZE)
    return [np.array(schedule.layout.positions(rank, WORLD_SIZE, SEQ_LEN)) for rank in ranks]


def _indices(step: Step) -> np.ndarray:
    """The tokens of the source's shard that a step computes on."""
    return np.concatenate([np.arange(*span) for span in step.cols.spans] or [np.arange(0)])


def picture() -> str:
    """All panels as SVG."""
    side = (SEQ_LEN + GAP) * CELL
    panels = [
        f'<g transform="translate({number * side} 0)">\n{_panel(title, example)}</g>\n'
        for number, (title, example) in enumerate(EXAMPLES.items())
    ]
    width, height = len(EXAMPLES) * side, side
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">\n'
        f"{''.join(panels)}</svg>\n"
    )


def _panel(title: str, example: Example) -> str:
    """Queries down, keys across; a color by rank, paler by step."""
    cells = computed(example.schedule)
    paths = []
    for rank, step in sorted({tuple(cell) for cell in cells.reshape(-1, 2).tolist()} - {(-1, -1)}):
        path = "".join(_rows((cells == (rank, step)).all(-1)))
        opacity = round(0.7**step, 2)
        paths.append(f'<path d="{path}" fill="{COLORS[rank]}" fill-opacity="{opacity}"/>\n')
    return (
        f'<text x="0" y="13" font-family="monospace" font-size="12" fill="#808080">{title}</text>\n'
        f'<g transform="translate(0 {GAP * CELL}) scale({CELL})">\n'
        f'<rect width="{SEQ_LEN}" height="{SEQ_LEN}" fill="#808080" fill-opacity="0.15"/>\n'
        f"{''.join(paths)}</g>\n"
    )


def _rows(cells: np.ndarray) -> list[str]:
    """The cells as rectangles of one row each."""
    parts = []
    for y, row in enumerate(cells.tolist()):
        x = 0
        for is_there, alike in groupby(row):
            width = len(list(alike))
            if is_there:
                parts.append(f"M{x} {y}h{width}v1h-{width}z")
            x += width
    return parts


if __name__ == "__main__":
    run(
        __doc__,
        PICTURE,
        picture,
        (f"{title}\n{example.schedule}\n" for title, example in EXAMPLES.items()),
    )
