"""Draws docs/strategies.svg: what the busiest rank sends by each strategy, from plans.

python -m docs.strategies --write
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

from dtensor_ring import Mask, compare_strategies

PICTURE = Path(__file__).with_suffix(".svg")
SEQ_LEN, HEADS = 65536, (32, 8)
RANKS = (2, 4, 8, 16)
MASKS = {"causal": Mask.causal(), "window of 4,096": Mask.sliding(4095)}
STRATEGIES = {"ring": "ring", "ulysses:2": "Ulysses in pairs, ring", "ulysses": "Ulysses"}


def sent(mask: Mask, num_ranks: int) -> list[float]:
    """Megabytes of the busiest rank, forward and backward, by strategy."""
    names = list(STRATEGIES)
    rows = compare_strategies(mask, SEQ_LEN, num_ranks, HEADS, strategies=names).rows
    return [(row.forward.sent + row.backward.sent) / 1e6 for row in rows]


def draw() -> None:
    """Write the picture."""
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "strategies"
    from matplotlib import pyplot

    _, panels = pyplot.subplots(1, len(MASKS), figsize=(9, 3), sharey=True, layout="tight")
    for panel, (title, mask) in zip(panels, MASKS.items(), strict=True):
        by_ranks = [sent(mask, num_ranks) for num_ranks in RANKS]
        for i, name in enumerate(STRATEGIES.values()):
            places = [x + (i - 1) * 0.27 for x in range(len(RANKS))]
            panel.bar(places, [found[i] for found in by_ranks], 0.25, label=name)
        panel.set(title=title, xlabel="ranks", xticks=range(len(RANKS)), xticklabels=RANKS)
    panels[0].set_ylabel("MB sent, forward and backward")
    panels[0].legend(frameon=False)
    pyplot.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        draw()
