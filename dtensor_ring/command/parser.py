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
    parser = _Parser(
        prog="python -m dtensor_ring", description="Context parallelism for PyTorch by annotation."
    )
    parser.add_argument("--version", action="version", version=f"dtensor-ring {_version()}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, (text, options) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(command=name)
        for option, how in options.items():
            flag = option if option == "path" else f"--{option.replace('_', '-')}"
            command.add_argument(flag, **how)
    return vars(parser.parse_args(arguments))


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


def _version() -> str:
    # From the package's metadata: modules import downwards only, and `__version__` is above.
    try:
        return version("dtensor-ring")
    except PackageNotFoundError:
        return "that is not installed"


# An option: what `add_argument` takes of it.
How = dict[str, Any]


def _option(text: str, type: Any = None, **how: Any) -> How:
    """Return an option that takes a value, by default a text."""
    return {"help": text, "type": type, **how}


def _flag(text: str, **how: Any) -> How:
    """Return an option that is there or not."""
    return {"help": text, "action": "store_true", **how}


def _listed(text: str) -> list[str]:
    return text.split(",")


LAYOUT: str = "zigzag"
JSON = {"json": _flag("print JSON", dest="as_json")}
STRATEGY = {
    "strategy": _option(
        "ring, all_gather, ulysses:4, ...; auto for the fastest", default=Strategy.default
    ),
    "machine": _option("what auto simulates: a file, or h100, a100, ..."),
}
ATTENTION = {
    "seq_len": _option("tokens of the sequence", number, required=True),
    "world_size": _option("ranks on the axis", number, required=True),
    "layout": _option("how tokens are sharded", default=LAYOUT),
    "mask": _option("causal, full, sliding:4096 or chunked:8192", mask_of, default="causal"),
    "cu_seqlens": _option("boundaries of packed documents: 0,1000,8192", numbers),
    **JSON,
    "heads": _option("of queries, and of keys: 32,8", heads_of, default="32,8"),
    "head_dim": _option("of queries, keys and values", number, default=128),
    "hybrid": _option(
        "also show what layouts cost a model with layers that carry a state: a config.json, or the "
        "numbers of these layers, of layers with attention, of numbers of a token, and of a map of "
        "a layer: 36,12,2048,1048576",
        hybrid_of,
    ),
}
SCHEDULE = {
    **ATTENTION,
    **STRATEGY,
    "html": _option("write a page with pictures of it to this file", Path),
}
COMPARE = {
    **ATTENTION,
    "max_held": _option("bytes that a rank may hold of others", number),
    "chosen": _option(
        "of attention that chooses its keys: keys of a query, numbers of an index key, and of a "
        "token that is chosen, or a config.json that has them: 2048,128,576",
        chosen_of,
    ),
    "machine": _option(
        "also simulate seconds: the name of a data sheet, such as h100, or a file of calibrate",
        machine_of,
    ),
}
# Of a step of a model.
STEP = {
    "model": _option("a config.json, its folder, or module:function of torchtitan", required=True),
    "seq_len": _option("tokens of a sequence", number),
    "mesh": _option("cp=8, or with more replicas: dp=4,cp=8", mesh_of, required=True),
    "batch": _option("sequences of a step and cp axis", number, default=1),
    "layout": _option("how tokens are sharded"),
    **STRATEGY,
    "dtype": _option("of the layers: bfloat16, float32", dtype_of, default="bfloat16"),
    "checkpoint": _option(
        "full: each layer keeps its input only, and its backward computes the forward again; "
        "attention: what its attention returns is kept, too",
        choices=CHECKPOINTS,
    ),
    **JSON,
}
ESTIMATE = {
    **STEP,
    "offload": _option(
        "what is on the host: checkpoints, optimizer, or both with a comma between them; optimizer "
        "is parameters, gradients and states, as CPUOffloadPolicy of FSDP2 has it",
        _listed,
    ),
    "unsharded": _flag(
        "parameters are whole on each rank; else FSDP2 shards them over dp_shard and cp"
    ),
    "kv_dtype": _option("the dtype in which keys and values travel: int8, fp8", format_of),
    "cache_dtype": _option(
        "also what a cache of the sequence takes for generate, in its own dtype (own), or in int8 "
        "or fp8",
        lambda text: text if text == "own" else format_of(text),
    ),
    "longest": _flag(
        "instead, a table of the longest sequence by setting: what backward computes again, tiles "
        "of MLPs, what is on the host; parameters are float32, and --dtype is that of matrix "
        "products; with --seq-len also the first setting that reaches it"
    ),
    "memory": _option(
        "GiB of a device, of which 95 %% are taken: 80, 141, 192; by default those of --machine, "
        "and without one of h100",
        gibibytes,
    ),
}
SIMULATE = {
    **STEP,
    "model": _option("a config.json, its folder, or a name in transformers: llama", required=True),
    "seq_len": _option("tokens of a sequence", number, required=True),
    "mesh": _option(
        "dp=4,cp=8,tp=2; dp, or dp_shard, and dp_replicate, of FSDP2", mesh_of, required=True
    ),
    "world_size": _option("ranks that the mesh must have", number),
    "machine": _option("the name of a preset, or a file", default="h100"),
    "strategy": _option("ring, all_gather, ulysses:4, ...", default=Strategy.default),
    "dtype": _option("of matrix products: bfloat16, float8_e4m3fn, ...", default="bfloat16"),
    "checkpoint": _option(
        "what backward computes again: full layers, or with attention all of a layer but its "
        "attention, whose output is kept",
        choices=CHECKPOINTS,
        default="none",
    ),
    "compiled": _flag(
        "kernels that only read and write memory are fused, as torch.compile does it"
    ),
    "kernel": _option("of attention, as the machine names it"),
    "cu_seqlens": ATTENTION["cu_seqlens"],
    "sweep": _option("a table: cp=1,2,4,8 strategy=all", nargs="+", metavar="NAME=VALUES"),
    "html": _option("write a page with pictures to this file", Path),
    "png": _option("write a picture of a sweep: which strategy wins where", Path),
    "trace": _option("write a trace for Perfetto to this file", Path),
}
CALIBRATE = {
    "path": _option("the file: machine.json", Path, nargs="?"),
    "show": _flag("print what the file has"),
    "compare": _option("print two files side by side", nargs=2, metavar="FILE"),
    "kernel": _option("measure, or show, this kernel"),
    "heads": _option("of queries, and of keys: 32,8", heads_of),
    "head_dim": _option("this one; else, on a GPU, 64 to 256", number),
    "dtype": _option("of queries, keys and values: bfloat16", dtype_of),
    "quick": _flag("measure a few sizes, in seconds"),
}
SERVE = {
    "model": _option("its folder, with its tokenizer", required=True),
    "mesh": _option("ranks of a sequence: cp=4", mesh_of, required=True),
    "host": _option(
        "the address to listen on, 127.0.0.1 if not given; there is no password",
        default="127.0.0.1",
    ),
    "port": _option("8000; 0 for any that is free", int, default=8000),
    "name": _option("of the model for clients; else what --model says"),
    "dtype": _option("of the parameters; else the checkpoint's", dtype_of),
    "layout": _option("how tokens of prompts are sharded"),
    "cache_dtype": _option("of full blocks: int8 or fp8", format_of),
    "cache_tokens": _option(
        "tokens whose keys and values all ranks hold together: 65536", number, default=65536
    ),
    "page_size": _option("tokens of a block: 64 on CPUs, 256 on GPUs", number),
    "max_batch_tokens": _option(
        "the largest number of tokens of a step: 2048", number, default=2048
    ),
    "max_requests": _option(
        "answers that are generated at a time, at most: 64", number, default=64
    ),
    "max_open": _option(
        "answers that are open, with those that wait: 256 at most, others are told to come later",
        number,
        default=256,
    ),
    "drain_seconds": _option(
        "seconds that open answers may take after SIGTERM: 30", float, default=30.0
    ),
    "rank_timeout": _option(
        "seconds that a rank waits for another one, longer than any step: 120", float, default=120.0
    ),
    "seed": _option("of the first answer that samples without one of its own", number),
}
DOCTOR = {"kernel": _option("test the ring with this kernel"), **JSON}
COMMANDS: dict[str, tuple[str, dict[str, How]]] = {
    "doctor": (
        "check whether it works here: versions, kernels and, under torchrun, a ring of all ranks",
        DOCTOR,
    ),
    "schedule": ("show the part of the work that each rank does at each step", SCHEDULE),
    "compare": (
        "show what each strategy sends, holds and launches, and what it takes on a machine",
        COMPARE,
    ),
    "estimate": (
        "estimate what a training step of a model takes on one rank: memory, messages and hops",
        ESTIMATE,
    ),
    "simulate": (
        "simulate a training step of a model on a machine: milliseconds by part, MFU and memory",
        SIMULATE,
    ),
    "calibrate": (
        "measure kernels and links of this machine, alone or under torchrun, into a file",
        CALIBRATE,
    ),
    "serve": ("serve a model of transformers over HTTP, as OpenAI's clients expect it", SERVE),
}
