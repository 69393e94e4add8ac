"""The transport of one call. It checks that ranks agree, and turns failures into `RingError`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_ring.agreement.call_record import (
    MAX_PAYLOAD,
    MAX_QUOTED,
    NO_CALL_SITE,
    CallRecord,
    RecvBuffer,
    RingError,
    bytes_of,
    difference_text,
    flat,
    reason_of,
)
from dtensor_ring.agreement.group_state import RENEW, WATCH, GroupState, group_state_of
from dtensor_ring.agreement.late_records import LateRecords, PostedCall, time_limit_of
from dtensor_ring.compute.trace import Label
from dtensor_ring.transport.transport import (
    P2P,
    Chain,
    ProcessGroupTransport,
    Transport,
    Work,
    transport_of,
)


class MessageOwner(Protocol):
    """The call that messages belong to."""

    def waiting_for(self, message: P2P) -> str:
        """Describe a wait of this rank for a message."""

    def failed(self, error: RuntimeError, message: P2P | None, seconds: float) -> RingError:
        """Return the error of a message that failed after a wait of `seconds`."""

    def check_record(self, received: RecvBuffer, peer: int) -> None:
        """Compare this rank's call record with another rank's, which content may follow."""


class PendingWork:
    """A message in flight; if it fails, `wait` raises `RingError`."""

    __slots__ = ("_call", "_message", "_work", "has_arrived")  # one for each message

    def __init__(self, call: MessageOwner, work: Work, message: P2P) -> None:
        self._call, self._work, self._message = call, work, message
        self.has_arrived = False

    def __str__(self) -> str:
        return self._call.waiting_for(self._message)

    def wait(self) -> None:
        # More than one caller may wait for a message, and a finished one must not wait again.
        if self.has_arrived:
            return
        since = time.monotonic()
        try:
            WATCH.wait(self, since, self._work)
        except RuntimeError as error:
            seconds = time.monotonic() - since
            raise self._call.failed(error, self._message, seconds) from error
        self.has_arrived = True


class RecordWork(PendingWork):
    """A message that begins with another rank's call record, which must equal this rank's."""

    __slots__ = ("_flat", "_record_bytes", "_recv_buffer")

    def __init__(
        self, call: MessageOwner, work: Work, message: P2P, recv_buffer: RecvBuffer
    ) -> None:
        super().__init__(call, work, message)
        self._recv_buffer = recv_buffer
        self._flat: Tensor | None = None
        self._record_bytes = 0

    def copy_payload_to(self, flat: Tensor, record_bytes: int) -> None:
        """Copy what follows a record of `record_bytes` bytes to this tensor once it arrives."""
        self._flat, self._record_bytes = flat, record_bytes

    def wait(self) -> None:
        if self.has_arrived:
            return
        super().wait()
        self._call.check_record(self._recv_buffer, self._message.peer)
        if self._flat is not None:
            content = bytes_of(self._flat)
            # `check_record` has passed, so the record of the peer has the same size as this rank's.
            content[:] = self._recv_buffer.payload(self._record_bytes, len(content))


TransportContext = AbstractContextManager[Transport]


def checked_transport(
    group: dist.ProcessGroup,
    record: CallRecord,
    direction: str,
    device: torch.device,
    forward_call: int = 0,
    call_site: tuple[str, str, str] = NO_CALL_SITE,
    first_bytes: int | None = None,
    chain: Chain | None = None,
    transport: Transport | None = None,
) -> TransportContext:
    """Return a context manager that yields the transport for one call over a group.

    Args:
        group: the group of the ring.
        record: the record of the call.
        direction: what the ranks do, one of the values of `RingError.direction`.
        device: the device of the call's tensors.
        forward_call: the number of the forward call that a backward call belongs to; 0 if not
            known.
        call_site: the place of the call, as far as it is known, see `CallSite`.
        first_bytes: the bytes of a message of the first hop, if all ranks send to all: records may
            carry them. 0 sends the records to all ranks, without messages.
        chain: given if records and messages go along a line of ranks.
        transport: of the group, where the caller has looked it up.
    """
    state, transport = group_state_of(group), transport or transport_of(group)
    if not state.sends_records:
        return nullcontext(transport)
    keeps_tags = transport.keeps_tags(device)
    is_small = first_bytes is not None and first_bytes <= MAX_PAYLOAD
    is_plain = keeps_tags and type(transport) is ProcessGroupTransport
    piggybacks = is_small and (is_plain or not first_bytes)
    if state.late is not None and not keeps_tags:
        piggybacks = False  # the host does not wait for records, so they can carry nothing
    return CheckedTransport(
        group,
        state,
        transport,
        keeps_tags,
        record=record,
        direction=direction,
        forward_call=forward_call,
        call_site=call_site,
        piggybacks=piggybacks,
        chain=chain,
    )


class CheckedTransport(Transport):
    """The transport of one call, see Note [Agreement]. As a context, it begins and ends it."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        state: GroupState,
        transport: Transport,
        keeps_tags: bool,
        record: CallRecord,
        direction: str,
        forward_call: int,
        call_site: tuple[str, str, str],
        piggybacks: bool = False,
        chain: Chain | None = None,
    ) -> None:
        self._group, self._state, self._transport = group, state, transport
        # Buffers are the transport's own, without a call in between.
        self.allocate, self.free = transport.allocate, transport.free
        if keeps_tags:  # they separate calls, so nothing comes before its preparation
            self.prepare = transport.prepare
        self._record, self._forward_call, self._call_site = record, forward_call, call_site
        self._direction, self._chain = direction, chain
        self._may_carry = self._piggybacks = piggybacks
        self._place = group.rank(), group.size()
        self._step: int | None = None
        self._number = self._tag = 0
        self._phase = 0  # calls of `at`: equal on two ranks if they started the same messages
        self._posts: list[tuple[RecvBuffer, P2P]] = []
        self._record_works: list[PendingWork] = []
        self._peer_records: dict[int, RecordWork] = {}  # by peer
        # Records go by the process group, whatever transport moves the other messages.
        own = state.record_group
        is_plain = own is None and type(transport) is ProcessGroupTransport
        by: Any = group if own is None else own
        self._record_transport = transport if is_plain else ProcessGroupTransport(by)
        # The host must not wait for a device's messages, see Note [Late records].
        self._is_late = state.late is not None and not keeps_tags
        self._in_flight: list[PendingWork] = []

    def again(self, layer: str) -> None:
        """Prepare for the next call, which has the same record, and is made by that layer."""
        line, _, placements = self._call_site
        self._call_site = line, layer, placements
        self._step, self._phase, self._piggybacks = None, 0, self._may_carry

    def __enter__(self) -> Self:
        state = self._state
        try:
            self._number = state.begin()
        except RingError as error:
            if state.cause is None:  # two threads: the other one's call must end, too
                self._shut_down(str(error))
            raise
        try:
            self._mine = self._record.message(self._number, self._forward_call, self._call_site)
            self._tag = self._record.tag(self._number, self._forward_call)
            if self._chain is not None:
                self._tag = self._chain.tag
            if state.late is not None:
                self._post(state.late)
            if not self._is_late:
                self._receive_records()
                if not self._piggybacks:
                    self._send_record()
        # The group is held since `begin`: without this, the next call would be refused as that of
        # another thread.
        except BaseException:
            state.end()
            raise
        return self

    def _post(self, late: LateRecords) -> None:
        """Post the record of this call, whether or not the host waits for records, too."""
        late.post(
            PostedCall(
                record=self._record,
                number=self._number,
                forward_call=self._forward_call,
                call_site=self._call_site,
                direction=self._direction,
                since=time.monotonic(),
            )
        )
        self._state.check()  # the previous rank may have left before this call

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._agree()  # a rank without messages has not agreed yet
                self._state.check()  # another thread may have been in the way
            elif not isinstance(error, RingError):
                self._raised(error)
        finally:
            # Break the cycle, or buffers and the group live until the next garbage collection.
            self._record_works, self._peer_records, self._in_flight = [], {}, []
            self._state.end()

    def prepare(self, device: torch.device) -> None:
        self._agree()  # without tags, messages of different calls could match
        self._transport.prepare(device)

    def at(self, label: Label) -> None:
        self._step = label.step
        self._phase += 1

    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        is_carried = self._piggybacks
        if is_carried:
            for message in receives:
                self._peer_records[message.peer].copy_payload_to(message.flat, len(self._mine))
            self._send_record(sends)
        # The caller waits for records first, before it uses any data of a peer.
        record_works, self._record_works = self._record_works, []
        if is_carried:
            return record_works
        # The loops set no tags: what they send belongs to this call, see Note [Agreement].
        tag = self._tag
        receives = [P2P(x.flat, x.peer, tag, x.source) for x in receives]
        sends = [P2P(x.flat, x.peer, tag, x.source) for x in sends]
        messages = receives + sends
        # NCCL returns one work for all messages of a hop: its error names the first message.
        first = messages[0] if messages else None
        started = self._started(first, self._transport.start, receives, sends)
        works = zip(started, messages, strict=False)
        sent = [PendingWork(self, work, message) for work, message in works]
        self._in_flight = [x for x in self._in_flight if not x.has_arrived] + sent
        return record_works + sent

    def _receive_records(self) -> None:
        """Post the receives of other ranks' records."""
        if not self._posts:  # equal calls of other layers receive the same way
            for index, peer in enumerate(self._neighbours(-1)):
                recv_buffer = self._state.recv_buffer(index)
                self._posts.append((recv_buffer, P2P(recv_buffer.flat, peer)))
        for recv_buffer, message in self._posts:
            work = self._started(message, self._record_transport.receive_record, message)
            self._peer_records[message.peer] = RecordWork(self, work, message, recv_buffer)
        self._in_flight = [*self._peer_records.values()]

    def _neighbours(self, side: int) -> list[int]:
        """Return the ranks that this rank sends its record to (1), or receives one from (-1)."""
        rank, size = self._place
        if self._chain is not None:
            peer = rank + side * self._chain.step
            return [peer] if 0 <= peer < size else []
        # A record that carries messages goes to all ranks; others go to the next rank.
        if self._piggybacks:
            return [*range(rank + 1, size), *range(rank)]
        return [(rank + side) % size]

    def _send_record(self, carried: Sequence[P2P] = ()) -> None:
        """Send the record to its receivers, followed by the message that it carries to each."""
        # A record that carries messages goes to the ranks that this one hears from: all others.
        peers = self._peer_records if self._piggybacks else self._neighbours(1)
        self._piggybacks = False
        payloads, joined = {x.peer: x.flat for x in carried}, dict[int, Tensor]()
        sent = []
        for peer in peers:
            payload = payloads.get(peer)
            if id(payload) not in joined:  # a tensor for several peers is joined once
                more = b"" if payload is None else bytes_of(payload).data
                joined[id(payload)] = flat(self._mine + more)
            message = P2P(joined[id(payload)], peer)
            work = self._started(message, self._record_transport.send_record, message)
            sent.append(PendingWork(self, work, message))
        self._in_flight += sent
        self._record_works = [*self._peer_records.values(), *sent]

    def _started(self, message: P2P | None, start: Callable[..., Any], *given: Any) -> Any:
        """Start messages, of which this is the first, which an error of the backend names."""
        try:
            return start(*given)
        except torch.OutOfMemoryError:  # not caused by a message
            raise
        except RuntimeError as error:
            raise self.failed(error, message, 0.0) from error

    def _agree(self) -> None:
        """Wait for the records, unless `start` has returned them to the caller."""
        # Ranks compare beside the devices, see Note [Late records]; the host waits if it is strict.
        if self._is_late:
            if self._state.is_strict:
                self._state.confirm(self._group)
            return
        if self._piggybacks:
            self._send_record()  # no message was started that the record could carry
        record_works, self._record_works = self._record_works, []
        for work in record_works:
            work.wait()

    def check_record(self, received: RecvBuffer, peer: int) -> None:
        """Compare this rank's call record with another rank's.

        Raises:
            RingError: if they differ; it names the fields.
        """
        # Equal bytes are the rule, and nothing is parsed for them.
        if received.begins_with(self._mine):
            return
        ranks, rank = self._state.ranks, self._group.rank()
        there = ranks[peer]
        text = difference_text(self._mine, received.record, ranks[rank], there)
        if not text:
            return
        # Other ranks wait for messages of this call: they have to learn why it ends.
        self._shut_down(text)
        raise self._error(text, peer=there)

    def failed(self, error: RuntimeError, message: P2P | None, seconds: float) -> RingError:
        """Return the error of a message that failed after a wait of `seconds`."""
        peer = None if message is None else self._state.ranks[message.peer]
        text = (
            f"{self._here()} got no answer of rank {peer} within {seconds:.2f} s, {self._where()}: "
            f"{reason_of(error, seconds, time_limit_of(self._group).total_seconds())}"
        )
        # Another rank may have failed first, and this wait may only follow from it.
        cause = self._shut_down(text)
        text = text if cause == text else f"{text}; the first cause: {cause}"
        source = None if message is None else message.source
        return self._error(text, peer, source=source, seconds=seconds)

    def waiting_for(self, message: P2P) -> str:
        """Describe a wait of this rank for a message, for a warning."""
        ranks = self._state.ranks
        of = f"of the ring {list(ranks)}"
        return f"{self._here()} waits for rank {ranks[message.peer]} {of}, {self._where()}"

    def _raised(self, error: BaseException) -> None:
        """Shut the group down after an error, unless all ranks raised at the same point."""
        # If all ranks raise, as for a wrong argument, the group is sound, and a user who catches
        # the error goes on with it. If only some do, the others wait for what never comes.
        # An interrupt is no `Exception`: it may come at any point, and must not wait.
        if isinstance(error, Exception) and self._state.failure_store(self._group).all_raised(
            f"call {self._number}, {self._phase}"
        ):
            # All ranks have started the same messages, so these arrive and the group stays usable.
            with suppress(RingError):  # a failure here has shut the group down
                if self._piggybacks:
                    self._send_record()  # all ranks have posted receives
                for message in self._in_flight:
                    message.wait()
            return
        quoted = f"{type(error).__name__}: {error}"[:MAX_QUOTED]
        self._shut_down(f"{self._here()} raised, {self._where()}: {quoted}")

    def _shut_down(self, text: str) -> str:
        """Close the group, so no rank waits for this one, and return the first cause."""
        return self._state.shut_down(text, self._group, self._transport, self._record_transport)

    def _here(self) -> str:
        return f"rank {self._state.ranks[self._group.rank()]}"

    def _where(self) -> str:
        step = "before its first step" if self._step is None else f"step {self._step}"
        return f"in {self._direction}, {step}"

    def _error(self, text: str, peer: int | None, **place: Any) -> RingError:
        ranks = self._state.ranks
        text = f"{text}. The group of the ring {list(ranks)} is shut down: {RENEW}"
        place |= {"direction": self._direction, "step": self._step, "peer": peer}
        return RingError(text, ring=ranks, **place)
