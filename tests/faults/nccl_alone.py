"""A stand-in for groups that have NCCL alone, on CPUs: no tags, no gloo, and records come late.

As with NCCL, messages match by their order alone, and one that is longer or shorter than the buffer
that receives it ends nothing. A wait stands for the wait of a device: only an abort ends it.
"""

from __future__ import annotations

import struct
import time
from _thread import start_new_thread
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_ring.agreement import group_state
from dtensor_ring.agreement.late_records import Header, LateRecords
from dtensor_ring.transport import transport
from dtensor_ring.transport.transport import P2P, ProcessGroupTransport, Transport, Work
from tests.faults.worlds import Log

LATE = 0.03
"""Seconds for which each record is delayed: what differs is computed meanwhile."""
TOLD = 1.0
"""Seconds within which all ranks are told of what happened."""
NUM_TAGS = 1 << 20
"""Tags of sizes; those of contents follow."""


class Untagged(Transport):
    """Messages that match by their order, of any size.

    Args:
        group: gloo's; each message is two of its messages, the size and the content.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._plain = group, ProcessGroupTransport(group)
        self._numbers = Counter[tuple[str, int]]()
        self.events: list[str] = []
        self.is_aborted = False

    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        self.events.append("start")
        works: list[Work] = [Arriving(self, self._group, x, self._tag("from", x)) for x in receives]
        return works + [Leaving(self, self._group, x, self._tag("to", x)) for x in sends]

    def _tag(self, side: str, message: P2P) -> int:
        self._numbers[side, message.peer] += 1
        return self._numbers[side, message.peer] % NUM_TAGS

    def abort(self) -> None:
        self.is_aborted = True
        self._plain.abort()


class Arriving:
    """A message that this rank receives; a longer one is cut, a shorter one leaves the rest.

    A thread receives it: gloo may leave a wait alone whose group is aborted in this process while
    the message arrives.
    """

    def __init__(self, owner: Untagged, group: dist.ProcessGroup, message: P2P, tag: int) -> None:
        self._owner, self._group, self._message, self._tag = owner, group, message, tag
        self._size = torch.zeros(8, dtype=torch.uint8)
        self._work = group.recv([self._size], message.peer, tag)
        self._has_ended, self._error = Event(), list[RuntimeError]()
        start_new_thread(self._receive, ())  # `Thread.start` waits, which a test counts

    def wait(self) -> None:
        self._owner.events.append("wait")
        while not self._has_ended.wait(0.05):
            if self._owner.is_aborted:
                raise RuntimeError("the connection is closed by an abort of this rank")
        if self._error:
            raise self._error[0]

    def _receive(self) -> None:
        try:
            self._work.wait()
            (size,) = struct.unpack("<Q", self._size.numpy().tobytes())
            content = torch.empty(size, dtype=torch.uint8)
            self._group.recv([content], self._message.peer, NUM_TAGS + self._tag).wait()
            into = self._message.flat.detach().view(torch.uint8)
            kept = min(size, into.numel())
            into[:kept] = content[:kept]
        except RuntimeError as error:
            self._error.append(error)
        self._has_ended.set()


class Leaving:
    """A message that this rank sends; as NCCL, it may still be in flight when buffers come back."""

    def __init__(self, owner: Untagged, group: dist.ProcessGroup, message: P2P, tag: int) -> None:
        self._owner = owner
        content = message.flat.view(torch.uint8).clone()
        size = torch.frombuffer(bytearray(struct.pack("<Q", content.numel())), dtype=torch.uint8)
        sent: list[tuple[Tensor, int]] = [(size, tag), (content, NUM_TAGS + tag)]
        self._works = [group.send([x], message.peer, number) for x, number in sent]

    def wait(self) -> None:
        self._owner.events.append("wait")
        for work in self._works:
            work.wait()


class StandIns(WeakKeyDictionary[Any, Any]):
    """The transports of all groups: each gets one of its own."""

    def get(self, key: Any, default: Any = None) -> Any:
        return self.setdefault(key, Untagged(key))


@contextmanager
def nccl_alone(seconds: float = LATE) -> Iterator[None]:
    """Groups of gloo are as groups of NCCL, whose records are late by that."""
    take = LateRecords._take

    def late(this: LateRecords, theirs: Header) -> None:
        time.sleep(seconds)
        take(this, theirs)

    with (
        patch.object(group_state, "has_gloo", lambda group: False),
        patch.object(group_state, "has_late_messages", lambda group: True),
        patch.object(transport, "_TRANSPORTS", StandIns()),
        patch.object(LateRecords, "_take", late),
    ):
        yield


def alone(log: Log, function: Callable[..., Any], *args: Any) -> Any:
    """What a function of the suite returns on groups that have NCCL alone."""
    with nccl_alone():
        return function(log, *args)


def await_agreement() -> None:
    """Wait as long as it may take until this rank is told of a difference; raise it.

    Groups that wait for records in each call have been told.
    """
    states = list(group_state._GROUP_STATES.items())  # also of an earlier world
    late = [state for group, state in states if state.late and group_state._store_of(group)]
    end = time.monotonic() + TOLD
    while late and time.monotonic() < end and all(state.cause is None for state in late):
        time.sleep(0.01)
    for state in late:
        state.check()
