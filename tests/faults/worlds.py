"""Ranks that may be killed, stopped or hang: what became of each is recorded, and nothing waits.

Processes outlive a world, so that a case costs no import, and so that it is seen whether what an
error left behind in a process spoils the next world.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.multiprocessing as mp

from tests.pool import DROPPED, Place, run_rank, settle

TIMEOUT = 2.0
"""Seconds that groups wait for a message, where a test is about that limit."""
DEADLINE = 30.0
"""Seconds after which a rank hangs."""
PATIENT = 2 * DEADLINE
"""Seconds that other groups wait: a rank that is told anything was not told by the limit."""
ATTEMPTS = 3
"""Of a world whose ranks did not meet, as now and then under load (pytorch/pytorch#53270)."""
UNMET = "did not meet"
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
PORT = 29600


class Failure(NamedTuple):
    """An exception, as it travels to the test; `fields` are those of a `RingError`."""

    kind: str
    text: str
    fields: dict[str, Any]


class Home(NamedTuple):
    """The network namespace that a rank lives in, and the address of rank 0."""

    namespace: str
    address: str


@dataclass
class Fate:
    """What became of a rank.

    Attributes:
        ended: "returned"; "raised", which ends the process; "hung"; the name of a signal; or "did
            not meet" the other ranks, which is no fault of what is tested.
        value: what the function returned, or the `Failure` that it raised.
        events: seconds at which something was logged last, on one clock for all ranks; "gone" is
            the end of its process.
        pid: of the process.
    """

    pid: int
    ended: str = "hung"
    value: Any = None
    events: dict[str, float] = field(default_factory=dict)

    @property
    def dropped(self) -> bool:
        """Whether the ranks did not meet, in their world or in a group that they made later."""
        return self.ended == UNMET or (self.ended == "raised" and DROPPED in self.value.text)


class Terms(NamedTuple):
    """How long things may take, in seconds, and what the test does meanwhile.

    Attributes:
        timeout: that the group waits for a message.
        deadline: until a rank counts as hung; its process is killed then.
        on: called at the event of that name.
    """

    timeout: float = PATIENT
    deadline: float = DEADLINE
    on: Mapping[str, Callable[[], object]] = {}


USUAL = Terms()
LIMITED = Terms(timeout=TIMEOUT)


class Log:
    """Tells the test, on a rank, what happens and when; also if the process dies right after."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.has_begun = False  # the ranks have met

    def __call__(self, what: str) -> None:
        self._pipe.send(("event", what, time.monotonic()))


def failure_of(error: BaseException) -> Failure:
    """What the test needs to know of an exception, without what it refers to."""
    names = ("ring", "direction", "step", "source", "peer", "seconds")
    fields = {name: getattr(error, name) for name in names if hasattr(error, name)}
    return Failure(type(error).__name__, str(error), fields)


class Worlds:
    """Runs a function on the ranks of fresh groups, in processes that are replaced if they end.

    Args:
        homes: the namespaces of the processes, for a network of their own.
    """

    def __init__(self, homes: Sequence[Home] = ()) -> None:
        self._homes = homes
        self._processes: dict[int, tuple[Any, Connection]] = {}
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._num_runs = 0

    def run(
        self,
        members: int | Sequence[int],
        function: Callable[..., Any],
        *args: Any,
        terms: Terms = USUAL,
    ) -> list[Fate]:
        """What becomes of each rank that calls `function(log, *args)`.

        Args:
            members: the processes that are the ranks, in order; a number n is the first n.
            function: importable.
            args: picklable.
            terms: how long things may take.
        """
        members = range(members) if isinstance(members, int) else members
        for _ in range(ATTEMPTS):
            fates = self._run(members, (function, args), terms)
            if not any(fate.dropped for fate in fates):
                break
        return fates

    def close(self) -> None:
        """End the processes."""
        for member in list(self._processes):
            self._end(member)

    def _run(self, members: Sequence[int], job: tuple[Any, ...], terms: Terms) -> list[Fate]:
        self._num_runs += 1
        place = Place(f"run {self._num_runs}", len(members), terms.timeout)
        fates = {}
        for rank, member in enumerate(members):
            process, pipe = self._process(member)
            pipe.send((place, self._num_runs, rank, *job))
            fates[member] = Fate(process.pid)
        self._collect(fates, terms)
        return list(fates.values())

    def _process(self, member: int) -> tuple[Any, Connection]:
        if member not in self._processes:
            context = mp.get_context("forkserver")
            ours, theirs = context.Pipe()
            home = self._homes[member] if self._homes else None
            args = theirs, self._store.port, home
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._processes[member] = process, ours
        return self._processes[member]

    def _collect(self, fates: dict[int, Fate], terms: Terms) -> None:
        end = time.monotonic() + terms.deadline
        pipes = {self._processes[member][1]: member for member in fates}
        while pipes and (ready := wait(list(pipes), max(0.0, end - time.monotonic()))):
            for pipe in ready:
                if self._hear(pipes[pipe], fates[pipes[pipe]], terms.on):
                    del pipes[pipe]
        for member in pipes.values():
            self._end(member)  # it hangs

    def _hear(self, member: int, fate: Fate, on: Mapping[str, Callable[[], object]]) -> bool:
        """Take in a message; whether it is the last one of this rank."""
        try:
            what, value, seconds = self._processes[member][1].recv()
        except (EOFError, ConnectionResetError):
            fate.events["gone"] = time.monotonic()
            code = self._end(member, grace=10)
            if fate.ended == "hung":
                fate.ended = signal.Signals(-code).name if code < 0 else f"exited with {code}"
            return True
        if what == "event":
            fate.events[value] = seconds
            on.get(value, lambda: None)()
            return False
        fate.ended, fate.value, fate.events[what] = what, value, seconds
        return what == "returned"  # else the process is about to end

    def _end(self, member: int, grace: float = 0) -> int:
        """The code with which a process ends; it is killed if it takes longer than that."""
        process, pipe = self._processes.pop(member)
        process.join(grace)
        process.kill()
        process.join()
        pipe.close()
        return process.exitcode


def _serve(pipe: Connection, port: int, home: Home | None) -> None:
    settle()
    store = None
    if home is None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
    else:
        enter(home.namespace)
    for place, number, rank, function, args in _jobs(pipe):
        log = Log(pipe)
        try:
            meet = store or _store_at(home, number, rank)
            value = run_rank(meet, place, rank, _begin, (log, function, args))
        except BaseException as error:
            what = "raised" if log.has_begun else UNMET
            pipe.send((what, failure_of(error), time.monotonic()))
            # What a script does not catch ends its process. So does a meeting that failed: PyTorch
            # has counted its group, and would look for the next one under another name than others.
            raise
        else:
            pipe.send(("returned", value, time.monotonic()))


def _begin(log: Log, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    log.has_begun = True
    return function(log, *args)


def _jobs(pipe: Connection) -> Iterator[tuple[Any, ...]]:
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return


def enter(namespace: str) -> None:
    """Move this process, which has one thread yet, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


def _store_at(home: Home | None, number: int, rank: int) -> dist.Store:
    """The store of a world whose ranks are in namespaces: the test's own is out of reach."""
    assert home is not None
    return dist.TCPStore(
        home.address, PORT + number % 100, is_master=rank == 0, wait_for_workers=False
    )
