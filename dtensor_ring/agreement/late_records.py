"""Call records that the host does not wait for: ranks compare them while the devices compute."""

from __future__ import annotations

import logging
import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from threading import Condition, Event, Thread, current_thread
from typing import Any, NamedTuple
from zlib import crc32

import torch.distributed as dist

from dtensor_ring.agreement import call_record
from dtensor_ring.transport.transport import LATE_TAG, ProcessGroupTransport

_LOG = logging.getLogger("dtensor_ring")

# Whether the text follows, and the last message of a rank that ends, or destroys its group.
_HASH, _TEXT, _GOODBYE = 0, 1, 2


class PostedCall(NamedTuple):
    """A call of this rank, with the arguments of `CallRecord.message`.

    Attributes:
        record: the record of the call.
        number: the number of the call, counted on its group.
        forward_call: the number of the forward call that a backward call belongs to, or 0.
        call_site: the call site, see `CallSite`.
        direction: what the ranks do, see `RingError.direction`.
        since: when it began, by `time.monotonic`.
    """

    record: call_record.CallRecord
    number: int
    forward_call: int
    call_site: tuple[str, str, str]
    direction: str
    since: float

    def __str__(self) -> str:
        line = f", {self.call_site[0]}" if self.call_site[0] else ""
        return f"in {self.direction}, call {self.number:,} of the group{line}"

    @property
    def header(self) -> Header:
        """The header; a part of the call site that is not known is 0 there."""
        line, layer, placements = (
            (crc32(text.encode()) or 1) if text else 0 for text in self.call_site
        )
        return Header(
            what=_HASH,
            number=self.number,
            forward_call=self.forward_call,
            digest=self.record.digest,
            line=line,
            layer=layer,
            placements=placements,
        )

    @property
    def text(self) -> bytearray:
        """The whole record."""
        return self.record.message(self.number, self.forward_call, self.call_site)


class Header(NamedTuple):
    """What two ranks compare of a call.

    >>> one = Header(_HASH, 7, 3, 99, 0, 5, 6)
    >>> one.agrees_with(one._replace(line=4)), one.agrees_with(one._replace(digest=98))
    (True, False)
    """

    what: int
    number: int
    forward_call: int
    digest: int
    line: int
    layer: int
    placements: int

    @property
    def kind(self) -> tuple[int, ...]:
        """All but the numbers: calls of one kind have the same text."""
        return self[3:]

    def agrees_with(self, other: Header) -> bool:
        """Return whether both are the same call; an unknown part of the call site equals any."""
        sites = zip(self[4:], other[4:], strict=True)
        return self[1:4] == other[1:4] and all(x == y or not (x and y) for x, y in sites)


class Failed(NamedTuple):
    """Why the calls of a group end.

    Attributes:
        text: the cause, for an error.
        direction: of the call, see `RingError.direction`; empty without one.
        peer: the global rank of the previous rank of the ring.
    """

    text: str
    direction: str
    peer: int


# The fields of `Header`, and their size in bytes.
_HEADER, _HEADER_BYTES = "<BQQQIII", 37

# Gloo has no wait without a limit, so a receive that may stand for long has this one, in days.
_FOREVER = 365

# How long a rank that ends waits for its last message to leave, and for a thread, in seconds.
GOODBYE_TIMEOUT = 1.0


# Note [Late records]: on a GPU the host runs ahead of the device, so it must not wait for another
# rank. A call of such a group puts its record into a queue and goes on. One thread sends the
# records to the next rank of the ring. Another thread always has a receive posted for the next
# record of the previous rank: it compares what arrives, and it notices if that rank dies or gives
# up. On a difference, or a closed connection, it stores the first cause, aborts the group's own
# messages, so that no device waits for one that never comes, and closes its connections. So the
# rank after it notices, too, and so on around the ring. The host raises at its next call, or wait,
# of the group.
#
# Two calls, of which the host waits for nothing:
#
#     host of rank r            post 7 | post 8 | ...
#     its sender                       | send 7 | send 8
#     receiver of rank r + 1                    | compare 7 | compare 8
#
# A record has `_HEADER` only, if the same kind of call was made before: digest, call site, and the
# two numbers. The first time the text follows, which names what differs. Both ranks keep the last
# `MAX_KINDS` kinds, in the order in which they were sent, so they know the same ones.
class LateRecords:
    """Sends the records of this rank, and compares those of the previous one.

    Args:
        group: the gloo group that the records go by, see Note [Record group].
        ranks: its global ranks.
        fail: called once, in a thread, if ranks differ or a connection is lost. It must call
            `abort`.
    """

    def __init__(
        self, group: dist.ProcessGroupGloo, ranks: tuple[int, ...], fail: Callable[[Failed], None]
    ) -> None:
        self._group: Any = group  # torch's stubs lack `send` and `recv` of backends
        self._ranks, self._fail = ranks, fail
        rank, size = group.rank(), group.size()
        self._rank, self._next, self._previous = rank, (rank + 1) % size, (rank - 1) % size
        self._queue: SimpleQueue[tuple[PostedCall, Header | None] | None] = SimpleQueue()
        self._unconfirmed: dict[int, PostedCall] = {}  # by number
        self._early: dict[int, Header] = {}  # of calls that this rank has not begun, by number
        self._sent: dict[tuple[int, ...], bool] = {}
        self._texts: dict[tuple[int, ...], bytes] = {}
        self._changed = Condition()
        self._num_posted = 0
        self._last_of_previous: int | None = None
        self._is_closed, self._pid = False, os.getpid()
        self._says_goodbye, self._said_goodbye = False, Event()
        works = self._send_all, self._receive_all
        self._threads = [Thread(target=x, name="dtensor_ring records", daemon=True) for x in works]
        for thread in self._threads:
            thread.start()

    def post(self, call: PostedCall) -> None:
        """Send a record and go on; calls are posted in the order of their numbers."""
        # The record of the previous rank may have come first; then the two are compared at once.
        with self._changed:
            self._num_posted = call.number
            theirs = self._early.pop(call.number, None)
            self._unconfirmed[call.number] = call
            # A rank that left can never make this call: waiting for it would be a hang.
            has_left = self._last_of_previous is not None and call.number > self._last_of_previous
        self._queue.put((call, theirs))
        if has_left:
            self._end_as_left(call)

    def confirm(self, seconds: float) -> bool:
        """Wait until the previous rank has confirmed all calls so far.

        Returns:
            Whether it did within so many seconds, and nothing failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not self._unconfirmed, seconds)
            return not (self._is_closed or self._unconfirmed)

    def check_time(self, now: float, seconds: float) -> None:
        """Fail if a call has waited for its record for longer than that.

        Args:
            now: by `time.monotonic`.
            seconds: the time limit of the group.
        """
        call = next(iter(list(self._unconfirmed.values())), None)
        if call is not None and now - call.since > seconds:
            limit = RuntimeError(f"timed out after {seconds:.0f} s")
            self._lost(limit)

    def close(self) -> None:
        """Tell the next rank that no call follows, close the connections, and end the threads."""
        if os.getpid() != self._pid:  # a forked process shares the connections, but not the threads
            return
        if not self._is_closed:
            self._is_closed = self._says_goodbye = True
            self._queue.put(None)
            self._said_goodbye.wait(GOODBYE_TIMEOUT)
        self.abort()
        for thread in self._threads:
            # A thread that comes back from gloo after the interpreter has ended aborts the process.
            if thread is not current_thread():
                thread.join(GOODBYE_TIMEOUT)

    def abort(self) -> None:
        """Close the connections of this rank: its threads end, and those of other ranks notice."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._queue.put(None)
        ProcessGroupTransport(self._group).abort()

    def _send_all(self) -> None:
        while (posted := self._queue.get()) is not None:
            call, theirs = posted
            try:
                self._send(self._message(call))
            except RuntimeError:
                # The next rank may have made its last call and left, which is no failure. If it
                # died, the rank after it notices, and so on around the ring.
                break
            if theirs is not None:
                self._compare(call, theirs)
        if self._says_goodbye:  # a rank that fails must not: the next one would wait in peace
            with suppress(RuntimeError):  # the next rank may have ended before
                goodbye = struct.pack(_HEADER, _GOODBYE, self._num_posted, 0, 0, 0, 0, 0)
                # To a rank that closes now, gloo may send for ever.
                self._send(goodbye, GOODBYE_TIMEOUT)
            self._said_goodbye.set()

    def _send(self, message: bytes, seconds: float = 0.0) -> None:
        # The next record starts after this one has arrived, so records keep their order.
        # Gloo takes a limit of 0 seconds for that of the group.
        limit = timedelta(seconds=seconds)
        # The thread keeps the message until it has left. The host does not wait for this.
        self._group.send([call_record.flat(bytearray(message))], self._next, LATE_TAG).wait(limit)

    def _message(self, call: PostedCall) -> bytes:
        header = call.header
        text = b""
        if header.kind not in self._sent:
            _keep(self._sent, header.kind, True)
            header, text = header._replace(what=_TEXT), call.text
        return struct.pack(_HEADER, *header) + text

    def _receive_all(self) -> None:
        buffer = bytearray(_HEADER_BYTES + call_record.MAX_BYTES)
        memory = call_record.flat(buffer)
        while True:
            try:
                self._group.recv([memory], self._previous, LATE_TAG).wait(timedelta(days=_FOREVER))
            except RuntimeError as error:
                self._lost(error)
                return
            header = Header._make(struct.unpack_from(_HEADER, buffer))
            # A rank that ends says so: silence would look like a failure.
            if header.what == _GOODBYE:
                self._leave(header.number)
                return
            # A record's text comes once, with the first call of its kind.
            if header.what == _TEXT:
                _keep(self._texts, header.kind, bytes(buffer[_HEADER_BYTES:]))
            self._take(header)

    def _take(self, theirs: Header) -> None:
        """Compare a record that arrived, or keep it until this rank makes the call."""
        with self._changed:
            call = self._unconfirmed.get(theirs.number)
            if call is None:
                self._early[theirs.number] = theirs
        if call is not None:
            self._compare(call, theirs)

    def _compare(self, call: PostedCall, theirs: Header) -> None:
        if call.header.agrees_with(theirs):
            with self._changed:
                self._unconfirmed.pop(call.number, None)
                self._changed.notify_all()
            return
        text = self._texts.get(theirs.kind, b"")
        here, there = self._ranks[self._rank], self._ranks[self._previous]
        # The text is of an earlier call of its kind, so its numbers are replaced.
        theirs_text = call_record.renumbered(text, theirs.number, theirs.forward_call)
        listed = call_record.difference_text(call.text, theirs_text, here, there)
        self._end(f"{listed}, {call}", call)

    def _leave(self, last: int) -> None:
        """Note that the previous rank makes no call after that number."""
        with self._changed:
            self._last_of_previous = last
            late = [call for number, call in self._unconfirmed.items() if number > last]
        if late:
            self._end_as_left(late[0])

    def _end_as_left(self, call: PostedCall) -> None:
        here, there = self._ranks[self._rank], self._ranks[self._previous]
        text = (
            f"rank {here} got no answer of rank {there}, {call}: it ended, or destroyed its group, "
            f"after call {self._last_of_previous:,}"
        )
        self._end(text, call)

    def _lost(self, error: RuntimeError) -> None:
        """Fail, as the connection to the previous rank does, or its record is late."""
        call = next(iter(list(self._unconfirmed.values())), None)
        here, there = self._ranks[self._rank], self._ranks[self._previous]
        where = f"after call {self._num_posted:,} of the group" if call is None else str(call)
        waited = 0.0 if call is None else time.monotonic() - call.since
        text = f"rank {here} got no answer of rank {there} within {waited:.2f} s, {where}: "
        self._end(text + call_record.reason_of(error), call)

    def _end(self, text: str, call: PostedCall | None) -> None:
        """Report the first failure; those that follow from it are none."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        direction = "" if call is None else call.direction
        self._fail(Failed(text, direction, self._ranks[self._previous]))


# How many kinds of calls a rank keeps; each takes at most 2 KiB.
MAX_KINDS = 256


def _keep(kinds: dict[tuple[int, ...], Any], kind: tuple[int, ...], value: Any) -> None:
    """Add a kind, and drop the oldest if there are too many."""
    kinds[kind] = value
    if len(kinds) > MAX_KINDS:
        del kinds[next(iter(kinds))]


def has_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether the group sends CPU tensors by gloo; groups of NCCL alone do not."""
    return "gloo" in _backends(group, "cpu")


def has_late_messages(group: dist.ProcessGroup) -> bool:
    """Return whether the group has a backend like NCCL: no tags, and the host does not wait."""
    return bool(_backends(group) - {"gloo", "fake"})


def _backends(group: dist.ProcessGroup, device_type: str | None = None) -> set[str]:
    """Return the names of the backends that a group has, for all devices or for one type."""
    names = set()
    for device in group._device_types:
        try:
            if device_type in (None, device.type):
                names.add(group._get_backend(device).name())
        except RuntimeError:  # none for this device
            continue
    return names


def time_limit_of(group: dist.ProcessGroup) -> timedelta:
    """Return how long the group waits for a message."""
    for device in group._device_types:
        try:
            return group._get_backend(device).options._timeout
        except (RuntimeError, AttributeError):  # no backend, or one without options
            continue
    return dist.constants.default_pg_timeout


# The time limit to connect once all ranks are there, in seconds.
CONNECT_TIMEOUT = 30.0


# Note [Record group]: NCCL moves tensors of GPUs only, and ignores tags. So the ranks of such a
# group make a second one of gloo, over the store of the first. It is not registered with
# `torch.distributed`: it has no name that could differ between ranks, and `destroy_process_group`
# does not know it. It lives as long as the `GroupState`. All ranks make it, or none: a rank that
# cannot says so in the store before any rank connects.
def make_record_group(
    group: dist.ProcessGroup, store: Any, epoch: int
) -> dist.ProcessGroupGloo | None:
    """Make a gloo group of the ranks of a group. All of them call this at the same point.

    Args:
        group: the group; this needs its ranks and its time limit only.
        store: the store of the group.
        epoch: of the group, see `epoch_of`.

    Returns:
        The group, or `None` on all ranks if one of them fails. Then one line is logged.
    """
    limit = time_limit_of(group)
    prefix = f"dtensor_ring/{epoch}/records"
    try:
        # Where gloo finds no network, this raises before the others wait for this rank.
        dist.ProcessGroupGloo.create_default_device()
        problem = ""
    except (RuntimeError, AttributeError) as error:
        problem = str(error)
    # All ranks come here, but one may load or compile something first.
    patience = max(limit.total_seconds(), CONNECT_TIMEOUT)
    if not _all_are_well(group, store, f"{prefix}/there", not problem, patience):
        return _not_compared(group, problem or "another rank has no gloo, or does not answer")
    made, connect = None, timedelta(seconds=CONNECT_TIMEOUT)
    try:
        made = dist.ProcessGroupGloo(
            dist.PrefixStore(prefix, store), group.rank(), group.size(), connect
        )
    except RuntimeError as error:
        problem = str(error)
    if not _all_are_well(group, store, f"{prefix}/made", made is not None, 2 * CONNECT_TIMEOUT):
        return _not_compared(group, problem or "another rank could not connect")
    assert made is not None, "this rank counts as well"
    made._set_default_timeout(limit)
    return made


# A rank that cannot take part adds this number instead of 1.
_FAILED = 1 << 20


def _all_are_well(
    group: dist.ProcessGroup, store: Any, key: str, is_well: bool, seconds: float
) -> bool:
    """Return whether all ranks arrive within that many seconds, and none of them failed."""
    end = time.monotonic() + seconds
    try:
        total = store.add(key, 1 if is_well else _FAILED)
        # A rank that fails need not be waited for by the others.
        while total < group.size() and time.monotonic() < end:
            time.sleep(0.005)
            total = store.add(key, 0)
    except RuntimeError:  # the store or its host is gone
        return False
    return total == group.size()


def _not_compared(group: dist.ProcessGroup, problem: str) -> None:
    ranks = dist.get_process_group_ranks(group)
    _LOG.warning(
        "the calls of ranks %s are not compared, and a rank that fails does not tell the others: "
        "no gloo group of them could be made (%s). Gloo needs a TCP connection between all of "
        "them; GLOO_SOCKET_IFNAME names the network interface",
        ranks,
        problem.splitlines()[0],
    )
