"""The options of the command `estimate`, and the longest sequence, which they may ask for."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from dtensor_ring.command.option_values import dtype_of, gibibytes, mesh_of, number
from dtensor_ring.dtensor.choice import DEFAULT_MACHINE
from dtensor_ring.dtensor.meta_model import LoadModel
from dtensor_ring.lab.presets import as_machine
from dtensor_ring.lab.training.estimate import estimate
from dtensor_ring.lab.training.longest import longest_sequences, usable
from dtensor_ring.lab.training.simulate import ReadConfig
from dtensor_ring.lab.training.step_request import CHECKPOINTS
from dtensor_ring.planning.strategy import Strategy
from dtensor_ring.quantised.block_scales import FORMATS

# Options that say what a step does to take less memory, or what else is estimated of it.
SETTINGS = "checkpoint", "offload", "unsharded", "cache_dtype"


NO_TENSOR_PARALLELISM = (
    "tensor parallelism is not estimated, as the plan of a model decides what it divides: leave tp "
    "out, a rank has less with it than is then estimated; or use simulate"
)


def add_estimate(
    commands: argparse._SubParsersAction[Any], load: LoadModel, read: ReadConfig
) -> None:
    """Add the command `estimate`.

    Args:
        commands: where it is added.
        load: makes the models that `--model` names.
        read: reads their configs.
    """
    text = "estimate what a training step of a model takes on one rank: memory, messages and hops"
    command = commands.add_parser("estimate", help=text, description=text)
    command.set_defaults(run=partial(_estimate, load, read))
    command.add_argument(
        "--model", required=True, help="a config.json, its folder, or module:function of torchtitan"
    )
    command.add_argument("--seq-len", type=number, help="tokens of a sequence")
    command.add_argument(
        "--mesh", type=mesh_of, required=True, help="cp=8, or with more replicas: dp=4,cp=8"
    )
    command.add_argument("--batch", type=number, default=1, help="sequences of a step and cp axis")
    command.add_argument("--layout", help="how tokens are sharded")
    add_strategy(command)
    command.add_argument(
        "--dtype", type=dtype_of, default="bfloat16", help="of the parameters: bfloat16, float32"
    )
    command.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
    _add_settings(command)
    _add_longest(command)


def _add_settings(command: argparse.ArgumentParser) -> None:
    """Add what one step does, which `--longest` tries out instead."""
    command.add_argument(
        "--checkpoint",
        choices=CHECKPOINTS,
        help="full: each layer keeps its input only, and its backward computes the forward again; "
        "attention: what its attention returns is kept, too",
    )
    command.add_argument(
        "--offload",
        type=lambda text: text.split(","),
        help="what is on the host: checkpoints, optimizer, or both with a comma between them; "
        "optimizer is parameters, gradients and states, as CPUOffloadPolicy of FSDP2 has it",
    )
    command.add_argument(
        "--unsharded",
        action="store_true",
        help="parameters are whole on each rank; else FSDP2 shards them over dp_shard and cp",
    )
    command.add_argument(
        "--kv-dtype", choices=tuple(FORMATS), help="the dtype in which keys and values travel"
    )
    command.add_argument(
        "--cache-dtype",
        choices=("own", *FORMATS),
        help="also what a cache of the sequence takes for generate, in its own dtype or eight bits",
    )


def _add_longest(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--longest",
        action="store_true",
        help="instead, a table of the longest sequence by setting: what backward computes again, "
        "tiles of MLPs, what is on the host; parameters are float32, and "
        "--dtype is that of matrix products; with --seq-len also the first setting that reaches it",
    )
    command.add_argument(
        "--memory",
        type=gibibytes,
        help="GiB of a device, of which 95 %% are taken: 80, 141, 192; by default those of "
        "--machine, and without one of h100",
    )


def _estimate(load: LoadModel, read: ReadConfig, **options: Any) -> int:
    """Run `estimate`, or `estimate --longest`, which tries the settings of the other one out."""
    settings = {name: options.pop(name) for name in SETTINGS}
    is_longest, memory = options.pop("longest"), options.pop("memory")
    given = [f"--{name.replace('_', '-')}" for name, value in settings.items() if value]
    if is_longest and given:
        why = f"--longest tries settings out by itself, so leave {', '.join(given)} out"
    elif options["mesh"].get("tp", 1) > 1:
        why = NO_TENSOR_PARALLELISM
    elif options["seq_len"] is None and not is_longest:
        why = "estimate needs --seq-len, the tokens of a sequence, or --longest, which finds it"
    elif is_longest:
        dtype = str(options.pop("dtype"))
        return longest(read, memory=memory, dtype=dtype, **options)
    else:
        is_sharded = not settings.pop("unsharded")
        settings["checkpoint"] = settings["checkpoint"] or "none"
        settings["offload"] = settings["offload"] or ()
        return estimate(load, memory=memory, is_sharded=is_sharded, **options, **settings)
    print(why, file=sys.stderr)
    return 2


def add_strategy(command: argparse.ArgumentParser) -> None:
    """Add the options that choose a strategy."""
    text = "ring, all_gather, ulysses:4, ...; auto for the fastest"
    command.add_argument("--strategy", default=Strategy.default, help=text)
    command.add_argument("--machine", help="what auto simulates: a file, or h100, a100, ...")


def longest(
    read: ReadConfig,
    model: str,
    mesh: Mapping[str, int],
    machine: str | None,
    memory: float | None,
    layout: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Print the longest sequence by setting, and return the exit status.

    Args:
        read: reads the config.
        model: names it.
        mesh: ranks by axis.
        machine: the name of a preset, or a file.
        memory: GiB of a device; `None` for what the machine has.
        layout: how tokens are sharded.
        as_json: whether to print JSON.
        options: other arguments of `longest_sequences`.
    """
    try:
        device = as_machine(machine or DEFAULT_MACHINE)
        allowed = None if memory is None else usable(int(memory * 2**30))
        how = options | {"layout": layout or "zigzag", "memory": allowed}
        found = longest_sequences(read(model), mesh, device, **how)
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    print(json.dumps(found.as_json()) if as_json else found)
    return 0
