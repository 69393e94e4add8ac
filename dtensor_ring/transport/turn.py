"""The transport of one call, which agrees with the other ranks and says what fails."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_ring.compute.trace import Label
from dtensor_ring.transport.board import Board
from dtensor_ring.transport.error import RingError
from dtensor_ring.transport.process_group import ProcessGroupTransport, transport_of
from dtensor_ring.transport.protocol import P2P, Transport, Work
from dtensor_ring.transport.session import RENEW, Session, session_of
from dtensor_ring.transport.watch import WATCH
from dtensor_ring.transport.word import Word, differences, flat

LONGEST = 300
"""Characters of another error that a message quotes."""

Turns = AbstractContextManager[Transport]


def turn_of(
    group: dist.ProcessGroup,
    word: Word,
    direction: str,
    device: torch.device,
    origin: int = 0,
    place: str = "",
) -> Turns:
    """A context that gives the transport for one call over a group.

    Args:
        group: of the ring.
        word: what the call is.
        direction: "forward" or "backward".
        device: of the call's tensors.
        origin: number of the forward call that a backward call belongs to; 0 if not known.
        place: in the code of the caller; empty if not known.
    """
    session, transport = session_of(group), transport_of(group)
    if not session.has_words:
        return nullcontext(transport)
    keeps_tags = transport.keeps_tags(device)
    return Turn(group, session, transport, keeps_tags, word, direction, origin, place)


class Turn(Transport):
    """A call's transport: see the Note [Agreement]. As a context, it begins and ends the call."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        session: Session,
        transport: Transport,
        keeps_tags: bool,
        word: Word,
        direction: str,
        origin: int,
        place: str,
    ) -> None:
        self._group, self._session, self._transport = group, session, transport
        self._keeps_tags, self._word, self._origin, self._place = keeps_tags, word, origin, place
        self._direction = direction
        self._step: int | None = None
        self._number = self._tag = self._phase = 0
        self._words: list[Sent] = []
        self._in_flight: list[Sent] = []

    def __enter__(self) -> Self:
        session = self._session
        try:
            self._number = session.begin()
        except RingError as error:
            if session.cause is None:  # two threads: the call of the other one must end, too
                self._shut_down(str(error))
            raise
        try:
            self._send_word()
        except BaseException:
            session.end()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._agree()  # a rank without messages has not yet
                self._session.check()  # another thread may have been in the way
            elif not isinstance(error, RingError):
                self._raised(error)
        finally:
            # Else memory of messages, and the group, would live until a collection.
            self._words, self._in_flight = [], []
            self._session.end()

    def prepare(self, device: torch.device) -> None:
        if not self._keeps_tags:
            self._agree()  # else messages of calls that differ could meet
        self._transport.prepare(device)

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        return self._transport.allocate(num_bytes, device)

    def free(self, buffer: Tensor) -> None:
        self._transport.free(buffer)

    def at(self, label: Label) -> None:
        self._step = label.step
        self._phase += 1

    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        tag = self._tag
        receives, sends = (
            [P2P(x.flat, x.peer, tag, x.source) for x in side] for side in (receives, sends)
        )
        # Words are waited for first: before anything of a peer is used.
        words, self._words = self._words, []
        messages = receives + sends
        # NCCL has one work for all messages of a hop: an error of it is told of the first.
        with self._naming(messages[0] if messages else None):
            works = zip(self._transport.start(receives, sends), messages, strict=False)
        sent = [Sent(self, work, message) for work, message in works]
        self._in_flight = [x for x in self._in_flight if not x.has_arrived] + sent
        return words + sent

    def _send_word(self) -> None:
        """Start the exchange of words with both neighbours."""
        number, origin, rank = self._number, self._origin, self._group.rank()
        self._tag = self._word.tag(number, origin)
        self._mine = self._word.message(number, origin, self._place)
        self._theirs = bytearray(len(self._mine))
        theirs, mine = flat(self._theirs), flat(self._mine)
        peers = (rank - 1) % self._group.size(), (rank + 1) % self._group.size()
        messages = P2P(theirs, peers[0]), P2P(mine, peers[1])
        with self._naming(messages[0]):
            works = ProcessGroupTransport(self._group).pass_on(*messages)
        answer, sent = zip(works, messages, strict=True)
        self._words = [Answer(self, *answer), Sent(self, *sent)]
        self._in_flight = [*self._words]

    @contextmanager
    def _naming(self, message: P2P | None) -> Iterator[None]:
        """Tell errors of the backend as those of a message that was to be started."""
        try:
            yield
        except torch.OutOfMemoryError:  # no fault of a message
            raise
        except RuntimeError as error:
            raise self.failed(error, message, 0.0) from error

    def _agree(self) -> None:
        """Wait for the words, if nobody has."""
        words, self._words = self._words, []
        for word in words:
            word.wait()

    def check_word(self) -> None:
        """Compare this rank's word with that of the rank before it.

        Raises:
            RingError: naming what differs.
        """
        if self._mine == self._theirs:
            return
        differing = differences(self._mine, self._theirs)
        if not differing:
            return
        ranks, rank = self._session.ranks, self._group.rank()
        here, there = ranks[rank], ranks[rank - 1]
        listed = "; ".join(
            f"{name}: {mine} on rank {here}, {theirs} on rank {there}"
            for name, mine, theirs in differing
        )
        text = f"the ranks of a ring must make the same call, they differ in {listed}"
        self._shut_down(text)
        raise self._error(text, peer=there)

    def failed(self, error: RuntimeError, message: P2P | None, seconds: float) -> RingError:
        """The error of a message that did not get through, for which this rank had waited."""
        peer = None if message is None else self._session.ranks[message.peer]
        text = (
            f"{self._here()} got no answer of rank {peer} within {seconds:.2f} s, {self._where()}: "
            f"{_reason(error)}"
        )
        cause = self._shut_down(text)
        text = text if cause == text else f"{text}; the first cause: {cause}"
        source = None if message is None else message.source
        return self._error(text, peer, source, seconds)

    def waiting_for(self, message: P2P) -> str:
        """What a rank that waits for a message does, for a warning."""
        ranks = self._session.ranks
        of = f"of the ring {list(ranks)}"
        return f"{self._here()} waits for rank {ranks[message.peer]} {of}, {self._where()}"

    def _raised(self, error: BaseException) -> None:
        """Tell the other ranks, unless all of them raised at the same point."""
        # An interrupt comes at any point, and must not wait.
        if isinstance(error, Exception) and self._board().all_raised(
            f"call {self._number}, {self._phase}"
        ):
            # All have started the same messages: they arrive, and the group stays in order.
            with suppress(RingError):  # else it is shut down by now
                for message in self._in_flight:
                    message.wait()
            return
        quoted = f"{type(error).__name__}: {error}"[:LONGEST]
        self._shut_down(f"{self._here()} raised, {self._where()}: {quoted}")

    def _shut_down(self, text: str) -> str:
        """Close the group, so that no rank waits for this one; returns the first cause."""
        self._session.cause = self._board().first_cause(text)
        self._transport.abort()
        ProcessGroupTransport(self._group).abort()
        return self._session.cause

    def _board(self) -> Board:
        return Board(self._group, self._session.generation)

    def _here(self) -> str:
        return f"rank {self._session.ranks[self._group.rank()]}"

    def _where(self) -> str:
        step = "before its first step" if self._step is None else f"step {self._step}"
        return f"in {self._direction}, {step}"

    def _error(
        self, text: str, peer: int | None, source: int | None = None, seconds: float = 0.0
    ) -> RingError:
        ranks = self._session.ranks
        return RingError(
            f"{text}. The group of the ring {list(ranks)} is shut down: {RENEW}",
            ring=ranks,
            direction=self._direction,
            step=self._step,
            source=source,
            peer=peer,
            seconds=seconds,
        )


class Sent:
    """A message in flight, whose failure is an error of the ring."""

    __slots__ = ("_message", "_turn", "_work", "has_arrived")  # one for each message

    def __init__(self, turn: Turn, work: Work, message: P2P) -> None:
        self._turn, self._work, self._message = turn, work, message
        self.has_arrived = False

    def __str__(self) -> str:
        return self._turn.waiting_for(self._message)

    def wait(self) -> None:
        if self.has_arrived:
            return
        since = time.monotonic()
        WATCH.begin(self, since)
        try:
            self._work.wait()
        except RuntimeError as error:
            seconds = time.monotonic() - since
            raise self._turn.failed(error, self._message, seconds) from error
        finally:
            WATCH.end()
        self.has_arrived = True


class Answer(Sent):
    """The word of the rank before this one, which has to be that of this rank."""

    __slots__ = ()

    def wait(self) -> None:
        super().wait()
        self._turn.check_word()


def _reason(error: RuntimeError) -> str:
    """What an error of the backend means."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    quoted = f"({text[:LONGEST]})"
    if "timed out" in text.lower():
        return (
            "the time limit of the group is over, so that rank is stopped, cut off, elsewhere, or "
            f"slow; init_process_group(timeout=...) sets the limit {quoted}"
        )
    if any(word in text.lower() for word in ("closed", "closure", "reset", "broken pipe")):
        return f"its connection is closed, so it ended, or raised {quoted}"
    return quoted
