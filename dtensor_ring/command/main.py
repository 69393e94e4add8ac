"""The commands of `python -m dtensor_ring`, and their options."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from dtensor_ring.balanced.hybrid import Hybrid, compare_hybrid_layouts
from dtensor_ring.command.calibrate import calibrate
from dtensor_ring.command.doctor import doctor, version_of
from dtensor_ring.command.estimate_options import add_estimate, add_strategy
from dtensor_ring.command.option_values import (
    chosen_of,
    dtype_of,
    heads_of,
    hybrid_of,
    machine_of,
    mask_of,
    mesh_of,
    number,
    numbers,
)
from dtensor_ring.command.pictures import drawing
from dtensor_ring.command.simulate import ReadConfig, config_file, simulate
from dtensor_ring.dtensor.choice import DEFAULT_MACHINE
from dtensor_ring.dtensor.meta_model import LoadModel
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.strategy import AUTO, Strategy
from dtensor_ring.simulate.choose import choose
from dtensor_ring.simulate.comparison import compare_strategies
from dtensor_ring.simulate.machine import Machine
from dtensor_ring.simulate.presets import as_machine
from dtensor_ring.simulate.schedule import Schedule, describe_schedule
from dtensor_ring.simulate.training.step_request import CHECKPOINTS


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
        from dtensor_ring.command.pictures import page

        path.write_text(page(drawing(found)))
    else:
        from dtensor_ring.command.pictures import save_picture

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
    options = vars(_parser(load, read).parse_args(arguments))
    run = options.pop("run")
    return run(**options)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line: what is wrong, and where to look."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Report unknown arguments here, so that the error names the help of the command."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help lists what there is\n")


def _parser(load: LoadModel, read: ReadConfig) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m dtensor_ring", description="Context parallelism for PyTorch by annotation."
    )
    # From the package's metadata: modules import downwards only, and `__version__` is above.
    version = f"dtensor-ring {version_of('dtensor-ring')}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_doctor(commands)
    _add_schedule(commands)
    _add_compare(commands)
    add_estimate(commands, load, read)
    _add_simulate(commands, read)
    _add_calibrate(commands)
    return parser


def _add_doctor(commands: argparse._SubParsersAction[Any]) -> None:
    text = "check whether it works here: versions, kernels and, under torchrun, a ring of all ranks"
    command = commands.add_parser("doctor", help=text, description=text)
    command.set_defaults(run=doctor)
    command.add_argument("--kernel", help="test the ring with this kernel")
    command.add_argument("--json", action="store_true", dest="as_json", help="print JSON")


def _add_schedule(commands: argparse._SubParsersAction[Any]) -> None:
    text = "show the part of the work that each rank does at each step"
    command = commands.add_parser("schedule", help=text, description=text)
    command.set_defaults(run=schedule)
    _add_attention(command)
    _add_heads(command)
    add_strategy(command)
    command.add_argument(
        "--hybrid",
        type=hybrid_of,
        help="also show what layouts cost a model with this many layers that carry a state, layers "
        "with attention, numbers of a token, and of a map of a layer: 36,12,2048,1048576",
    )
    command.add_argument("--html", type=Path, help="write a page with pictures of it to this file")
    command.add_argument("--png", type=Path, help="write a picture of it to this file")


def _add_compare(commands: argparse._SubParsersAction[Any]) -> None:
    text = "show what each strategy sends, holds and launches, and what it takes on a machine"
    command = commands.add_parser("compare", help=text, description=text)
    command.set_defaults(run=compare)
    _add_attention(command)
    _add_heads(command)
    command.add_argument("--max-held", type=number, help="bytes that a rank may hold of others")
    command.add_argument(
        "--chosen",
        type=chosen_of,
        help="of attention that chooses its keys: keys of a query, numbers of an index key, and of "
        "a token that is chosen, or a config.json that has them: 2048,128,576",
    )
    text = "also simulate seconds: the name of a data sheet, such as h100, or a file of calibrate"
    command.add_argument("--machine", type=machine_of, help=text)


def _add_heads(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--heads", type=heads_of, default="32,8", help="of queries, and of keys: 32,8"
    )
    command.add_argument("--head-dim", type=number, default=128, help="of queries, keys and values")


def _add_simulate(commands: argparse._SubParsersAction[Any], read: ReadConfig) -> None:
    text = "simulate a training step of a model on a machine: milliseconds by part, MFU and memory"
    command = commands.add_parser("simulate", help=text, description=text)
    command.set_defaults(run=partial(simulate, read))
    command.add_argument(
        "--model", required=True, help="a config.json, its folder, or a name in transformers: llama"
    )
    command.add_argument("--seq-len", type=number, required=True, help="tokens of a sequence")
    command.add_argument(
        "--mesh",
        type=mesh_of,
        required=True,
        help="dp=4,cp=8,tp=2; dp, or dp_shard, and dp_replicate, of FSDP2",
    )
    command.add_argument("--world-size", type=number, help="ranks that the mesh must have")
    command.add_argument("--machine", default="h100", help="the name of a preset, or a file")
    command.add_argument("--batch", type=number, default=1, help="sequences of a step and cp axis")
    command.add_argument("--layout", help="how tokens are sharded")
    command.add_argument(
        "--strategy", default=Strategy.default, help="ring, all_gather, ulysses:4, ..."
    )
    command.add_argument(
        "--dtype", default="bfloat16", help="of matrix products: bfloat16, float8_e4m3fn, ..."
    )
    command.add_argument(
        "--checkpoint",
        choices=CHECKPOINTS,
        default="none",
        help="what backward computes again: full layers, or with attention all of a layer but its "
        "attention, whose output is kept",
    )
    command.add_argument("--kernel", help="of attention, as the machine names it")
    command.add_argument(
        "--cu-seqlens", type=numbers, help="boundaries of packed documents: 0,1000,8192"
    )
    command.add_argument(
        "--sweep", nargs="+", metavar="NAME=VALUES", help="a table: cp=1,2,4,8 strategy=all"
    )
    command.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
    command.add_argument("--html", type=Path, help="write a page with pictures to this file")
    command.add_argument(
        "--png", type=Path, help="write a picture of a sweep: which strategy wins where"
    )
    command.add_argument("--trace", type=Path, help="write a trace for Perfetto to this file")


def _add_calibrate(commands: argparse._SubParsersAction[Any]) -> None:
    text = "measure kernels and links of this machine, alone or under torchrun, into a file"
    command = commands.add_parser("calibrate", help=text, description=text)
    command.set_defaults(run=calibrate)
    command.add_argument("path", type=Path, nargs="?", help="the file: machine.json")
    acts = command.add_mutually_exclusive_group()
    acts.add_argument("--show", action="store_true", help="print what the file has")
    acts.add_argument("--compare", nargs=2, metavar="FILE", help="print two files side by side")
    command.add_argument("--kernel", help="measure, or show, this kernel")
    command.add_argument("--heads", type=heads_of, help="of queries, and of keys: 32,8")
    command.add_argument("--head-dim", type=number, help="of queries, keys and values")
    command.add_argument("--dtype", type=dtype_of, help="of queries, keys and values: bfloat16")
    command.add_argument("--quick", action="store_true", help="measure a few sizes, in seconds")


def _add_attention(command: argparse.ArgumentParser) -> None:
    """Add the options that describe the attention."""
    command.add_argument("--seq-len", type=number, required=True, help="tokens of the sequence")
    command.add_argument("--world-size", type=number, required=True, help="ranks on the axis")
    command.add_argument("--layout", help="how tokens are sharded")
    command.add_argument(
        "--mask", type=mask_of, default="causal", help="causal, full, sliding:4096 or chunked:8192"
    )
    command.add_argument(
        "--cu-seqlens", type=numbers, help="boundaries of packed documents: 0,1000,8192"
    )
    command.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
