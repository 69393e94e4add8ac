"""This rank's calls over one group, in the order in which all ranks make them."""

from __future__ import annotations

from threading import Lock
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dtensor_ring.transport.board import generation_of
from dtensor_ring.transport.error import RingError
from dtensor_ring.transport.inbox import Inbox
from dtensor_ring.transport.watch import WATCH

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
        has_words: whether it can send words.
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
        """Begin a call; returns its number, counted from 1.

        Raises:
            RingError: if the group was shut down, or another thread is in a call.
        """
        self.check()
        # Never waited for: the other thread's call may be the one that all ranks are in.
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
        """End the call that was begun last."""
        self._lock.release()

    def inbox(self, index: int) -> Inbox:
        """Memory for a word and what it carries: one for each peer, in one call after another."""
        while index >= len(self._inboxes):
            self._inboxes.append(Inbox())
        return self._inboxes[index]

    def remember(self, lse: Tensor) -> None:
        """Keep the number of the last call by the memory of its log-sum-exp."""
        origins, storage = self._origins, lse.untyped_storage()
        origins[storage._cdata] = StorageWeakRef(storage), self.number
        if len(origins) > self._max_origins:
            # The limit doubles what is alive, so a sweep costs each call a constant time.
            self._origins = {x: kept for x, kept in origins.items() if not kept[0].expired()}
            self._max_origins = 2 * len(self._origins) + 16

    def origin_of(self, lse: Tensor) -> int:
        """The number of the call that made a log-sum-exp; 0 if it is a copy of that."""
        # No other storage can be at this address: the reference keeps it.
        return self._origins.get(lse.untyped_storage()._cdata, (None, 0))[1]


def session_of(group: dist.ProcessGroup) -> Session:
    """The session of a group, which begins with its first call."""
    found = _SESSIONS.get(group)
    if found is None:
        ranks = tuple(dist.get_process_group_ranks(group))
        has_words = _has_words(group)
        generation = generation_of(group) if has_words else 0
        WATCH.start()
        found = _SESSIONS.setdefault(group, Session(ranks, has_words, generation))
    return found


def _has_words(group: dist.ProcessGroup) -> bool:
    """Whether the group sends messages of CPUs: NCCL's alone does not, and the fake one none."""
    try:
        return group._get_backend(torch.device("cpu")).name() == "gloo"
    except RuntimeError:
        return False


_SESSIONS: WeakKeyDictionary[dist.ProcessGroup, Session] = WeakKeyDictionary()
"""Sessions end with their group."""
