"""The commands of `python -m dtensor_ring`; `parser.py` has their options."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dtensor_ring.command.doctor import doctor
from dtensor_ring.command.parser import parse
from dtensor_ring.dtensor.choice import DEFAULT_MACHINE
from dtensor_ring.dtensor.meta_model import LoadModel
from dtensor_ring.lab.calibrate.calibrate import calibrate
from dtensor_ring.lab.choose import choose
from dtensor_ring.lab.comparison import compare_strategies
from dtensor_ring.lab.pictures import page
from dtensor_ring.lab.presets import as_machine
from dtensor_ring.lab.report import refused
from dtensor_ring.lab.schedule import describe_schedule
from dtensor_ring.lab.training.estimate import estimate
from dtensor_ring.lab.training.layer_states import hybrid_of
from dtensor_ring.lab.training.longest import longest_sequences, usable
from dtensor_ring.lab.training.model_shape import ModelShape
from dtensor_ring.lab.training.simulate import ReadConfig, config_file, drawn_by, simulate
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
        "schedule": partial(_printed, schedule, read),
        "compare": partial(_printed, compare, read),
        "estimate": partial(estimate_or_longest, load, read),
        "simulate": partial(simulate, read),
        "calibrate": calibrate,
    }
    if serve is not None:
        commands["serve"] = serve
    command = options.pop("command")
    if command in ("doctor", "serve"):  # which say by themselves what is wrong
        return commands[command](**options)
    try:
        return commands[command](**options)
    except (ImportError, OSError, TypeError, ValueError) as error:
        return refused(error)


# A table, and what JSON has of it.
Told = tuple[object, Any]


def _printed(
    tell: Callable[..., Told],
    read: ReadConfig,
    hybrid: tuple[int, ...] | str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Print a table, and a comparison of layouts if one is asked for; return the exit status.

    Args:
        tell: takes the options.
        read: reads a config.
        hybrid: numbers of a model with layers with a state, see `option_values`, or the name of its
            config, which says its heads.
        as_json: whether to print JSON.
        options: others of the command.
    """
    layouts = None if hybrid is None else _layouts(read, hybrid, **options)
    table, entries = tell(**options)
    if not as_json:
        print(table)
        if layouts is not None:
            print(layouts)
        return 0
    if layouts is not None:
        entries = entries if isinstance(entries, dict) else {"strategies": entries}
        entries |= {"layouts": [asdict(row) for row in layouts.rows]}
    print(json.dumps(entries))
    return 0


# Bytes of a number between layers, and of one in a map.
BFLOAT16, FLOAT32 = 2, 4


def _layouts(
    read: ReadConfig,
    hybrid: tuple[int, ...] | str,
    mask: Any,
    seq_len: int,
    world_size: int,
    heads: tuple[int, int],
    head_dim: int,
    **others: Any,
) -> HybridComparison:
    """Compare the layouts of a model with layers with a state."""
    if isinstance(hybrid, str):
        of_model = hybrid_of(ModelShape.of(read(hybrid)), BFLOAT16)
    else:
        stateful, attention, hidden_size, *of_map = hybrid
        maps = (FLOAT32 * stateful * of_map[0], 0) if of_map else None
        of_model = Hybrid(
            stateful, attention, hidden_size, heads=heads, head_dim=head_dim, maps=maps
        )
    return compare_hybrid_layouts(of_model, mask, seq_len, world_size)


def schedule(
    strategy: str,
    machine: str | None,
    heads: tuple[int, int],
    head_dim: int,
    html: Path | None,
    **attention: Any,
) -> Told:
    """Return the work of each rank at each step, and draw it."""
    if strategy == AUTO:
        device = as_machine(machine or DEFAULT_MACHINE)
        how = {"dtype": device.dtype_like("bfloat16"), "machine": device}
        strategy = choose(heads=heads, head_dim=head_dim, **attention, **how).spec
    found = describe_schedule(strategy=strategy, **attention)
    if html is not None:
        html.write_text(drawn_by("html", lambda: page(found)))
    names = "areas", "received", "imbalance", "makespan"
    return found, {name: getattr(found, name) for name in names}


def compare(**options: Any) -> Told:
    """Return what each strategy costs, see `compare_strategies`."""
    found = compare_strategies(**options)
    return found, [asdict(row) for row in found.rows]


# Options that say what a step does to take less memory, or what else is estimated of it.
SETTINGS = "checkpoint", "offload", "unsharded", "cache_dtype"


NO_TENSOR_PARALLELISM = (
    "tensor parallelism is not estimated, as the plan of a model decides what it divides: leave tp "
    "out, a rank has less with it than is then estimated; or use simulate"
)


def estimate_or_longest(
    load: LoadModel, read: ReadConfig, longest: bool, memory: float | None, **options: Any
) -> int:
    """Run `estimate`, or `estimate --longest`, which tries the settings of the other one out.

    Args:
        load: makes the model that `estimate` runs.
        read: reads the config whose longest sequence is looked for.
        longest: whether it is.
        memory: GiB of a device; `None` for what the machine has.
        options: others of the command.

    Returns:
        The exit status.

    Raises:
        ValueError: if options contradict each other, or `longest_sequences` raises it.
    """
    settings = {name: options.pop(name) for name in SETTINGS}
    given = [f"--{name.replace('_', '-')}" for name, value in settings.items() if value]
    if longest and given:
        raise ValueError(f"--longest tries settings out by itself, so leave {', '.join(given)} out")
    if options["mesh"].get("tp", 1) > 1:
        raise ValueError(NO_TENSOR_PARALLELISM)
    if longest:
        return _longest(read, memory=memory, **options)
    if options["seq_len"] is None:
        raise ValueError(
            "estimate needs --seq-len, the tokens of a sequence, or --longest, which finds it"
        )
    is_sharded = not settings.pop("unsharded")
    settings["checkpoint"] = settings["checkpoint"] or "none"
    settings["offload"] = settings["offload"] or ()
    return estimate(load, memory=memory, is_sharded=is_sharded, **options, **settings)


def _longest(
    read: ReadConfig,
    model: str,
    mesh: Mapping[str, int],
    machine: str | None,
    memory: float | None,
    layout: str | None,
    dtype: torch.dtype,
    as_json: bool,
    **options: Any,
) -> int:
    """Print the longest sequence by setting; `options` are others of `longest_sequences`."""
    device = as_machine(machine or DEFAULT_MACHINE)
    options |= {"layout": layout or "zigzag", "dtype": str(dtype)}
    options["memory"] = None if memory is None else usable(int(memory * 2**30))
    found = longest_sequences(read(model), mesh, device, **options)
    print(json.dumps(found.as_json()) if as_json else found)
    return 0
