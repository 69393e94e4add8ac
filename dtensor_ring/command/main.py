"""The commands of `python -m dtensor_ring`; `parser.py` has their options."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

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
from dtensor_ring.lab.training.layer_states import hybrid_of
from dtensor_ring.lab.training.model_shape import ModelShape
from dtensor_ring.lab.training.simulate import ReadConfig, config_file, simulate
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.strategy import AUTO
from dtensor_ring.states.hybrid import Hybrid, HybridComparison, compare_hybrid_layouts


def main(
    load: LoadModel,
    arguments: Sequence[str] | None = None,
    read: ReadConfig = config_file,
    serve: Callable[..., int] | None = None,
) -> int:
    """Run a command.

    Args:
        load: makes the models that `--model` names.
        arguments: arguments of the command line; `None` for those that Python was called with.
        read: reads the configs that `--model` of `simulate`, and `--hybrid`, name.
        serve: serves a model. It is above the package, as are the models.

    Returns:
        The exit status: 0 if all is well, 1 if `doctor` finds something wrong, 2 if what was given
        cannot be used. A command that cannot be parsed raises `SystemExit` with status 2.
    """
    options = parse(arguments)
    commands: dict[str, Callable[..., int]] = {
        "doctor": doctor,
        "schedule": partial(schedule, read),
        "compare": partial(compare, read),
        "estimate": partial(estimate_or_longest, load, read),
        "simulate": partial(simulate, read),
        "calibrate": calibrate,
    }
    if serve is not None:
        commands["serve"] = serve
    return commands[options.pop("command")](**options)


def schedule(
    read: ReadConfig,
    seq_len: int,
    world_size: int,
    layout: str | None,
    mask: Mask,
    cu_seqlens: Sequence[int] | None,
    strategy: str,
    hybrid: tuple[int, ...] | str | None,
    as_json: bool,
    html: Path | None = None,
    png: Path | None = None,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    machine: str | None = None,
) -> int:
    """Print the work of each rank at each step, draw it, and return the exit status."""
    try:
        if strategy == AUTO:
            device = as_machine(machine or DEFAULT_MACHINE)
            strategy = choose(
                mask=mask,
                seq_len=seq_len,
                world_size=world_size,
                heads=heads,
                head_dim=head_dim,
                cu_seqlens=cu_seqlens,
                layout=layout or "zigzag",
                dtype=device.dtype_like("bfloat16"),
                machine=device,
            ).spec
        found = describe_schedule(
            layout=layout or "zigzag",
            mask=mask,
            seq_len=seq_len,
            world_size=world_size,
            cu_seqlens=cu_seqlens,
            strategy=strategy,
        )
        layouts = _layouts(read, hybrid, mask, seq_len, world_size, heads, head_dim)
        _save(found, html, png)
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    names = "areas", "received", "imbalance", "makespan"
    _print(found, {name: getattr(found, name) for name in names}, layouts, as_json)
    return 0


def _layouts(
    read: ReadConfig,
    hybrid: tuple[int, ...] | str | None,
    mask: Mask,
    seq_len: int,
    world_size: int,
    heads: tuple[int, int],
    head_dim: int,
) -> HybridComparison | None:
    """Compare the layouts of a model with layers with a state, if one is given.

    Args:
        read: reads a config.
        hybrid: its numbers, see `option_values`, or the name of its config, which says its heads.
        mask: of the attention.
        seq_len: tokens of a sequence.
        world_size: ranks of the axis.
        heads: of queries, and of keys.
        head_dim: numbers of a head.
    """
    if hybrid is None:
        return None
    if isinstance(hybrid, str):
        of_model = hybrid_of(ModelShape.of(read(hybrid)), BFLOAT16)
    else:
        stateful, attention, hidden_size, *of_map = hybrid
        maps = (FLOAT32 * stateful * of_map[0], 0) if of_map else None
        of_model = Hybrid(
            stateful, attention, hidden_size, heads=heads, head_dim=head_dim, maps=maps
        )
    return compare_hybrid_layouts(of_model, mask, seq_len, world_size)


# Bytes of a number between layers, and of one in a map.
BFLOAT16, FLOAT32 = 2, 4


def _print(found: object, entries: Any, layouts: HybridComparison | None, as_json: bool) -> None:
    """Print a table or its entries as JSON, with a comparison of layouts if there is one."""
    if not as_json:
        print(found, *([layouts] if layouts else []), sep="\n")
        return
    if layouts is not None:
        entries |= {"layouts": [asdict(row) for row in layouts.rows]}
    print(json.dumps(entries))


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
    read: ReadConfig,
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
    hybrid: tuple[int, ...] | str | None,
    as_json: bool,
) -> int:
    """Print what each strategy costs, see `compare_strategies`, and return the exit status."""
    try:
        layouts = _layouts(read, hybrid, mask, seq_len, world_size, heads, head_dim)
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
    rows = [asdict(row) for row in found.rows]
    _print(found, rows if layouts is None else {"strategies": rows}, layouts, as_json)
    return 0
