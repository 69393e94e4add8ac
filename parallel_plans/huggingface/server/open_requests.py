"""The requests that are open, on the side of HTTP: all of it runs on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from queue import SimpleQueue
from typing import NamedTuple

from parallel_plans.huggingface.server.engine import AskedTokens, EngineLook, SampleTokens

# Seconds after which a client may try again: most requests end within some seconds.
RETRY_AFTER = 1


class HttpError(Exception):
    """An error that a client is told, as OpenAI's clients expect it.

    Args:
        status: the HTTP status.
        message: what is wrong, and what is supported.
        param: the parameter that is wrong.
        code: a short name of the error.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        """Return the body of the answer."""
        kind = {429: "rate_limit_error"}.get(self.status, "invalid_request_error")
        kind = kind if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of the answer."""
        return {"Retry-After": str(RETRY_AFTER)} if self.status in (429, 503) else {}


class Arrived(NamedTuple):
    """What came for one choice of an answer, by its number."""

    index: int
    new: SampleTokens


class OpenRequests:
    """Brings requests to the engine, and its tokens to those who wait for them.

    Args:
        inbox: of the engine.
        limit: the largest number of samples that may be open at a time.

    Attributes:
        closed: why no requests are taken any more; `None` while they are.
        look: the last numbers of the engine.
    """

    def __init__(self, inbox: SimpleQueue[AskedTokens | str | None], limit: int) -> None:
        self._inbox, self._limit = inbox, limit
        self._waiting: dict[str, tuple[asyncio.Queue[Arrived], int]] = {}
        self.closed: HttpError | None = None
        self.look: EngineLook | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def check_open(self) -> None:
        """Check that requests are taken.

        Raises:
            HttpError: if the server stops, or has failed.
        """
        if self.closed is not None:
            raise self.closed

    def open(self, asks: Sequence[AskedTokens]) -> asyncio.Queue[Arrived]:
        """Return what will come for the samples of some prompts; number them in their order.

        Raises:
            HttpError: if there are too many, or the server stops.
        """
        self.check_open()
        names = [name for ask in asks for name in ask.sample_ids]
        if len(self) + len(names) > self._limit:
            raise HttpError(
                429,
                f"{len(self)} answers are open, {self._limit} may be, and this request asks for "
                f"{len(names)} more; try again later",
                code="rate_limit_exceeded",
            )
        queue: asyncio.Queue[Arrived] = asyncio.Queue()
        self._waiting |= {name: (queue, index) for index, name in enumerate(names)}
        for ask in asks:
            self._inbox.put(ask)
        return queue

    def cancel(self, name: str) -> None:
        """Cancel a sample, unless it ended."""
        if self._waiting.pop(name, None) is not None:
            self._inbox.put(name)

    def deliver(self, found: Sequence[SampleTokens], look: EngineLook | None) -> None:
        """Bring what a step has to those who wait for it."""
        self.look = look or self.look
        for new in found:
            place = self._waiting.get(new.sample_id)
            if place is None:
                continue  # it was cancelled
            if new.is_end:
                del self._waiting[new.sample_id]
            queue, index = place
            queue.put_nowait(Arrived(index, new))

    def close(self, status: int, message: str) -> None:
        """Take no more requests."""
        self.closed = self.closed or HttpError(status, message)

    def fail(self, status: int, message: str) -> None:
        """End all open requests by an error, and take no more."""
        self.closed = HttpError(status, message)
        ended = [SampleTokens(name, [], True, message, status) for name in self._waiting]
        self.deliver(ended, None)
