"""Worker processes that outlive a test, so that torch is imported once and not for each of them."""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial, wraps
from importlib import import_module
from inspect import Parameter, signature
from itertools import chain
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import mkdtemp
from threading import Lock
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import ProcessGroupGloo
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from dtensor_ring.planning.lru import ByteCache

# Imported once for all workers, if they are installed.
PRELOADED = ["torch._inductor.compile_fx", "transformers.modeling_utils"]
PRELOADED += ["dtensor_ring", "parallel_plans.huggingface"]
# And what the workers import for these tests, if they were collected.
TRAINERS = "tests.huggingface.trainers"
PRELOADED_FOR = {
    f"{TRAINERS}.test_trainer": "transformers.trainer",
    f"{TRAINERS}.test_trl": "trl.trainer.sft_trainer",
    "tests.torchtitan.test_torchtitan": "tests.titan_loaded",
}
GRACE_SECONDS = 15  # for the other ranks, once one has failed
# Under load gloo now and then drops a connection while the ranks of a group meet
# (pytorch/pytorch#53270). That is no fault of what is tested: such a run is begun once more.
DROPPED = "Gloo connectFullMesh failed"


class RankError(AssertionError):
    """What a rank raised, with its traceback; `tracebacks` holds each rank's text or None."""

    def __init__(self, tracebacks: list[str | None]) -> None:
        self.tracebacks = tracebacks
        failed = [f"rank {rank}:\n{text}" for rank, text in enumerate(tracebacks) if text]
        super().__init__("\n".join(failed))


class Place(NamedTuple):
    """Where the ranks of one run meet."""

    prefix: str
    world_size: int
    timeout: float = 90
    """Seconds that the group waits for a message. Twice that, where ranks do not meet and a run is
    begun once more, is less than pytest allows a test."""


class Pool:
    """Runs a function on each rank of a fresh gloo group."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._workers: list[tuple[Any, Connection]] = []
        # Not a FileStore: its readers, which poll, can keep a writer from its lock for minutes.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._num_runs = 0
        self._folder = ""

    def run(
        self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 250
    ) -> list[Any]:
        """What `function(*args)` returns on each rank; it is importable, the rest picklable.

        Raises:
            RankError: if any rank raised, or did not answer in time.
        """
        answers = self._ask(world_size, function, args, timeout)
        if any(DROPPED in (error or "") for _, error in answers):
            self.close()
            answers = self._ask(world_size, function, args, timeout)
        tracebacks = [error for _, error in answers]
        if any(tracebacks):
            raise RankError(tracebacks)
        return [value for value, _ in answers]

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        if self._workers:
            shutil.rmtree(self._folder)
        self._workers = []

    def _start(self, world_size: int) -> None:
        """Start the workers that are missing; a world may be larger than the pool was so far."""
        if not self._workers:
            self._folder = mkdtemp()
        context = starting()
        for _ in range(len(self._workers), max(self._size, world_size)):
            ours, theirs = context.Pipe()
            where = theirs, self._store.port, Path(self._folder)
            process = context.Process(target=_serve, args=where, daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _ask(
        self, world_size: int, function: Callable[..., Any], args: tuple[Any, ...], timeout: float
    ) -> list[tuple[Any, str | None]]:
        self._start(world_size)
        self._num_runs += 1
        place = Place(f"run {self._num_runs}", world_size)
        for rank, (_, pipe) in enumerate(self._workers[:world_size]):
            pipe.send((place, rank, function, args))
        return self._collect(world_size, timeout)

    def _collect(self, world_size: int, timeout: float) -> list[tuple[Any, str | None]]:
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:world_size])}
        answers: list[tuple[Any, str | None]] = [(None, None)] * world_size
        end = time.monotonic() + timeout
        while pipes:
            ready = wait(list(pipes), max(0.0, end - time.monotonic()))
            if not ready:
                for rank in pipes.values():
                    answers[rank] = None, f"gave no answer in time:\n{self._stacks(rank)}"
                self.close()  # a rank hangs: the next run starts again
                break
            for pipe in ready:
                rank = pipes.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = None, "the process died"
                if answers[rank][1]:
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        if any(error == "the process died" for _, error in answers):
            self.close()
        return answers

    def _stacks(self, rank: int) -> str:
        """Where the threads of a rank are."""
        process = self._workers[rank][0]
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)  # it writes at once, whatever it waits for
        return _stacks_file(Path(self._folder), process.pid).read_text()


def on_ranks(
    world_size: int | None = None,
    timeout: float = 250,
    around: Callable[[Callable[[], None]], None] | None = None,
) -> Callable[..., Any]:
    """Run a test on each rank of a group; without a size, the parameter `world_size` gives it.

    It stands next to the test, whose arguments are picklable; `around` calls the test.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def run(pool: Pool, **given: Any) -> None:
            size = given.pop("world_size") if world_size is None else world_size
            named = test.__module__, test.__name__
            pool.run(size, _run_test, *named, given, around, timeout=timeout)

        names = [
            "pool",
            *(["world_size"] if world_size is None else []),
            *signature(test).parameters,
        ]
        parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        run.__signature__ = signature(run).replace(parameters=parameters)  # which pytest reads
        return run

    return decorate


def _run_test(module: str, name: str, given: dict[str, Any], around: Any) -> None:
    test = partial(getattr(import_module(module), name).__wrapped__, **given)
    test() if around is None else around(test)


def starting() -> Any:
    """How processes start: forked from a server that has imported torch, if there is no GPU.

    What the server imports asks CUDA for GPUs, and no fork of a process that did can use one.
    """
    return mp.get_context("spawn" if torch.cuda.is_available() else "forkserver")


def start_server() -> None:
    """Fork the server of all worker processes from this one, which has imported the tests.

    Python itself starts an interpreter for it, which imports all of this again for ten seconds.
    Later is too late: a fork of a process that has threads may hang, and autograd refuses it.
    """
    if torch.cuda.is_available():
        return
    for name in [*PRELOADED, *(x for tests, x in PRELOADED_FOR.items() if tests in sys.modules)]:
        with suppress(ImportError):
            import_module(name)
    gc.freeze()
    for file in (sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__):
        file.flush()  # else each worker would print what is left
    resource_tracker.ensure_running()  # it is an interpreter of its own
    forkserver.set_forkserver_preload([])
    with patch.object(util, "spawnv_passfds", _fork):
        forkserver.ensure_running()


def _fork(path: bytes, args: list[str], passed: list[int]) -> int:
    """Run code in a fork of this process, which Python would run in a new interpreter."""
    if pid := os.fork():
        return pid
    try:
        _, alive = passed
        for fd in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):  # that of the folder
                # The end of this pipe that is not passed: the server ends when nobody has it.
                if fd != alive and os.path.sameopenfile(fd, alive):
                    os.close(fd)
        forkserver._forkserver._lock = Lock()  # the parent holds that of its own
        _resemble_interpreter()
        exec(args[-1], {})
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)


def _resemble_interpreter() -> None:
    """Put back what a new interpreter has, where pytest or the tests' imports changed it."""
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    faulthandler.disable()  # pytest's, which prints where a process was that a test ends
    warnings.resetwarnings()
    warnings.showwarning = warnings._showwarning_orig
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")
    for name in [name for name in sys.modules if name.endswith(".__main__")]:
        del sys.modules[name]  # of commands, which run them afresh
    _forget_plans()


def _forget_plans() -> None:
    """Clear the caches of our functions: what cases are made of was planned as tests were found."""
    ours = [module for name, module in sys.modules.items() if name.startswith("dtensor_ring.")]
    for value in chain.from_iterable(vars(module).values() for module in ours):
        if isinstance(value, ByteCache):
            value.clear()
        elif hasattr(value, "cache_clear"):
            value.cache_clear()


def settle() -> None:
    """Make this process a worker: one thread, few instructions, and any warning is an error."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    # Else inductor compiles for each of them, and that of torch 2.11 starts Python, to find out.
    for name in ("_is_avx512_bf16_supported", "_is_vnni_supported", "_is_amx_tile_supported"):
        setattr(torch.cpu, name, lambda: False)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated")
    warnings.filterwarnings("ignore", ".* that dtensor_ring was tested with")


def share_gloo_thread() -> None:
    """Make all groups of this process share one device of gloo.

    Each device has a thread that wakes a hundred times a second. A graph that was compiled may keep
    its groups alive after the test: of hundreds of idle threads the CPU is a tenth slower.
    """
    device, original = ProcessGroupGloo.create_default_device(), ProcessGroupGloo.__init__

    def create(
        self: Any, store: dist.Store, rank: int, size: int, timeout: timedelta, **_: Any
    ) -> None:
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = [device], timeout
        original(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = create


def _stacks_file(folder: Path, pid: int) -> Path:
    return folder / f"{pid}.stacks"


def _serve(pipe: Connection, port: int, folder: Path) -> None:
    settle()
    share_gloo_thread()
    stacks = _stacks_file(folder, os.getpid()).open("w")
    faulthandler.register(signal.SIGUSR1, stacks)
    # One for all runs: at each connection the server asks DNS for a name, and may wait seconds.
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            place, rank, function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = run_rank(store, place, rank, function, args), None
        except BaseException:
            answer = None, traceback.format_exc()
        pipe.send(answer)


def run_rank(
    store: dist.Store, place: Place, rank: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    """What `function(*args)` returns as a rank of a fresh gloo group, which ends with it."""
    torch.manual_seed(0)
    store, timeout = dist.PrefixStore(place.prefix, store), timedelta(seconds=place.timeout)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=place.world_size, timeout=timeout
    )
    try:
        # A rank whose run is short must not leave while another one still connects: gloo takes that
        # for a lost connection.
        if store.add("connected", 1) == place.world_size:
            store.set("all connected", "")
        store.wait(["all connected"], timeout)
        with warnings.catch_warnings():  # what is ignored in one run is an error in the next
            return function(*args)
    finally:
        torch._dynamo.reset()
        _forget_meshes()
        dist.destroy_process_group()
        for _ in range(2):  # groups that are part of a cycle, then those that its finalizers held
            gc.collect()
        gc.freeze()  # so that the next one looks at its own run only, not at all that was imported


def _forget_meshes() -> None:
    """Clear DTensor's caches: through the meshes of this world they hold its groups' threads."""
    _clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()
    ShardingPropagator._propagate_tensor_meta_cached.cache_clear()
