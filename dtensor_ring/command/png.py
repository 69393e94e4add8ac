"""A picture of a schedule."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np

from dtensor_ring.command.drawing import COLORS, Drawing


def save_picture(drawn: Drawing, path: Path) -> None:
    """Draw the mask, the time line and the work of each step, beside one another, to a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    FigureCanvasAgg(figure)  # whatever a user's backend is, no window opens
    mask, (time, work) = _panels(figure)
    _mask(mask, drawn)
    _time(time, drawn)
    _work(work, drawn)
    figure.suptitle(drawn.title)
    if drawn.note:
        figure.supxlabel("\n".join(wrap(drawn.note, 150)), fontsize="small")
    figure.savefig(path, dpi=130, format="png")


def _panels(figure: Any) -> tuple[Any, tuple[Any, Any]]:
    grid = figure.add_gridspec(2, 2, width_ratios=(1, 1.1))
    return figure.add_subplot(grid[:, 0]), tuple(figure.add_subplot(grid[i, 1]) for i in (0, 1))


def _mask(axes: Any, drawn: Drawing) -> None:
    """Each rank's queries in its colour, later steps lighter."""
    from matplotlib.colors import to_rgb

    rgb = np.array([to_rgb(color) for color in COLORS])[drawn.owners % len(COLORS)]
    number = max(1, len(drawn.areas[0]))
    lightness = 0.75 * np.maximum(drawn.steps, 0) / number
    shades = rgb[:, None] + (1 - rgb[:, None]) * lightness[..., None]
    shades[drawn.steps < 0] = 0.96
    last = int(drawn.positions[-1]) + 1 if len(drawn.positions) else 1
    axes.imshow(shades, extent=(0, last, last, 0), interpolation="nearest")
    axes.set(xlabel="key", ylabel="query", title="rank by colour, later steps lighter")


def _time(axes: Any, drawn: Drawing) -> None:
    for bar in drawn.bars:
        if bar.end > bar.begin:
            color = COLORS[bar.rank % len(COLORS)]
            size = bar.end - bar.begin
            axes.barh(bar.rank, size, left=bar.begin, color=color, edgecolor="white", height=0.8)
            if size > 0.05:
                where = bar.begin + size / 2, bar.rank
                axes.text(*where, str(bar.source), ha="center", va="center", color="white")
    axes.invert_yaxis()
    axes.set(xlabel="time, in the mean work of a rank", ylabel="rank")
    axes.set(yticks=range(len(drawn.own)), title="steps, by the rank whose keys they are about")


def _work(axes: Any, drawn: Drawing) -> None:
    whole = max(1, sum(map(sum, drawn.areas)))
    shares = 100 * np.array(drawn.areas, dtype=float) / whole
    image = axes.imshow(shares, cmap="Blues", vmin=0, aspect="auto")
    axes.figure.colorbar(image, ax=axes, label="% of all work")
    axes.set(xlabel="step", ylabel="rank", yticks=range(len(shares)), title="balance")
    axes.set(xticks=range(0, shares.shape[1], -(-shares.shape[1] // 16)))
