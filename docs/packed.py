"""Draws docs/packed.svg: steps on documents of every length, by mesh, from the card.

python -m docs.packed --write
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean

import matplotlib

from docs.figures import MESHES, packed_documents

PICTURE = Path(__file__).with_suffix(".svg")


def draw() -> None:
    """Write the picture."""
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "packed"
    from matplotlib import pyplot

    card = packed_documents()
    kinds = list(dict.fromkeys(m["lengths"] for m in card))
    ranks = sorted({m["world_size"] for m in card})
    _, panels = pyplot.subplots(1, len(kinds), figsize=(9, 3), layout="tight")
    for panel, kind in zip(panels, kinds, strict=True):
        for i, (name, way) in enumerate(MESHES.items()):
            steps = [
                mean(
                    m["step"]
                    for m in card
                    if (m["lengths"], m["world_size"], m["way"]) == (kind, num_ranks, way)
                )
                for num_ranks in ranks
            ]
            panel.bar([x + (i - 1) * 0.27 for x in range(len(ranks))], steps, 0.25, label=name)
        panel.set(title=kind, xlabel="ranks", xticks=range(len(ranks)), xticklabels=ranks)
    panels[0].set_ylabel("s of a step, simulated")
    panels[1].legend(frameon=False, loc="upper left")
    pyplot.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        draw()
