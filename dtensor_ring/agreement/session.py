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

from dtensor_ring.agreement.error import RingError
from dtensor_ring.agreement.record import Inbox

T = TypeVar("T")

# The time limit for an answer of the store, whose host may be gone, in seconds.
ANSWER = 0.25

# The time limit for its first answer, when nothing has failed yet, in seconds.
FIRST = 5.0

# How long a rank waits for the others to raise, in seconds: all know of a failure within a second.
OTHERS = 0.5


class Board:
    """The store of a group. Only failing calls use it, with short time limits.

    Args:
        group: the group whose ranks read and write the store.
        generation: of the group, see `generation_of`: an earlier group may have used the store.
    """

    def __init__(self, group: dist.ProcessGroup, generation: int) -> None:
        self._store, self._size = _store_of(group), group.size()
        self._prefix = f"dtensor_ring/{generation}"

    def first_cause(self, text: str) -> str:
        """Return the cause that any rank wrote first; if there is none, write `text`."""
        found = _answer(lambda: self._store.compare_set(f"{self._prefix}/first", "", text), ANSWER)
        return text if found is None else found.decode()

    def all_raised(self, where: str) -> bool:
        """Return whether all ranks call this with the same `where` within `OTHERS` seconds."""
        return bool(_answer(lambda: self._verdict(f"{self._prefix}/{where}"), OTHERS + ANSWER))

    def _verdict(self, key: str) -> bool:
        num_raised, end = self._store.add(key, 1), time.monotonic() + OTHERS
        while num_raised < self._size and time.monotonic() < end:
            time.sleep(0.005)
            num_raised = self._store.add(key, 0)
        # The first rank to decide publishes the verdict; later ranks must use it.
        mine = "all" if num_raised >= self._size else "some"
        return self._store.compare_set(f"{key}/verdict", "", mine) == b"all"


def generation_of(group: dist.ProcessGroup) -> int:
    """Count the groups that used this store before; each rank of a group calls this once."""
    found = _answer(lambda: _store_of(group).add("dtensor_ring/sessions", 1), FIRST)
    return 0 if found is None else (found - 1) // group.size()


def _store_of(group: dist.ProcessGroup) -> Any:
    """Return the store of a group, `None` if the group was destroyed."""
    return distributed_c10d._world.pg_map.get(group, (None, None))[1]


def _answer(ask: Callable[[], T], seconds: float) -> T | None:
    """Return the answer of `ask`, or `None` if it fails or takes longer than `seconds`."""
    answers: list[T] = []

    def run() -> None:
        try:
            answers.append(ask())
        except (RuntimeError, AttributeError):  # the store or its host is gone
            return

    # A store has one timeout of minutes for all requests, so a thread asks, which may hang.
    thread = Thread(target=run, name="dtensor_ring board", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


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


class Session:
    """Counts the calls of a group on this rank, and remembers the cause of its end.

    Args:
        ranks: the global ranks of the group.
        has_words: whether the group can send call records.
        generation: of the group, see `generation_of`.
    """

    def __init__(self, ranks: tuple[int, ...], has_words: bool, generation: int = 0) -> None:
        self.ranks, self.has_words, self.generation = ranks, has_words, generation
        self.cause: str | None = None
        self.is_announced = False
        self.number = 0
        self._lock = Lock()
        self._origins: dict[int, tuple[StorageWeakRef, int]] = {}
        self._max_origins = 16
        self._inboxes: list[Inbox] = []

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

    def inbox(self, index: int) -> Inbox:
        """Return the buffer for a peer's record; calls reuse it one after the other."""
        while index >= len(self._inboxes):
            self._inboxes.append(Inbox())
        return self._inboxes[index]

    def remember(self, lse: Tensor) -> None:
        """Store the number of the last call under the memory of its log-sum-exp."""
        origins, storage = self._origins, lse.untyped_storage()
        origins[storage._cdata] = StorageWeakRef(storage), self.number
        if len(origins) > self._max_origins:
            # The limit is twice the live entries, so sweeps cost each call constant time.
            self._origins = {x: kept for x, kept in origins.items() if not kept[0].expired()}
            self._max_origins = 2 * len(self._origins) + 16

    def origin_of(self, lse: Tensor) -> int:
        """Return the number of the call that made a log-sum-exp; 0 if the tensor is a copy."""
        # No other storage can have this address while the weak reference keeps it.
        return self._origins.get(lse.untyped_storage()._cdata, (None, 0))[1]


def session_of(group: dist.ProcessGroup) -> Session:
    """Return the session of a group; the first call creates it."""
    found = _SESSIONS.get(group)
    if found is None:
        ranks = tuple(dist.get_process_group_ranks(group))
        has_words = _has_words(group)
        generation = generation_of(group) if has_words else 0
        WATCH.start()
        found = _SESSIONS.setdefault(group, Session(ranks, has_words, generation))
    return found


def _has_words(group: dist.ProcessGroup) -> bool:
    """Return whether the group has gloo for CPU tensors; pure NCCL and fake groups do not."""
    try:
        return group._get_backend(torch.device("cpu")).name() == "gloo"
    except RuntimeError:
        return False


# A session ends with its group.
_SESSIONS: WeakKeyDictionary[dist.ProcessGroup, Session] = WeakKeyDictionary()
