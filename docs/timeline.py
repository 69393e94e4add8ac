"""Draws docs/timeline.svg: what each rank computes when, by the plans of two layouts.

    python -m docs.timeline --write

Without the option, the schedules are printed as text.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from docs.plans import COLORS
from docs.program import run
from dtensor_ring import Mask, describe_schedule
from dtensor_ring.lab.schedule import Schedule
from dtensor_ring.planning.plan import Plan

PICTURE = Path(__file__).with_suffix(".svg")

SEQ_LEN, WORLD_SIZE = 65536, 4
TITLES = {
    "contiguous": "contiguous: each rank has one piece, and early tokens see little",
    "zigzag": "zigzag: each rank has a piece from the front and one from the back",
}
"""By layout."""

WIDTH, LEFT, SCALE = 800, 60, 400
"""Pixels: of the picture, before the time lines, and of the mean work of a rank."""
TITLE, ROW, BLOCK, STRIP = 26, 34, 22, 5
"""Pixels: of a title, of a rank's row, of what it computes, and of what arrives meanwhile."""


class Block(NamedTuple):
    """A step of a rank; times are in units of the mean work of a rank."""

    rank: int
    source: int
    begin: float
    end: float
    arriving: int | None
    """The rank whose keys and values come for the next step."""


def schedule(layout: str) -> Schedule:
    """The plans of all ranks under a causal mask."""
    return describe_schedule(layout, Mask.causal(), SEQ_LEN, WORLD_SIZE)


def blocks(found: Schedule) -> list[Block]:
    """All steps that compute, at the times that `Schedule.makespan` counts with."""
    areas = found.areas
    mean = found.total_area / len(areas)
    return [
        Block(rank, plan.steps[number].source, begin / mean, (begin + area) / mean, arriving)
        for number, begins in enumerate(found.begins[:-1])
        for rank, (plan, begin) in enumerate(zip(found.plans, begins, strict=True))
        for arriving in [_arriving(plan, number)]
        for area in [areas[rank][number]]
        if area
    ]


def _arriving(plan: Plan, number: int) -> int | None:
    for hop in plan.shards[number : number + 1]:
        for transfer in hop.receives:
            return transfer.source
    return None


def picture() -> str:
    """Both time lines as SVG, on one scale."""
    height = TITLE + WORLD_SIZE * ROW + 12
    panels = [
        f'<g transform="translate(0 {number * height})">\n{"".join(_panel(layout))}</g>\n'
        for number, layout in enumerate(TITLES)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{len(TITLES) * height}" '
        'font-family="sans-serif" font-size="12" fill="#808080">\n'
        f"{''.join(panels)}</svg>\n"
    )


def _panel(layout: str) -> Iterator[str]:
    """A row for each rank: grey while it waits, until the last one is done."""
    found = schedule(layout)
    last = found.makespan * SCALE
    yield f'<text x="0" y="16" font-weight="bold">{TITLES[layout]}</text>\n'
    for rank in range(WORLD_SIZE):
        y = TITLE + rank * ROW
        yield f'<text x="0" y="{y + 15}">rank {rank}</text>\n'
        yield _bar(LEFT, y, last, BLOCK, 'fill-opacity="0.2"')
    for block in blocks(found):
        x, y = LEFT + block.begin * SCALE, TITLE + block.rank * ROW
        width = (block.end - block.begin) * SCALE
        yield _bar(x, y, width - 1, BLOCK, f'fill="{COLORS[block.source]}"')
        text = "its own keys" if block.source == block.rank else f"keys of rank {block.source}"
        yield f'<text x="{x + 5:.1f}" y="{y + 15}" fill="#ffffff">{text}</text>\n'
        if block.arriving is not None:
            yield _bar(x, y + BLOCK + 1, width - 1, STRIP, f'fill="{COLORS[block.arriving]}"')
    first = min(found.areas, key=sum)
    if sum(first) < max(map(sum, found.areas)):
        rank = found.areas.index(first)
        x = LEFT + max(x.end for x in blocks(found) if x.rank == rank) * SCALE
        yield f'<text x="{x + 6:.1f}" y="{TITLE + rank * ROW + 15}">waits</text>\n'
    yield f'<text x="{LEFT + last + 6:.1f}" y="{TITLE + 15}">{found.makespan:.2f}</text>\n'


def _bar(x: float, y: float, width: float, height: float, style: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" {style}/>\n'


if __name__ == "__main__":
    run(__doc__, PICTURE, picture, map(schedule, TITLES))
