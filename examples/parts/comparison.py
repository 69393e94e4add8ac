"""Two training runs, one beside the other: a table and a picture."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot as plt
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table

KINDS = {
    "tile": ("attention", "#4477aa"),
    "merge": ("merging of partial results", "#ccbb44"),
    "pack": ("packing and posting of messages", "#66ccee"),
    "wait": ("waiting for messages", "#ee6677"),
}
"""By the first word of what a ring says in a profile: what it means, and its colour."""
SAME = {"send": "pack", "unpack": "pack"}
"""Words that are shown as another one."""


@dataclass
class Run:
    """Measurements of one training run; memory is the peak of one process beyond its start."""

    losses: list[float]
    tokens_per_second: float
    peak_bytes: int
    spans: list[list[tuple[str, float, float]]] = field(default_factory=list)
    """By rank, what it did in the last step: kind, begin and end in milliseconds.

    The first span is the step itself.
    """

    @property
    def waiting(self) -> float:
        """Share of the last step that ranks waited for messages, their mean."""
        shares = []
        for (_, begin, end), *spans in self.spans:
            waited = sum(last - first for kind, first, last in spans if kind == "wait")
            shares.append(waited / (end - begin))
        return sum(shares) / len(shares)


def largest_difference(ring: Run, stock: Run) -> float:
    """Largest difference of the losses at any step, in nats; NaN if any is."""
    return (torch.tensor(ring.losses) - torch.tensor(stock.losses)).abs().max().item()


def show(options: argparse.Namespace, ring: Run, stock: Run, difference: float) -> None:
    """The two runs side by side."""
    table = Table(title=f"{options.model} on {options.seq_len} bytes of Python per sequence")
    for column in ("run", "last loss", "largest diff.", "tokens/s", "peak memory"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for name, run, apart in (
        ("stock, 1 process", stock, ""),
        (f"{options.layout} ring, {options.world} processes", ring, f"{difference:.1e}"),
    ):
        speed, memory = (
            f"{run.tokens_per_second:,.0f}",
            f"{run.peak_bytes / 2**20:,.0f} MiB/process",
        )
        table.add_row(name, f"{run.losses[-1]:.6f}", apart, speed, memory)
    Console().print(table)


def plot(path: Path, ring: Run, stock: Run, name: str) -> None:
    """The measured time line of the last step above the losses."""
    height = 0.5 * len(ring.spans)
    figure, (times, losses) = plt.subplots(
        2, figsize=(9, 4.6 + height), height_ratios=(height + 0.6, 3.5), layout="constrained"
    )
    plot_times(times, ring)
    losses.plot(stock.losses, linewidth=5, alpha=0.35, label="stock transformers, 1 process")
    losses.plot(ring.losses, color="black", linewidth=1, label=f"ring, {name}")
    losses.set(xlabel="optimizer step", ylabel="loss (nats per byte)", title="The same curve")
    losses.xaxis.set_major_locator(MaxNLocator(integer=True))
    losses.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_times(axes: Any, ring: Run) -> None:
    """A line for each rank: what its rings did, on the grey of the whole step."""
    for rank, ((_, begin, end), *spans) in enumerate(ring.spans):
        axes.broken_barh([(begin, end - begin)], (rank - 0.4, 0.8), color="#e4e4e4")
        for kind, (_, color) in KINDS.items():
            parts = [(first, last - first) for x, first, last in spans if SAME.get(x, x) == kind]
            axes.broken_barh(parts, (rank - 0.4, 0.8), color=color)
    handles = [Patch(color=color, label=text) for text, color in KINDS.values()]
    handles.append(Patch(color="#e4e4e4", label="the rest of the model"))
    axes.legend(
        handles=handles, frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.35)
    )
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds", yticks=range(len(ring.spans)), title="The last step, measured")
    axes.set_yticklabels([f"rank {rank}" for rank in range(len(ring.spans))])
