"""What runs on which stream of a GPU, in which order, and who uses memory that others still use.

Ops run one after another on a stream. What a stream knows of another is how many ops of that one
are complete before its own next one begins: a vector clock (Mattern, 1989). Two uses of the same
bytes, of which one writes, must be in an order; if not, there is a race.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dtensor_ring.compute import memory
from dtensor_ring.transport.transport import ProcessGroupTransport
from tests.test_fake_cuda_rings import fake_gpu
from tests.traffic import Traffic

CURRENT = "the current stream"
"""The one on which a call's ops are launched."""


class Use(NamedTuple):
    """Bytes of a storage that an op reads or writes."""

    storage: int
    begin: int
    end: int
    is_write: bool

    def clashes(self, other: Use) -> bool:
        overlap = self.begin < other.end and other.begin < self.end
        return overlap and (self.is_write or other.is_write)


class Happened(NamedTuple):
    """Something that the host did.

    Attributes:
        what: "launch", "post" a message, "wait" for it, "keep" its memory until a stream is where
            it is now, or the "loss" of its memory, which goes back to the allocator. A buffer has
            "take" and "free".
        stream: the stream that does it; of a message, its own.
        name: the name of an op.
        uses: what an op or a message reads and writes.
        message: the number of a message.
    """

    what: str
    stream: str
    name: str = ""
    uses: tuple[Use, ...] = ()
    message: int = -1


class Streams:
    """How far the streams are, and how far each knows the others to be."""

    def __init__(self) -> None:
        self._clocks: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._uses: dict[int, list[tuple[Use, str, int, str]]] = defaultdict(list)
        self._messages: dict[int, dict[str, int]] = {}
        self._safe: set[int] = set()  # messages
        self._free: set[int] = set()  # storages

    def do(self, happened: Happened) -> str | None:
        """Go on by one step; return the race that it makes, if any."""
        what, stream, name, uses, message = happened
        clock = self._clocks[stream]
        if what == "post":  # a message begins after what the current stream has
            _join(clock, self._clocks[CURRENT])
        if what == "take":
            self._free -= {use.storage for use in uses}
        if what in ("post", "launch", "free", "take"):
            clock[stream] += 1
            self._messages[message] = dict(clock)
            races = [self._race(name or what, stream, use) for use in uses]
            if what == "free":
                self._free |= {use.storage for use in uses}
            return next(filter(None, races), None)
        sent = self._messages[message]
        if what == "wait":
            _join(clock, sent)
        if what == "loss":
            is_safe = message in self._safe or _knows(self._clocks[CURRENT], sent)
            return None if is_safe else "memory of a message in flight goes back to the allocator"
        if what == "keep" and _knows(clock, sent):
            self._safe.add(message)
        return None

    def _race(self, name: str, stream: str, use: Use) -> str | None:
        clock, before = self._clocks[stream], self._uses[use.storage]
        found = f"{name} uses memory that was given back" if use.storage in self._free else None
        for other, of, number, by in before:
            if of != stream and use.clashes(other) and clock[of] < number:
                found = f"{name} on {stream} uses memory that {by} on {of} may still use"
        before.append((use, stream, clock[stream], name))
        return found


def _join(clock: dict[str, int], other: dict[str, int]) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock[stream], number)


def _knows(clock: dict[str, int], other: dict[str, int]) -> bool:
    return all(clock[stream] >= number for stream, number in other.items())


def race_in(steps: Sequence[Happened], forgotten: int | None = None) -> str | None:
    """Return the first race of these steps, or of all but the one with that index."""
    streams = Streams()
    for index, step in enumerate(steps):
        if index != forgotten and (found := streams.do(step)):
            return found
    return None


class Message:
    """Messages that are in flight until something waits for them.

    Like NCCL's in torch 2.15, they do not keep the memory that they write to.
    """

    def __init__(self, trace: Trace, number: int, tensors: Sequence[Tensor]) -> None:
        self.number = number
        self.memory = [StorageWeakRef(x.untyped_storage()) for x in tensors]
        self._trace = trace

    def wait(self) -> None:
        """The current stream waits; on a CPU the host does."""
        self._trace.step("wait", message=self.number)


class Trace(Traffic):
    """Notes all ops and messages of a rank.

    Args:
        is_batched: whether the messages of a hop begin and end together, as NCCL's, on fake tensors
            of a GPU. If not, each is for itself, as gloo's, on tensors of a CPU.
    """

    def __init__(self, is_batched: bool) -> None:
        super().__init__()
        self.is_batched = is_batched
        self.steps: list[Happened] = []
        self._stream, self._num_messages = CURRENT, 0
        self._numbers: dict[int, int] = {}  # of storages, by address
        self._known: list[StorageWeakRef] = []  # so that no other storage gets the address
        self._messages: list[Message] = []

    def step(self, what: str, *how: Any, stream: str | None = None, **more: Any) -> None:
        """Note what the host does, by default on the current stream."""
        lost = [x for x in self._messages if any(ref.expired() for ref in x.memory)]
        self._messages = [x for x in self._messages if x not in lost]
        self.steps += [Happened("loss", CURRENT, message=x.number) for x in lost]
        self.steps.append(Happened(what, stream or self._stream, *how, **more))

    def count(self, name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        super().count(name, read, written)
        self.step("launch", name, self._used(read, written))

    def post(self, receives: Sequence[Tensor], sends: Sequence[Tensor]) -> Message:
        """Start messages. What arrives are zeros."""
        message = Message(self, self._num_messages, [*receives, *sends])
        # As if it had a stream of its own: NCCL's have one for all, which only adds to the order.
        stream, uses = f"message {message.number}", self._used(sends, receives)
        self.step("post", "a message", uses, stream=stream, message=message.number)
        self._num_messages += 1
        self._messages.append(message)
        with self.paused():
            for x in receives:
                x.zero_()
        return message

    def buffer(self, what: str, buffer: Tensor) -> None:
        """Take or free a buffer: whatever the current stream does next may write to it."""
        whole = Use(self._number(buffer), 0, buffer.untyped_storage().nbytes(), True)
        self.step(what, uses=(whole,))

    def keep(self, x: Tensor, stream: SideStream) -> None:
        """Keep memory from others until the stream is where it is now."""
        ref = StorageWeakRef(x.untyped_storage())
        for message in self._messages:
            if ref in message.memory:
                self.step("keep", stream=stream.name, message=message.number)

    @contextmanager
    def on(self, stream: SideStream) -> Iterator[None]:
        """Make a stream the current one."""
        self._stream, before = stream.name, self._stream
        yield
        self._stream = before

    def _number(self, x: Tensor) -> int:
        storage = x.untyped_storage()
        if storage._cdata not in self._numbers:
            self._known.append(StorageWeakRef(storage))
            self._numbers[storage._cdata] = len(self._numbers)
        return self._numbers[storage._cdata]

    def _used(self, read: Sequence[Tensor], written: Sequence[Tensor]) -> tuple[Use, ...]:
        sides = [(x, False) for x in read] + [(x, True) for x in written]
        return tuple(Use(self._number(x), *extent(x), writes) for x, writes in sides if x.numel())


def extent(x: Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, and the end of the last one."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    begin = x.storage_offset() * x.itemsize
    return begin, begin + (last + 1) * x.itemsize


class SideStream:
    """Another stream of a GPU, which knows nothing of the others."""

    def __init__(self, device: object = None) -> None:
        self.name = f"side stream {id(self)}"


class StreamGroup:
    """A process group of a rank whose messages are noted."""

    def __init__(self, trace: Trace, rank: int, size: int) -> None:
        self._trace, self._rank, self._size = trace, rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Message:
        return self._trace.post(tensors, [])

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Message:
        return self._trace.post([], tensors)


class TracedTransport(ProcessGroupTransport):
    """The process group's, which notes the buffers that go and come back."""

    def __init__(self, trace: Trace, rank: int, size: int) -> None:
        self.group = StreamGroup(trace, rank, size)
        super().__init__(self.group)  # type: ignore[arg-type]
        self._trace = trace

    def prepare(self, device: torch.device) -> None:
        """Connected."""

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        buffer = super().allocate(num_bytes, device)
        self._trace.buffer("take", buffer)
        return buffer

    def free(self, buffer: Tensor) -> None:
        self._trace.buffer("free", buffer)
        super().free(buffer)


@contextmanager
def traced(trace: Trace) -> Iterator[None]:
    """Note what runs here; see `Trace` for where."""

    def batch(operations: list[tuple[Any, Tensor]]) -> list[Message]:
        receives, sends = ([x for what, x in operations if what is of] for of in SIDES)
        return [trace.post(receives, sends)]

    with (
        fake_gpu(trace) if trace.is_batched else nullcontext(),
        # Indices of columns would be fake, too.
        patch.object(memory, "listed", lambda cols: [x for at in cols.spans for x in range(*at)]),
        # The checks of real operations know no group but real ones.
        patch.multiple(dist, P2POp=lambda what, flat, **_: (what, flat), batch_isend_irecv=batch),
        patch.multiple(torch.cuda, Stream=SideStream, stream=trace.on),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        patch.object(Tensor, "record_stream", lambda x, stream: trace.keep(x, stream)),
        torch.no_grad(),
        trace,
    ):
        yield


SIDES = dist.irecv, dist.isend
