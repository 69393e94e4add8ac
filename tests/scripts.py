"""Scripts that run as their users run them, in processes that need not import torch again.

A new interpreter imports torch and transformers for 5 to 10 seconds, so the fork server of the pool
starts these processes. What differs for a script: its process ends without Python's own clean-up,
and several ranks are started here and not by torchrun, whose environment they see.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from tests.pool import starting


class Ended(NamedTuple):
    """What a process left."""

    code: int | None
    printed: str
    errors: str


def run_script(
    script: Path | str,
    *argv: object,
    ranks: int = 0,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 200,
) -> list[Ended]:
    """Run a script in one process, or on some ranks of gloo as torchrun does; each ends well.

    Args:
        script: a path, or the name of a module for `python -m`.
        argv: its arguments.
        ranks: the number of processes; 0 is one without torchrun's environment.
        cwd: the folder it runs in.
        env: variables that it sees beside those of this process.
        timeout: in seconds, after which it has failed.
    """
    context = starting()
    places = _torchrun(ranks) if ranks else [{}]
    with TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(len(places))]
        jobs = [
            Job(str(script), [str(x) for x in argv], cwd, {**(env or {}), **place}, file)
            for place, file in zip(places, files, strict=True)
        ]
        processes = [context.Process(target=_run, args=(job,), daemon=True) for job in jobs]
        for process in processes:
            process.start()
        _join(processes, timeout)
        pairs = zip(processes, files, strict=True)
        ended = [Ended(x.exitcode, _read(file, ".out"), _read(file, ".err")) for x, file in pairs]
    assert all(x.code == 0 for x in ended), ended
    return ended


class Job(NamedTuple):
    """What a process runs.

    Attributes:
        script: a path, or the name of a module.
        argv: its arguments.
        cwd: the folder it runs in, by default that of the test.
        env: variables that are set for it.
        file: the path of its output, without the suffix.
    """

    script: str
    argv: list[str]
    cwd: Path | None
    env: dict[str, str]
    file: Path


def _torchrun(num_ranks: int) -> list[dict[str, str]]:
    """The environment of each rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    common |= {"LOCAL_WORLD_SIZE": str(num_ranks), "TORCHELASTIC_RUN_ID": "none"}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def _join(processes: list[Any], timeout: float) -> None:
    """Wait until all ended well, one failed, or the time is over; then end the rest."""
    end = time.monotonic() + timeout
    while any(x.exitcode is None for x in processes) and time.monotonic() < end:
        if any(x.exitcode for x in processes):
            break
        wait([x.sentinel for x in processes if x.exitcode is None], 1.0)
    for process in processes:
        process.join(0 if process.exitcode is None else None)
        process.kill()
        process.join()


def _read(file: Path, suffix: str) -> str:
    path = file.with_suffix(suffix)
    return path.read_text() if path.exists() else ""


def _run(job: Job) -> None:
    for number, suffix in ((1, ".out"), (2, ".err")):
        with open(job.file.with_suffix(suffix), "wb") as written:
            os.dup2(written.fileno(), number)
    os.environ.update(job.env, OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    os.chdir(job.cwd or Path.cwd())
    sys.argv = [job.script, *job.argv]
    if job.script.endswith(".py"):
        sys.path.insert(0, str(Path(job.script).parent))
        runpy.run_path(job.script, run_name="__main__")
    else:
        runpy.run_module(job.script, run_name="__main__", alter_sys=True)
