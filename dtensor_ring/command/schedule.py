"""The command `schedule`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dtensor_ring.command.drawing import drawing
from dtensor_ring.planning.balancing.hybrid import Hybrid, compare_hybrid_layouts
from dtensor_ring.planning.masks.mask import Mask
from dtensor_ring.planning.schedule import Schedule, describe_schedule


def schedule(
    seq_len: int,
    world_size: int,
    layout: str | None,
    mask: Mask,
    cu_seqlens: Sequence[int] | None,
    strategy: str,
    hybrid: Hybrid | None,
    as_json: bool,
    html: Path | None = None,
    png: Path | None = None,
) -> int:
    """Print the work of each rank at each step, and draw it; returns the exit status."""
    try:
        asked = layout or "zigzag", mask, seq_len, world_size, cu_seqlens
        found = describe_schedule(*asked, strategy=strategy)
        layouts = compare_hybrid_layouts(hybrid, mask, seq_len, world_size) if hybrid else None
        _save(found, html, png)
    except (ImportError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    if not as_json:
        print(found, *([layouts] if layouts else []), sep="\n")
        return 0
    measures: dict[str, Any] = {"imbalance": found.imbalance, "makespan": found.makespan}
    if layouts:
        measures["layouts"] = [asdict(row) for row in layouts.rows]
    print(json.dumps({"areas": found.areas, "received": found.received, **measures}))
    return 0


def _save(found: Schedule, html: Path | None, png: Path | None) -> None:
    """Draw what is asked for.

    Raises:
        ImportError: if the package that draws it is not installed.
        OSError: if it cannot be written.
    """
    for path, suffix, package in ((html, "html", "plotly"), (png, "png", "matplotlib")):
        if path is None:
            continue
        try:
            _draw(found, path, suffix)
        except ModuleNotFoundError as error:
            raise ImportError(
                f"--{suffix} draws with {package}, which is not installed: pip install {package}"
            ) from error


def _draw(found: Schedule, path: Path, suffix: str) -> None:
    # Packages that draw are imported where they are needed.
    if suffix == "html":
        from dtensor_ring.command.html import page

        path.write_text(page(drawing(found)))
    else:
        from dtensor_ring.command.png import save_picture

        save_picture(drawing(found), path)
