"""The commands and their options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from dtensor_ring.command.compare import compare
from dtensor_ring.command.doctor import doctor
from dtensor_ring.command.estimate import estimate
from dtensor_ring.command.schedule import schedule
from dtensor_ring.command.spelling import (
    dtype_of,
    heads_of,
    hybrid_of,
    mask_of,
    mesh_of,
    number,
    numbers,
)
from dtensor_ring.command.versions import version_of
from dtensor_ring.dtensor.meta_model import LoadModel
from dtensor_ring.planning.strategy import Strategy


def main(load: LoadModel, arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        load: makes the models that `--model` names.
        arguments: of the command line; `None` for those that Python was called with.

    Returns:
        The exit status: 0 if all is well, 1 if something is wrong; 2 is of a command that cannot be
        read, by `SystemExit`.
    """
    options = vars(_parser(load).parse_args(arguments))
    run = options.pop("run")
    return run(**options)


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, and where to look."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """None are unknown: the parser of a command says so itself, and names its own help."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help lists what there is\n")


def _parser(load: LoadModel) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m dtensor_ring", description="Context parallelism for PyTorch by annotation."
    )
    # From the package's data: the module above has all that is public, and imports downwards only.
    version = f"dtensor-ring {version_of('dtensor-ring')}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_doctor(commands)
    _add_schedule(commands)
    _add_compare(commands)
    _add_estimate(commands, load)
    return parser


def _add_doctor(commands: argparse._SubParsersAction[Any]) -> None:
    text = "tell whether it works here: versions, kernels and, under torchrun, a ring of all ranks"
    command = commands.add_parser("doctor", help=text, description=text)
    command.set_defaults(run=doctor)
    command.add_argument("--kernel", help="test the ring with this kernel")
    command.add_argument("--json", action="store_true", dest="as_json", help="print JSON")


def _add_schedule(commands: argparse._SubParsersAction[Any]) -> None:
    text = "show the part of the work that each rank does at each step"
    command = commands.add_parser("schedule", help=text, description=text)
    command.set_defaults(run=schedule)
    _add_attention(command)
    command.add_argument(
        "--strategy", default=Strategy.default, help="ring, all_gather, ulysses:4, ..."
    )
    command.add_argument(
        "--hybrid",
        type=hybrid_of,
        help="also show what layouts cost a model with so many layers that carry a state, layers "
        "with attention, and numbers of a token: 36,12,2048",
    )
    command.add_argument("--html", type=Path, help="write a page with pictures of it to this file")
    command.add_argument("--png", type=Path, help="write a picture of it to this file")


def _add_compare(commands: argparse._SubParsersAction[Any]) -> None:
    text = "show what each strategy sends, holds and launches"
    command = commands.add_parser("compare", help=text, description=text)
    command.set_defaults(run=compare)
    _add_attention(command)
    command.add_argument(
        "--heads", type=heads_of, default="32,8", help="of queries, and of keys: 32,8"
    )
    command.add_argument("--head-dim", type=number, default=128, help="of queries, keys and values")
    command.add_argument("--max-held", type=number, help="bytes that a rank may hold of others")


def _add_estimate(commands: argparse._SubParsersAction[Any], load: LoadModel) -> None:
    text = "tell what a training step of a model takes on one rank: memory, messages and hops"
    command = commands.add_parser("estimate", help=text, description=text)
    command.set_defaults(run=partial(estimate, load))
    command.add_argument(
        "--model", required=True, help="a config.json, its folder, or module:function of torchtitan"
    )
    command.add_argument("--seq-len", type=number, required=True, help="tokens of a sequence")
    command.add_argument(
        "--mesh", type=mesh_of, required=True, help="cp=8, or with FSDP2: cp=8,dp_shard=4"
    )
    command.add_argument("--batch", type=number, default=1, help="sequences of a step and cp axis")
    command.add_argument("--layout", help="how tokens are dealt")
    command.add_argument(
        "--strategy", default=Strategy.default, help="ring, all_gather, ulysses:4, ..."
    )
    command.add_argument(
        "--checkpoint",
        choices=("none", "full"),
        default="none",
        help="full: each layer keeps its input only, and its backward computes the forward again",
    )
    command.add_argument("--dtype", type=dtype_of, help="of the parameters: bfloat16")
    command.add_argument("--json", action="store_true", dest="as_json", help="print JSON")


def _add_attention(command: argparse.ArgumentParser) -> None:
    """The options that say what attention it is about."""
    command.add_argument("--seq-len", type=number, required=True, help="tokens of the sequence")
    command.add_argument("--world-size", type=number, required=True, help="ranks on the axis")
    command.add_argument("--layout", help="how tokens are dealt")
    command.add_argument(
        "--mask", type=mask_of, default="causal", help="causal, full, sliding:4096 or chunked:8192"
    )
    command.add_argument(
        "--cu-seqlens", type=numbers, help="boundaries of packed documents: 0,1000,8192"
    )
    command.add_argument("--json", action="store_true", dest="as_json", help="print JSON")
