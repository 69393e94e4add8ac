"""The commands of `python -m dtensor_ring`; `parser.py` has their options."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from dtensor_ring.balanced.hybrid import Hybrid, compare_hybrid_layouts
from dtensor_ring.command.doctor import doctor
from dtensor_ring.command.estimated import estimate_or_longest
from dtensor_ring.command.parser import parse
from dtensor_ring.dtensor.choice import DEFAULT_MACHINE
from dtensor_ring.dtensor.meta_model import LoadModel
from dtensor_ring.lab.calibrate.calibrate import calibrate
from dtensor_ring.lab.choose import choose
from dtensor_ring.lab.comparison import compare_strategies
from dtensor_ring.lab.machine import Machine
from dtensor_ring.lab.pictures import drawing
from dtensor_ring.lab.presets import as_machine
from dtensor_ring.lab.schedule import Schedule, describe_schedule
from dtensor_ring.lab.training.simulate import ReadConfig, config_file, simulate
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.strategy import AUTO


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
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    machine: str | None = None,
) -> int:
    """Print the work of each rank at each step, draw it, and return the exit status."""
    try:
        asked = layout or "zigzag", mask, seq_len, world_size, cu_seqlens
        if strategy == AUTO:
            device = as_machine(machine or DEFAULT_MACHINE)
            strategy = choose(
                *(mask, seq_len, world_size, heads, head_dim, cu_seqlens),
                layout=layout or "zigzag",
                dtype=device.dtype_like("bfloat16"),
                machine=device,
            ).spec
        found = describe_schedule(*asked, strategy=strategy)
        layouts = compare_hybrid_layouts(hybrid, mask, seq_len, world_size) if hybrid else None
        _save(found, html, png)
    except (ImportError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if not as_json:
        print(found, *([layouts] if layouts else []), sep="\n")
        return 0
    measures: dict[str, Any] = {"imbalance": found.imbalance, "makespan": found.makespan}
    if layouts:
        measures["layouts"] = [asdict(row) for row in layouts.rows]
    print(json.dumps({"areas": found.areas, "received": found.received, **measures}))
    return 0


def _save(found: Schedule, html: Path | None, png: Path | None) -> None:
    """Save the pictures that are asked for.

    Raises:
        ImportError: if the package that draws one is not installed.
        OSError: if a file cannot be written.
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
    # Imported here, as plotly and matplotlib are optional.
    if suffix == "html":
        from dtensor_ring.lab.pictures import page

        path.write_text(page(drawing(found)))
    else:
        from dtensor_ring.lab.pictures import save_picture

        save_picture(drawing(found), path)


def compare(
    seq_len: int,
    world_size: int,
    layout: str | None,
    mask: Mask,
    cu_seqlens: Sequence[int] | None,
    heads: tuple[int, int],
    head_dim: int,
    max_held: int | None,
    machine: Machine | None,
    chosen: tuple[int, ...] | str | None,
    as_json: bool,
) -> int:
    """Print what each strategy costs, see `compare_strategies`, and return the exit status."""
    try:
        found = compare_strategies(
            mask,
            seq_len,
            world_size,
            heads,
            head_dim,
            cu_seqlens,
            layout=layout or "zigzag",
            max_held=max_held,
            machine=machine,
            chosen=chosen,
        )
    except (TypeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps([asdict(row) for row in found.rows]) if as_json else found)
    return 0


def main(
    load: LoadModel, arguments: Sequence[str] | None = None, read: ReadConfig = config_file
) -> int:
    """Run a command.

    Args:
        load: makes the models that `--model` names.
        arguments: arguments of the command line; `None` for those that Python was called with.
        read: reads the configs that `--model` of `simulate` names.

    Returns:
        The exit status: 0 if all is well, 1 if `doctor` finds something wrong, 2 if what was given
        cannot be used. A command that cannot be parsed raises `SystemExit` with status 2.
    """
    options = parse(arguments)
    commands: dict[str, Callable[..., int]] = {
        "doctor": doctor,
        "schedule": schedule,
        "compare": compare,
        "estimate": partial(estimate_or_longest, load, read),
        "simulate": partial(simulate, read),
        "calibrate": calibrate,
    }
    return commands[options.pop("command")](**options)
