"""The state of a group in a process: the number of its calls, what failed, and who waits.

A wait for a message cannot be split into short waits: gloo closes all connections of a rank when a
wait times out. So one thread watches the waits of the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, Thread, get_ident
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, finalize, ref

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import StorageWeakRef

from dtensor_ring.agreement.call_record import RecvBuffer, RingError
from dtensor_ring.agreement.late_records import (
    Failed,
    LateRecords,
    has_gloo,
    has_late_messages,
    make_record_group,
    time_limit_of,
)
from dtensor_ring.transport.transport import Transport, Work, transport_of

T = TypeVar("T")

# The time limit for an answer of the store, whose host may be gone, in seconds.
STORE_TIMEOUT = 0.25


def group_state_of(group: dist.ProcessGroup) -> GroupState:
    """Return the state of a group; the first call creates it.

    The first call meets those of all other ranks if the group has NCCL: they make a group for their
    records.
    """
    found = _GROUP_STATES.get(group)
    if found is None:
        WATCH.start()
        found = _GROUP_STATES.setdefault(group, _new_state(group))
    return found


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
        # The time limit of one rank may end just before the last rank comes, and that of another
        # just after. If each judged by itself, some would shut the group down, and others use it.
        # The first rank to decide publishes the verdict; later ranks must use it.
        mine = "all" if num_raised >= self._size else "some"
        return self._store.compare_set(f"{key}/verdict", "", mine) == b"all"


# The time limit for the first answer of the store, when nothing has failed yet, in seconds.
FIRST_TIMEOUT = 5.0


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

    def wait(self, what: object, since: float, work: Work) -> None:
        """Wait for a work, and note that this thread does since that time of `time.monotonic`."""
        thread = get_ident()
        self.waits[thread] = Wait(since, what)
        try:
            work.wait()
        finally:
            self.waits.pop(thread, None)

    def due(self, now: float) -> list[str]:
        """Return the warnings that are due at a time of `time.monotonic`."""
        waits = {(thread, wait.since): wait.what for thread, wait in list(self.waits.items())}
        # Rebuilt from the waits that last, so that those that ended are forgotten.
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
            _look_at_groups(time.monotonic())
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
        record_group: the gloo group of call records, if they do not go by the group itself, see
            Note [Record group].

    Attributes:
        late: the records that the host does not wait for; `None` if it waits for all.
        is_strict: whether the host waits for the records of `late`, too.
        cause: why the group was shut down; `None` if it was not.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        sends_records: bool,
        epoch: int = 0,
        record_group: dist.ProcessGroupGloo | None = None,
    ) -> None:
        self.ranks, self.sends_records, self.epoch = ranks, sends_records, epoch
        self.record_group = record_group
        self.late: LateRecords | None = None
        self.is_strict = False
        self.cause: str | None = None
        self._failed = Failed("", "", -1)
        self._abort_lock, self._is_aborted = Lock(), False
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
            _, direction, peer = self._failed
            raise RingError(
                f"the group of the ring {list(self.ranks)} takes no more calls since {self.cause}; "
                f"{RENEW}",
                ring=self.ranks,
                direction=direction,
                peer=None if peer < 0 else peer,
            )

    def failure_store(self, group: dist.ProcessGroup) -> FailureStore:
        """Return the store by which the ranks of the group of this state tell that they failed."""
        return FailureStore(group, self.epoch)

    def shut_down(self, text: str, group: dist.ProcessGroup, *transports: Transport) -> str:
        """Note the first cause, end the waits of all ranks for this one, and return the cause.

        Args:
            text: the cause as this rank knows it; another rank may know an earlier one.
            group: the group of this state.
            transports: what moves messages and call records.
        """
        self.cause = self.failure_store(group).first_cause(text)
        with self._abort_lock:
            # A thread of `late` may be here, too, and NCCL is aborted once.
            if self.late is None or not self._is_aborted:
                self._is_aborted = True
                if self.late is not None:
                    self.late.abort()  # first, as it tells the other ranks
                for transport in transports:
                    transport.abort()
        return self.cause

    def fail(self, failed: Failed, group: dist.ProcessGroup) -> None:
        """Shut the group down for `late`, in a thread of it; the host raises in its next call."""
        if _store_of(group) is None and self.late is not None:  # destroyed here: nobody waits
            self.late.abort()
            return
        self._failed = failed
        cause = self.shut_down(failed.text, group, transport_of(group))
        _LOG.error("the group of the ring %s is shut down: %s", list(self.ranks), cause)

    def confirm(self, group: dist.ProcessGroup) -> None:
        """Wait until the previous rank has confirmed all calls of `late`.

        Raises:
            RingError: if ranks differ, one of them ended, or the time limit is over.
        """
        if self.late is None:
            return
        seconds = time_limit_of(group).total_seconds()
        if not self.late.confirm(seconds):
            self.late.check_time(time.monotonic() + 1.0, seconds)
            self._await_cause()
            self.check()

    @contextmanager
    def naming_cause(self) -> Iterator[None]:
        """Return a context for a collective of the group that has no call record.

        Raises:
            RingError: with the first cause, if `late` shut the group down meanwhile.
        """
        try:
            yield
        except RuntimeError:
            # The error of the collective says only that a peer is gone; the cause says why.
            if self.late is not None:
                self._await_cause()
                self.check()
            raise

    def _await_cause(self) -> None:
        """Wait for the thread that shuts the group down."""
        end = time.monotonic() + 2 * STORE_TIMEOUT + 1.0
        while self.cause is None and time.monotonic() < end:
            time.sleep(0.001)

    def look(self, group: dist.ProcessGroup, now: float) -> None:
        """End `late` with its group, or if a record does not come; called every few seconds."""
        if self.late is None or self.cause is not None:
            return
        if _store_of(group) is None:  # destroyed, but still referenced
            self.late.close()
        else:
            self.late.check_time(now, time_limit_of(group).total_seconds())

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
        # Backward has only what forward saved, so that must tell the number. The storage does, as
        # autograd may hand on another tensor of it.
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


def meet(group: dist.ProcessGroup, is_strict: bool | None = None) -> None:
    """Make the state of a group with NCCL before its first call; all ranks come here.

    Args:
        group: the group.
        is_strict: see `GroupState.is_strict`; `None` leaves it as it is.
    """
    if group.size() > 1 and has_late_messages(group):
        state = group_state_of(group)
        state.is_strict = state.is_strict if is_strict is None else is_strict


def _look_at_groups(now: float) -> None:
    """Let the states of all groups look; nothing here may keep a group alive afterwards."""
    for alive in _GROUP_STATES.keyrefs():
        group = alive()
        state = None if group is None else _GROUP_STATES.get(group)
        if group is not None and state is not None:
            state.look(group, now)


def _new_state(group: dist.ProcessGroup) -> GroupState:
    ranks = tuple(dist.get_process_group_ranks(group))
    has_own, is_late = has_gloo(group), has_late_messages(group) and len(ranks) > 1
    epoch = epoch_of(group) if has_own or is_late else 0
    made = make_record_group(group, _store_of(group), epoch) if is_late else None
    state = GroupState(ranks, has_own or made is not None, epoch, made)
    if made is not None:
        known, alive = ref(state), ref(group)

        def fail(failed: Failed) -> None:
            state, group = known(), alive()
            if state is not None and group is not None:
                state.fail(failed, group)

        state.late = LateRecords(made, ranks, fail)
        # Also called when the interpreter ends: the other ranks take a silent end for a failure.
        finalize(group, state.late.close)
    return state


# A state ends with its group.
_GROUP_STATES: WeakKeyDictionary[dist.ProcessGroup, GroupState] = WeakKeyDictionary()
