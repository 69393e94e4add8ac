"""The command `simulate` prints and draws what a training step would take on a machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from dtensor_ring.command.pictures import save_figure
from dtensor_ring.command.step_pictures import draw_winners, step_page, winner_page
from dtensor_ring.simulate.machine_files import as_machine
from dtensor_ring.simulate.model_config import read_json
from dtensor_ring.simulate.training.step import simulate_step
from dtensor_ring.simulate.training.step_sweep import parse_sweep, sweep_steps
from dtensor_ring.simulate.training.step_trace import step_trace
from dtensor_ring.simulate.training.winner_map import WinnerMap, winner_map

# Reads the config that a command line names, with all defaults. Raises ImportError if a package for
# that is not installed, and ValueError if there is no such config.
ReadConfig = Callable[[str], Mapping[str, Any]]


def config_file(spec: str) -> Mapping[str, Any]:
    """Return what a `config.json` has, without the defaults that it leaves out.

    Raises:
        ValueError: if there is no such file.
    """
    return read_json(Path(spec))


def mesh_axes(text: str) -> dict[str, int]:
    """Parse the axes of a mesh, and the number of ranks along each.

    Raises:
        ValueError: if a size is no number, or a name is there twice.

    >>> mesh_axes("dp=4,cp=8")
    {'dp': 4, 'cp': 8}
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name in axes or not (size.isascii() and size.isdigit()):
            raise ValueError(f"{text!r} is not a mesh, such as dp=4,cp=8 or dp=4,cp=8,tp=2")
        axes[name] = int(size)
    return axes


# Tokens of a rank, and bytes per second of a link, in a picture of winners.
MAP_TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
MAP_RATES = (10e9, 25e9, 50e9, 100e9, 200e9, 400e9, 800e9)


def simulate(
    read: ReadConfig,
    model: str,
    mesh: str,
    machine: str,
    layout: str | None,
    cu_seqlens: Sequence[int] | None,
    sweep: Sequence[str] | None,
    as_json: bool,
    html: Path | None,
    png: Path | None,
    trace: Path | None,
    **options: Any,
) -> int:
    """Print what a training step takes, draw it, and return the exit status.

    Args:
        read: reads the config.
        model: names it.
        mesh: ranks by axis, as `mesh_axes` reads them.
        machine: the name of a preset, or a file.
        layout: how tokens are sharded.
        cu_seqlens: boundaries of the documents of all sequences.
        sweep: what `parse_sweep` reads; `None` for one step.
        as_json: whether to print JSON.
        html: file of a page: of the step, or of a sweep which strategy wins where.
        png: file of an image of which strategy wins where.
        trace: file of a trace of the step.
        options: other arguments of `simulate_step`.
    """
    try:
        axes = mesh_axes(mesh)
        options["layout"] = layout or "zigzag"
        asked = options | {"config": read(model), "mesh": axes, "machine": as_machine(machine)}
        if cu_seqlens is not None:
            axis_names = ("dp_replicate", "dp_shard", "dp")
            asked["batches"] = [cu_seqlens] * prod(axes.get(x, 1) for x in axis_names)
        if sweep is None:
            lines = _one(asked, as_json, html, png, trace)
        else:
            lines = _swept(sweep, asked, as_json, html, png, trace)
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    print(lines)
    return 0


def _one(
    asked: Mapping[str, Any],
    as_json: bool,
    html: Path | None,
    png: Path | None,
    trace: Path | None,
) -> str:
    """Simulate one step, save its pictures, and return what is printed."""
    if png is not None:
        raise ValueError("--png draws which strategy wins, and needs --sweep")
    found = simulate_step(**asked)
    if html is not None:
        html.write_text(drawn_by("html", lambda: step_page(found)))
    if trace is not None:
        trace.write_text(json.dumps(step_trace(found)))
    return json.dumps(found.as_json()) if as_json else str(found)


def _swept(
    sweep: Sequence[str],
    asked: Mapping[str, Any],
    as_json: bool,
    html: Path | None,
    png: Path | None,
    trace: Path | None,
) -> str:
    """Simulate the steps of a sweep, save its pictures, and return what is printed."""
    if trace is not None:
        raise ValueError("--trace is of one step, and not of a --sweep")
    swept = parse_sweep(sweep)
    found = sweep_steps(swept, **asked)
    if html is not None or png is not None:
        winners = _winners(swept, asked)
        if html is not None:
            html.write_text(drawn_by("html", lambda: winner_page(winners)))
        if png is not None:
            path = png
            drawn_by("png", lambda: save_figure(lambda x: draw_winners(x, winners), path))
    return json.dumps([row.as_json() for row in found.rows]) if as_json else str(found)


def _winners(swept: Mapping[str, Sequence[Any]], asked: Mapping[str, Any]) -> WinnerMap:
    """Return the winners over the largest axis of the sweep."""
    names = ("layout", "batch", "dtype", "kernel")
    options = {name: asked[name] for name in names if name in asked}
    cp = max((x for x in swept.get("cp", ())), default=asked["mesh"].get("cp", 1))
    mesh = {"cp": cp, "tp": asked["mesh"].get("tp", 1)}
    return winner_map(asked["config"], mesh, asked["machine"], MAP_TOKENS, MAP_RATES, **options)


Drawn = TypeVar("Drawn")


def drawn_by(suffix: str, draw: Callable[[], Drawn]) -> Drawn:
    """Return what `draw` makes.

    Raises:
        ImportError: if the package that draws it is not installed.
    """
    package = {"html": "plotly", "png": "matplotlib"}[suffix]
    try:
        return draw()
    except ModuleNotFoundError as error:
        raise ImportError(
            f"--{suffix} draws with {package}, which is not installed: pip install {package}"
        ) from error
