"""The state of a group in a process: the number of its calls, what failed, and who waits.

A wait for a message cannot be split into short waits: gloo closes all connections of a rank when a
wait times out. So one thread watches the waits of the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Lock, Thread, get_ident
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import StorageWeakRef

from dtensor_ring.agreement.call_record import RecvBuffer, RingError

T = TypeVar("T")

# The time limit for an answer of the store, whose host may be gone, in seconds.
STORE_TIMEOUT = 0.25

# The time limit for its first answer, when nothing has failed yet, in seconds.
FIRST_TIMEOUT = 5.0

# How long a rank waits for the others to raise, in seconds. It delays the report of each
# failure, and all ranks shall know within a second.
OTHERS_TIMEOUT = 0.5


class FailureStore:
    """The store of a group. Only failing calls use it, with short time limits.

    Args:
        group: the group whose ranks read and write the store.
        epoch: of the group, see `epoch_of`: an earlier group may have used the store.
    """

    def __init__(self, group: dist.ProcessGroup, epoch: int) -> None:
        self._store, self._size = _store_of(group), group.size()
        self._prefix = f"dtensor_ring/{epoch}"

    def first_cause(self, text: str) -> str:
        """Return the cause that any rank wrote first; if there is none, write `text`."""
        found = _with_time_limit(
            lambda: self._store.compare_set(f"{self._prefix}/first", "", text), STORE_TIMEOUT
        )
        return text if found is None else found.decode()

    def all_raised(self, where: str) -> bool:
        """Return whether all ranks pass the same `where` within `OTHERS_TIMEOUT` seconds."""
        return bool(
            _with_time_limit(
                lambda: self._verdict(f"{self._prefix}/{where}"), OTHERS_TIMEOUT + STORE_TIMEOUT
            )
        )

    def _verdict(self, key: str) -> bool:
        num_raised, end = self._store.add(key, 1), time.monotonic() + OTHERS_TIMEOUT
        while num_raised < self._size and time.monotonic() < end:
            time.sleep(0.005)
            num_raised = self._store.add(key, 0)
        # The first rank to decide publishes the verdict; later ranks must use it.
        mine = "all" if num_raised >= self._size else "some"
        return self._store.compare_set(f"{key}/verdict", "", mine) == b"all"


def epoch_of(group: dist.ProcessGroup) -> int:
    """Count the groups that used this store before; each rank of a group calls this once."""
    found = _with_time_limit(lambda: _store_of(group).add("dtensor_ring/groups", 1), FIRST_TIMEOUT)
    return 0 if found is None else (found - 1) // group.size()


def _store_of(group: dist.ProcessGroup) -> Any:
    """Return the store of a group, `None` if the group was destroyed."""
    return distributed_c10d._world.pg_map.get(group, (None, None))[1]


def _with_time_limit(ask: Callable[[], T], seconds: float) -> T | None:
    """Return the answer of `ask`, or `None` if it fails or takes longer than `seconds`."""
    results: list[T] = []

    def run() -> None:
        try:
            results.append(ask())
        except (RuntimeError, AttributeError):  # the store or its host is gone
            return

    # A store has one timeout of minutes for all requests, so a thread asks, which may hang.
    thread = Thread(target=run, name="dtensor_ring store", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


# Seconds between two checks of the waits.
PERIOD = 5.0

# A wait is reported after this many seconds, and then each time its length has doubled.
FIRST_WARNING = 30.0

_LOG = logging.getLogger("dtensor_ring")


class Wait(NamedTuple):
    """A wait for a message.

    Attributes:
        since: when it began, by `time.monotonic`.
        what: an object whose string describes the wait.
    """

    since: float
    what: object


class Watch:
    """The waits of this process.

    >>> watch = Watch()
    >>> watch.waits[0] = Wait(0.0, "rank 1 waits for rank 0")
    >>> watch.due(31.0), watch.due(40.0), watch.due(70.0)
    (['rank 1 waits for rank 0: 31 s'], [], ['rank 1 waits for rank 0: 70 s'])
    """

    def __init__(self) -> None:
        self.waits: dict[int, Wait] = {}  # by thread
        self._next: dict[tuple[int, float], float] = {}  # by thread and begin of the wait
        self._thread: Thread | None = None
        self._lock = Lock()

    def begin(self, what: object, since: float) -> None:
        """Note that this thread waits since that time of `time.monotonic`."""
        self.waits[get_ident()] = Wait(since, what)

    def end(self) -> None:
        """Note that this thread waits no more."""
        self.waits.pop(get_ident(), None)

    def due(self, now: float) -> list[str]:
        """Return the warnings that are due at a time of `time.monotonic`."""
        waits = {(thread, wait.since): wait.what for thread, wait in list(self.waits.items())}
        self._next = {wait: self._next.get(wait, FIRST_WARNING) for wait in waits}
        late = [wait for wait in waits if now - wait[1] >= self._next[wait]]
        self._next |= {wait: 2 * (now - wait[1]) for wait in late}
        return [f"{waits[wait]}: {now - wait[1]:.0f} s" for wait in late]

    def start(self) -> None:
        """Start to watch, in a thread that ends with the process."""
        with self._lock:
            # A forked process has none of its parent's threads.
            if self._thread is None or not self._thread.is_alive():
                self._thread = Thread(target=self._look, name="dtensor_ring watch", daemon=True)
                self._thread.start()

    def _look(self) -> None:
        while True:
            time.sleep(PERIOD)
            for text in self.due(time.monotonic()):
                _LOG.warning("%s; init_process_group(timeout=...) sets the limit", text)


# One per process, because it costs a thread.
WATCH = Watch()


RENEW = (
    "its messages are in no order any more; destroy it (dist.destroy_process_group) and make a new "
    "one, see docs/failures.md"
)
THREADS = (
    "two threads of a rank called a ring of one group at once, and its messages have one order; "
    "give each thread its own group, or call from one thread"
)


class GroupState:
    """Counts the calls of a group on this rank, and remembers the cause of its end.

    Args:
        ranks: the global ranks of the group.
        sends_records: whether the group can send call records.
        epoch: of the group, see `epoch_of`.
    """

    def __init__(self, ranks: tuple[int, ...], sends_records: bool, epoch: int = 0) -> None:
        self.ranks, self.sends_records, self.epoch = ranks, sends_records, epoch
        self.cause: str | None = None
        self.is_announced = False
        self.number = 0
        self._lock = Lock()
        self._forward_calls: dict[int, tuple[StorageWeakRef, int]] = {}
        self._max_forward_calls = 16
        self._recv_buffers: list[RecvBuffer] = []

    def begin(self) -> int:
        """Begin a call, and return its number, counted from 1.

        Raises:
            RingError: if the group was shut down, or another thread is in a call.
        """
        self.check()
        # Do not wait for the lock: the other ranks may be in the other thread's call.
        if not self._lock.acquire(blocking=False):
            raise RingError(THREADS, ring=self.ranks)
        self.number += 1
        return self.number

    def check(self) -> None:
        """Refuse a group that was shut down.

        Raises:
            RingError: with the first cause.
        """
        if self.cause is not None:
            raise RingError(
                f"the group of the ring {list(self.ranks)} takes no more calls since {self.cause}; "
                f"{RENEW}",
                ring=self.ranks,
            )

    def end(self) -> None:
        """End the current call."""
        self._lock.release()

    def recv_buffer(self, index: int) -> RecvBuffer:
        """Return the buffer for a peer's record; calls reuse it one after the other."""
        while index >= len(self._recv_buffers):
            self._recv_buffers.append(RecvBuffer())
        return self._recv_buffers[index]

    def remember(self, lse: Tensor) -> None:
        """Store the number of the last call under the memory of its log-sum-exp."""
        calls, storage = self._forward_calls, lse.untyped_storage()
        calls[storage._cdata] = StorageWeakRef(storage), self.number
        if len(calls) > self._max_forward_calls:
            # The limit is twice the live entries, so sweeps cost each call constant time.
            self._forward_calls = {x: kept for x, kept in calls.items() if not kept[0].expired()}
            self._max_forward_calls = 2 * len(self._forward_calls) + 16

    def forward_call_of(self, lse: Tensor) -> int:
        """Return the number of the call that made a log-sum-exp; 0 if the tensor is a copy."""
        # No other storage can have this address while the weak reference keeps it.
        return self._forward_calls.get(lse.untyped_storage()._cdata, (None, 0))[1]


def group_state_of(group: dist.ProcessGroup) -> GroupState:
    """Return the state of a group; the first call creates it."""
    found = _GROUP_STATES.get(group)
    if found is None:
        ranks = tuple(dist.get_process_group_ranks(group))
        sends_records = _sends_records(group)
        epoch = epoch_of(group) if sends_records else 0
        WATCH.start()
        found = _GROUP_STATES.setdefault(group, GroupState(ranks, sends_records, epoch))
    return found


def _sends_records(group: dist.ProcessGroup) -> bool:
    """Return whether the group has gloo for CPU tensors; pure NCCL and fake groups do not."""
    try:
        return group._get_backend(torch.device("cpu")).name() == "gloo"
    except RuntimeError:
        return False


# A state ends with its group.
_GROUP_STATES: WeakKeyDictionary[dist.ProcessGroup, GroupState] = WeakKeyDictionary()
