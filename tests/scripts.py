"""Scripts that run as their users run them, in processes that need not import torch again.

A new interpreter imports torch and transformers for 5 to 10 seconds, so the fork server of the pool
starts these processes. What differs for a script: its process ends without Python's own clean-up,
and several ranks are started here and not by torchrun, whose environment they see. Where torchrun
itself is tested, its ranks are forks of its process.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch.distributed.launcher.api import elastic_launch

from tests.faults.worlds import enter
from tests.pool import starting

# No code of ours aborts a process, but a library's thread did, twice in thousands of runs under
# load, and before the first step, where the ranks of gloo meet. Such a run is begun once more, as
# the pool begins one whose connection was dropped.
ABORTED = "Signal 6 (SIGABRT)"


class Ended(NamedTuple):
    """How a process ended, what it printed, and the processes that it left behind."""

    code: int | None
    printed: str
    errors: str
    left: list[int]


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
    places = _torchrun(ranks) if ranks else [{}]
    given = str(script), [str(x) for x in argv], cwd
    ended = _run_all([(*given, {**(env or {}), **place}) for place in places], timeout)
    assert all(x.code == 0 for x in ended), ended
    return ended


def run_launcher(
    script: Path | str,
    *argv: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 200,
) -> Ended:
    """Run torchrun, or what calls it, whose ranks are forks; it may fail.

    Args:
        script: a path, or the name of a module for `python -m`.
        argv: its arguments.
        cwd: the folder it runs in.
        env: variables that it sees beside those of this process.
        timeout: in seconds, after which it has failed.
    """
    job = str(script), [str(x) for x in argv], cwd, dict(env or {})
    (ended,) = _run_all([job], timeout, [""])
    if ABORTED in ended.errors:
        (ended,) = _run_all([job], timeout, [""])
    return ended


@contextmanager
def running_launcher(
    module: str, *argv: object, timeout: float = 100
) -> Iterator[tuple[Any, Callable[[], str]]]:
    """A launcher that runs until it is told to end: its process, and what it has printed so far.

    Args:
        module: see `run_launcher`.
        argv: its arguments.
        timeout: in seconds, in which it ends once it is told to.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder, "0")
        job = Job(module, [str(x) for x in argv], None, {}, file, "")
        process = starting().Process(target=_run, args=(job,))
        process.start()
        try:
            yield process, lambda: _read(file, ".out")
            process.join(timeout)
        finally:
            for pid in session(process.pid):
                os.kill(pid, signal.SIGKILL)
            process.join()


def run_launchers(
    commands: Mapping[str, Sequence[str]],
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 200,
) -> list[Ended]:
    """Run a launcher on each of some hosts, side by side; they may fail.

    Args:
        commands: a module and its arguments, by the network namespace of a host.
        cwd: the folder they run in.
        env: variables that they see beside those of this process.
        timeout: in seconds, after which they have failed.
    """
    jobs = [(module, argv, cwd, dict(env or {})) for module, *argv in commands.values()]
    return _run_all(jobs, timeout, list(commands))


def _run_all(jobs: list[Any], timeout: float, hosts: Sequence[str] | None = None) -> list[Ended]:
    """Run jobs, which lack the file of their output, side by side: launchers if hosts are given."""
    context = starting()
    with TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(len(jobs))]
        places = [None] * len(jobs) if hosts is None else hosts
        processes = [
            # Those that are daemons may have no processes of their own.
            context.Process(target=_run, args=(Job(*job, file, host),), daemon=host is None)
            for job, file, host in zip(jobs, files, places, strict=True)
        ]
        for process in processes:
            process.start()
        _join(processes, timeout)
        return [
            Ended(x.exitcode, _read(file, ".out"), _read(file, ".err"), session(x.pid))
            for x, file in zip(processes, files, strict=True)
        ]


class Job(NamedTuple):
    """What a process runs.

    Attributes:
        script: a path, or the name of a module.
        argv: its arguments.
        cwd: the folder it runs in, by default that of the test.
        env: variables that are set for it.
        file: the path of its output, without the suffix.
        host: if it is torchrun, or calls it, the network namespace that it runs in, or "" for that
            of the test.
    """

    script: str
    argv: list[str]
    cwd: Path | None
    env: dict[str, str]
    file: Path
    host: str | None = None


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


def session(leader: int) -> list[int]:
    """The processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            _, _, _, number = path.read_text().rpartition(")")[2].split()[:4]
            found += [int(path.parent.name)] * (number == str(leader))
    return found


def _read(file: Path, suffix: str) -> str:
    path = file.with_suffix(suffix)
    return path.read_text() if path.exists() else ""


def _run(job: Job) -> None:
    if job.host:
        enter(job.host)
    for number, suffix in ((1, ".out"), (2, ".err")):
        with open(job.file.with_suffix(suffix), "wb") as written:
            os.dup2(written.fileno(), number)
    os.environ.update(job.env, OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    os.chdir(job.cwd or Path.cwd())
    if job.host is not None:
        os.setsid()
        _fork_ranks()
    _execute(job.script, job.argv)


def _execute(script: str, argv: list[str]) -> None:
    """Run a script or a module as Python does."""
    sys.argv = [script, *argv]
    if script.endswith(".py"):
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")
    else:
        if not hasattr(sys.modules.get(script), "__path__"):
            sys.modules.pop(script, None)  # no process imports what it runs
        runpy.run_module(script, run_name="__main__", alter_sys=True)


def _fork_ranks() -> None:
    """Let torchrun fork this process for its ranks, where it would start interpreters."""
    original = elastic_launch.__init__

    def launch(self: Any, config: Any, entrypoint: Any) -> None:
        config.start_method = "fork"
        is_command = entrypoint == sys.executable
        original(self, config, _execute_command if is_command else entrypoint)

    elastic_launch.__init__ = launch


def _execute_command(*command: str) -> None:
    """Run what follows the interpreter on a command line: `-u script.py` or `-u -m module`."""
    flag, *others = command
    assert flag == "-u", "output is not kept back"
    script, *argv = others[1:] if others[0] == "-m" else others
    sys.stdout.reconfigure(line_buffering=True)
    _execute(script, argv)
