"""What can be given on the command line; nothing here imports torch, see `first.py`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from dtensor_ring.command.option_values import (
    chosen_of,
    dtype_of,
    format_of,
    gibibytes,
    heads_of,
    hybrid_of,
    machine_of,
    mask_of,
    mesh_of,
    number,
    numbers,
)
from dtensor_ring.lab.training.names import CHECKPOINTS
from dtensor_ring.planning.strategy import Strategy


def parse(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the options of a command, and its name as "command".

    Args:
        arguments: arguments of the command line; `None` for those that Python was called with.

    Raises:
        SystemExit: with status 2 if they cannot be parsed, and 0 after help.
    """
    return vars(_parser().parse_args(arguments))


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


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m dtensor_ring", description="Context parallelism for PyTorch by annotation."
    )
    parser.add_argument("--version", action="version", version=f"dtensor-ring {_version()}")
    commands = parser.add_subparsers(required=True, metavar="command")
    _add_doctor(commands)
    _add_schedule(commands)
    _add_compare(commands)
    _add_estimate(commands)
    _add_simulate(commands)
    _add_calibrate(commands)
    _add_serve(commands)
    return parser


def _version() -> str:
    # From the package's metadata: modules import downwards only, and `__version__` is above.
    try:
        return version("dtensor-ring")
    except PackageNotFoundError:
        return "that is not installed"


def _command(
    commands: argparse._SubParsersAction[Any], name: str, text: str
) -> argparse.ArgumentParser:
    """Add a command, whose name is found again in what is parsed."""
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.set_defaults(command=name)
    return command


def _add_doctor(commands: argparse._SubParsersAction[Any]) -> None:
    text = "check whether it works here: versions, kernels and, under torchrun, a ring of all ranks"
    command = _command(commands, "doctor", text)
    command.add_argument("--kernel", help="test the ring with this kernel")
    command.add_argument("--json", action="store_true", dest="as_json", help="print JSON")


def _add_schedule(commands: argparse._SubParsersAction[Any]) -> None:
    text = "show the part of the work that each rank does at each step"
    command = _command(commands, "schedule", text)
    _add_attention(command)
    _add_heads(command)
    _add_strategy(command)
    _add_hybrid(command)
    command.add_argument("--html", type=Path, help="write a page with pictures of it to this file")
    command.add_argument("--png", type=Path, help="write a picture of it to this file")


def _add_compare(commands: argparse._SubParsersAction[Any]) -> None:
    text = "show what each strategy sends, holds and launches, and what it takes on a machine"
    command = _command(commands, "compare", text)
    _add_attention(command)
    _add_heads(command)
    _add_hybrid(command)
    command.add_argument("--max-held", type=number, help="bytes that a rank may hold of others")
    command.add_argument(
        "--chosen",
        type=chosen_of,
        help="of attention that chooses its keys: keys of a query, numbers of an index key, and of "
        "a token that is chosen, or a config.json that has them: 2048,128,576",
    )
    text = "also simulate seconds: the name of a data sheet, such as h100, or a file of calibrate"
    command.add_argument("--machine", type=machine_of, help=text)


def _add_hybrid(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--hybrid",
        type=hybrid_of,
        help="also show what layouts cost a model with layers that carry a state: a config.json, "
        "or the numbers of these layers, of layers with attention, of numbers of a token, and of a "
        "map of a layer: 36,12,2048,1048576",
    )


def _add_heads(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--heads", type=heads_of, default="32,8", help="of queries, and of keys: 32,8"
    )
    command.add_argument("--head-dim", type=number, default=128, help="of queries, keys and values")


def _add_estimate(commands: argparse._SubParsersAction[Any]) -> None:
    text = "estimate what a training step of a model takes on one rank: memory, messages and hops"
    command = _command(commands, "estimate", text)
    command.add_argument(
        "--model", required=True, help="a config.json, its folder, or module:function of torchtitan"
    )
    command.add_argument("--seq-len", type=number, help="tokens of a sequence")
    command.add_argument(
        "--mesh", type=mesh_of, required=True, help="cp=8, or with more replicas: dp=4,cp=8"
    )
    command.add_argument("--batch", type=number, default=1, help="sequences of a step and cp axis")
    command.add_argument("--layout", help="how tokens are sharded")
    _add_strategy(command)
    command.add_argument(
        "--dtype", type=dtype_of, default="bfloat16", help="of the layers: bfloat16, float32"
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
        "--kv-dtype", type=format_of, help="the dtype in which keys and values travel: int8, fp8"
    )
    command.add_argument(
        "--cache-dtype",
        type=lambda text: text if text == "own" else format_of(text),
        help="also what a cache of the sequence takes for generate, in its own dtype (own), or in "
        "int8 or fp8",
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


def _add_strategy(command: argparse.ArgumentParser) -> None:
    """Add the options that choose a strategy."""
    text = "ring, all_gather, ulysses:4, ...; auto for the fastest"
    command.add_argument("--strategy", default=Strategy.default, help=text)
    command.add_argument("--machine", help="what auto simulates: a file, or h100, a100, ...")


def _add_simulate(commands: argparse._SubParsersAction[Any]) -> None:
    text = "simulate a training step of a model on a machine: milliseconds by part, MFU and memory"
    command = _command(commands, "simulate", text)
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
    command.add_argument(
        "--compiled",
        action="store_true",
        help="kernels that only read and write memory are fused, as torch.compile does it",
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
    command = _command(commands, "calibrate", text)
    command.add_argument("path", type=Path, nargs="?", help="the file: machine.json")
    acts = command.add_mutually_exclusive_group()
    acts.add_argument("--show", action="store_true", help="print what the file has")
    acts.add_argument("--compare", nargs=2, metavar="FILE", help="print two files side by side")
    command.add_argument("--kernel", help="measure, or show, this kernel")
    command.add_argument("--heads", type=heads_of, help="of queries, and of keys: 32,8")
    command.add_argument("--head-dim", type=number, help="this one; else, on a GPU, 64 to 256")
    command.add_argument("--dtype", type=dtype_of, help="of queries, keys and values: bfloat16")
    command.add_argument("--quick", action="store_true", help="measure a few sizes, in seconds")


def _add_serve(commands: argparse._SubParsersAction[Any]) -> None:
    text = "serve a model of transformers over HTTP, as OpenAI's clients expect it"
    command = _command(commands, "serve", text)
    command.add_argument("--model", required=True, help="its folder, with its tokenizer")
    command.add_argument("--mesh", type=mesh_of, required=True, help="ranks of a sequence: cp=4")
    text = "the address to listen on, 127.0.0.1 if not given; there is no password"
    command.add_argument("--host", default="127.0.0.1", help=text)
    command.add_argument("--port", type=int, default=8000, help="8000; 0 for any that is free")
    command.add_argument("--name", help="of the model for clients; else what --model says")
    command.add_argument("--dtype", type=dtype_of, help="of the parameters; else the checkpoint's")
    command.add_argument("--layout", help="how tokens of prompts are sharded")
    command.add_argument("--cache-dtype", type=format_of, help="of full blocks: int8 or fp8")
    text = "tokens whose keys and values all ranks hold together: 65536"
    command.add_argument("--cache-tokens", type=number, default=65536, help=text)
    text = "tokens of a block: 64 on CPUs, 256 on GPUs"
    command.add_argument("--page-size", type=number, help=text)
    text = "the largest number of tokens of a step: 2048"
    command.add_argument("--max-batch-tokens", type=number, default=2048, help=text)
    text = "answers that are generated at a time, at most: 64"
    command.add_argument("--max-requests", type=number, default=64, help=text)
    text = "answers that are open, with those that wait: 256 at most, others are told to come later"
    command.add_argument("--max-open", type=number, default=256, help=text)
    text = "seconds that open answers may take after SIGTERM: 30"
    command.add_argument("--drain-seconds", type=float, default=30.0, help=text)
    text = "seconds that a rank waits for another one, longer than any step: 120"
    command.add_argument("--rank-timeout", type=float, default=120.0, help=text)
    text = "of the first answer that samples without one of its own"
    command.add_argument("--seed", type=number, help=text)


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
