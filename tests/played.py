"""All ranks of a ring in one process, one thread each: their messages are copies.

So a ring of any size runs on one GPU, where its ranks take turns.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Event, Lock
from typing import TypeVar

import torch
from torch import Tensor

from dtensor_ring.transport.transport import P2P, Transport, Work

Result = TypeVar("Result")
TIMEOUT = 300
"""Seconds for the other side of a message to be posted."""
MOST_RANKS = 64
"""All of a ring run at once."""


class Side:
    """A message: whichever side is posted last makes the copy, on the stream of its thread."""

    def __init__(self, posted: Tensor, is_send: bool) -> None:
        self.is_send = is_send
        self.error: BaseException | None = None
        self._posted = posted
        self._done = Event()

    def complete(self, other: Tensor) -> None:
        source, target = (self._posted, other) if self.is_send else (other, self._posted)
        if (source.dtype, source.numel()) != (target.dtype, target.numel()):
            self.fail(ValueError(f"{_what(source)} was sent where {_what(target)} was expected"))
            self.wait()
        target.copy_(source)
        self._done.set()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self._done.set()

    def wait(self) -> None:
        if not self._done.wait(TIMEOUT):
            raise TimeoutError("the other side of a message was never posted")
        if self.error is not None:
            raise RuntimeError("another rank failed") from self.error


def _what(flat: Tensor) -> str:
    return f"{flat.numel()} x {flat.dtype}"


class Links:
    """Where the threads of a ring meet."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting: dict[tuple[int, int], deque[Side]] = defaultdict(deque)
        self._error: BaseException | None = None

    def post(self, link: tuple[int, int], flat: Tensor, is_send: bool) -> Side:
        """One side of the next message from the first rank of the link to the second."""
        with self._lock:
            waiting = self._waiting[link]
            if waiting and waiting[0].is_send != is_send:
                transfer = waiting.popleft()
                transfer.complete(flat)
                return transfer
            waiting.append(Side(flat, is_send))
            if self._error is not None:
                waiting[-1].fail(self._error)
            return waiting[-1]

    def fail(self, error: BaseException) -> None:
        """Nobody waits any more for a rank that failed."""
        with self._lock:
            self._error = error
            for transfer in (x for waiting in self._waiting.values() for x in waiting):
                transfer.fail(error)


class PlayedTransport(Transport):
    """Messages of one rank to those in the other threads."""

    def __init__(self, links: Links, rank: int) -> None:
        self._links, self._rank = links, rank

    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        post, rank = self._links.post, self._rank
        received = [post((x.peer, rank), x.flat, False) for x in receives]
        return received + [post((rank, x.peer), x.flat, True) for x in sends]


_IDLE: list[ThreadPoolExecutor] = []


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """Threads of earlier plays: torch sets up what is a new thread's own, which takes its time."""
    threads = _IDLE.pop() if _IDLE else ThreadPoolExecutor(MOST_RANKS)
    try:
        yield threads
    finally:
        _IDLE.append(threads)


def play(world_size: int, run: Callable[[int, PlayedTransport], Result]) -> list[Result]:
    """What `run(rank, transport)` returns on each rank.

    Raises:
        BaseException: what the first rank raised that failed.
    """
    links = Links()

    def of_rank(rank: int) -> Result:
        try:
            with torch.no_grad():
                return run(rank, PlayedTransport(links, rank))
        except BaseException as error:
            links.fail(error)
            raise

    with _threads() as threads:
        futures = [threads.submit(of_rank, rank) for rank in range(world_size)]
        wait(futures)
    errors = [error for error in (future.exception() for future in futures) if error]
    for error in sorted(errors, key=lambda error: isinstance(error, RuntimeError)):
        raise error.__cause__ or error
    return [future.result() for future in futures]
