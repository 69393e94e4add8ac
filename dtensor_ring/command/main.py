"""The commands and their options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from dtensor_ring.command.compare import compare
from dtensor_ring.command.doctor import doctor
from dtensor_ring.command.schedule import schedule
from dtensor_ring.command.spelling import heads_of, mask_of, number, numbers


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: of the command line; `None` for those that Python was called with.

    Returns:
        The exit status: 0 if all is well, 1 if something is wrong; 2 is of a command that cannot be
        read, by `SystemExit`.
    """
    options = vars(_parser().parse_args(arguments))
    run = options.pop("run")
    return run(**options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dtensor_ring", description="Context parallelism for PyTorch by annotation."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_doctor(commands)
    _add_schedule(commands)
    _add_compare(commands)
    return parser


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "tell whether it works here: versions, kernels and, under torchrun, a ring of all ranks"
    command = commands.add_parser("doctor", help=text, description=text)
    command.set_defaults(run=doctor)
    command.add_argument("--kernel", help="test the ring with this kernel")
    command.add_argument("--json", action="store_true", dest="as_json", help="print JSON")


def _add_schedule(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "show the part of the work that each rank does at each step"
    command = commands.add_parser("schedule", help=text, description=text)
    command.set_defaults(run=schedule)
    _add_attention(command)


def _add_compare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "show what each strategy sends, holds and launches"
    command = commands.add_parser("compare", help=text, description=text)
    command.set_defaults(run=compare)
    _add_attention(command)
    command.add_argument(
        "--heads", type=heads_of, default="32,8", help="of queries, and of keys: 32,8"
    )
    command.add_argument("--head-dim", type=number, default=128, help="of queries, keys and values")
    command.add_argument("--max-held", type=number, help="bytes that a rank may hold of others")


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
