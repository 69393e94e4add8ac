"""Messages of a call in flight."""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torch import Tensor

from dtensor_ring.transport.error import RingError
from dtensor_ring.transport.inbox import Inbox
from dtensor_ring.transport.protocol import P2P, Work
from dtensor_ring.transport.watch import WATCH


class Call(Protocol):
    """The call that messages belong to."""

    def waiting_for(self, message: P2P) -> str:
        """What this rank does while it waits for a message."""

    def failed(self, error: RuntimeError, message: P2P | None, seconds: float) -> RingError:
        """The error of a message for which this rank had waited so long."""

    def check_word(self, theirs: bytearray, peer: int) -> None:
        """Compare this rank's word with that of another, which more may follow."""


class Sent:
    """A message in flight, whose failure is an error of the ring."""

    __slots__ = ("_call", "_message", "_work", "has_arrived")  # one for each message

    def __init__(self, call: Call, work: Work, message: P2P) -> None:
        self._call, self._work, self._message = call, work, message
        self.has_arrived = False

    def __str__(self) -> str:
        return self._call.waiting_for(self._message)

    def wait(self) -> None:
        if self.has_arrived:
            return
        since = time.monotonic()
        WATCH.begin(self, since)
        try:
            self._work.wait()
        except RuntimeError as error:
            seconds = time.monotonic() - since
            raise self._call.failed(error, self._message, seconds) from error
        finally:
            WATCH.end()
        self.has_arrived = True


class Answer(Sent):
    """A message that begins with the word of another rank, which has to be that of this rank."""

    __slots__ = ("_flat", "_inbox", "_word_bytes")

    def __init__(self, call: Call, work: Work, message: P2P, inbox: Inbox) -> None:
        super().__init__(call, work, message)
        self._inbox = inbox
        self._flat: Tensor | None = None
        self._word_bytes = 0

    def comes_to(self, flat: Tensor, word_bytes: int) -> None:
        """Let what follows a word of that size come to this tensor."""
        self._flat, self._word_bytes = flat, word_bytes

    def wait(self) -> None:
        if self.has_arrived:
            return
        super().wait()
        self._call.check_word(self._inbox.word, self._message.peer)
        if self._flat is not None:
            content = self._flat.view(torch.uint8)
            # A rank whose word had another size would have been told from this one above.
            content.copy_(self._inbox.carried(self._word_bytes, content.numel()))
