"""The transport of messages: its protocol, its buffers, and the process group's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Lock
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_ring.compute.trace import Label

MAX_SPARES = 5
"""Buffers of a backward pass: around the ring, two for shards, two for sums of gradients, and one
for a sum that returns to its owner; on the direct route, three for shards and two for sums."""


class BufferPool:
    """Keeps the last few buffers that were given back.

    Fresh memory costs a page fault every 4 KiB, which on a CPU is more than all else that a ring
    adds to its kernels. The allocators of other devices do this themselves. At most `MAX_SPARES`
    buffers are kept, each of the size of a key and value shard, or of their gradients.
    """

    def __init__(self) -> None:
        self._spares: list[Tensor] = []
        self._lock = Lock()  # backward may run in a thread of its own

    def take(self, num_bytes: int, device: torch.device) -> Tensor:
        """At least that many bytes, of any content."""
        with self._lock:
            fitting = [i for i, x in enumerate(self._spares) if x.numel() >= num_bytes]
            if device.type == "cpu" and fitting:
                # The smallest that fits: larger ones stay for larger messages.
                return self._spares.pop(min(fitting, key=lambda i: self._spares[i].numel()))
        with torch.inference_mode(False):  # else it could not be written to outside of that mode
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def give(self, buffer: Tensor) -> None:
        """Give a buffer back, once nothing reads or writes it."""
        if buffer.device.type == "cpu":
            with self._lock:
                self._spares.append(buffer)
                # The oldest go first: calls of another size may be over.
                del self._spares[:-MAX_SPARES]


BUFFERS = BufferPool()


class P2P(NamedTuple):
    """A flat tensor that goes to a peer, or comes from it; peers count along the axis.

    `source` is the rank on the axis whose shard it has columns of, and `tag` a number that both
    sides of a message have, and messages of other calls have not.
    """

    flat: Tensor
    peer: int
    tag: int = 0
    source: int | None = None


class Chain(NamedTuple):
    """Messages that go along the ranks and not around them, between two calls of one order."""

    step: int
    """1 to the next rank, -1 to the one before; the last and the first have no neighbour there."""
    tag: int
    """Of the messages: what one call sends, another one receives."""


class Work(Protocol):
    """A message in flight."""

    def wait(self) -> object:
        """Return once the next kernels may read or overwrite the message's tensor."""


class Transport(ABC):
    """Allocates the buffers of messages, and starts the messages of a hop.

    A subclass has to provide `start` only. One that wants registered memory (NCCL user buffers,
    symmetric memory) overrides `allocate` and `free`, too. Pass it as `SequenceAxis(transport=)`.

    >>> class Alone(Transport):
    ...     def start(self, receives, sends):
    ...         return []  # a ring of one rank has no messages
    >>> Alone().start([], [])
    []
    """

    def keeps_tags(self, device: torch.device) -> bool:
        """Whether messages of that device with other tags never meet; else ranks agree first."""
        return False

    def at(self, label: Label) -> None:  # noqa: B027 - most need not know
        """Every step of a loop begins with it, and goes on with it after each start of messages.

        Ranks that have been asked as often have started the same messages.
        """

    def abort(self) -> None:  # noqa: B027 - most are closed with the group
        """Let nobody wait for this rank any more: after an error, no call follows."""

    def prepare(self, device: torch.device) -> None:  # noqa: B027 - most have nothing to prepare
        """Get ready for tensors of that device; every rank calls it before a loop's first hop.

        Raises:
            ValueError: if this transport cannot move tensors of that device.
        """

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """A uint8 buffer of at least `num_bytes` bytes, with any content."""
        return BUFFERS.take(num_bytes, device)

    def free(self, buffer: Tensor) -> None:
        """Take back a buffer of `allocate` that no message and no kernel uses any more.

        It is not called for messages that an error left in flight.
        """
        BUFFERS.give(buffer)

    @abstractmethod
    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        """Start the messages of a hop; between two ranks they match in the order given here.

        Each `Work` keeps the tensor of its message alive until the message is complete.
        """


WORD_TAG, ABORT_TAG = 0x7FFF_FFFF, 0x7FFF_FFFE
"""Of messages that hold words, and of one that nobody sends; the others have smaller tags."""


class ProcessGroupTransport(Transport):
    """Point-to-point messages of `torch.distributed`, batched by hop."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def prepare(self, device: torch.device) -> None:
        """Connect the ranks: NCCL wants all of them in its first call, a hop may concern two.

        Raises:
            ValueError: if the tensors are on a GPU and the group is gloo's.
        """
        if device.type != "cuda" or self._group in _CONNECTED:
            return
        if self._group._get_backend(device).name() == "gloo":
            raise ValueError(
                "the tensors are on CUDA and their group is gloo's, which sends those of CPUs "
                'only; init_process_group("nccl"), or "cpu:gloo,cuda:nccl"'
            )
        # Any collective of all ranks connects them; this one is small.
        dist.all_reduce(torch.zeros(1, device=device), group=self._group)
        _CONNECTED.add(self._group)

    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        # Receives go first: of two ranks that both post a send first, gloo lets only one send at
        # a time, and the hop takes twice as long.
        if any(message.flat.is_cuda for message in receives + sends):
            # NCCL deadlocks unless it gets all of them together.
            operations = [self._operation(dist.irecv, message) for message in receives]
            operations += [self._operation(dist.isend, message) for message in sends]
            return dist.batch_isend_irecv(operations)
        # Without the checks of `dist`, which take longer than the rest.
        works = [self._group.recv([x.flat], x.peer, x.tag) for x in receives]
        return works + [self._group.send([x.flat], x.peer, x.tag) for x in sends]

    def _operation(self, what: Callable[..., dist.Work | None], message: P2P) -> dist.P2POp:
        flat, peer, tag, _ = message
        return dist.P2POp(what, flat, group=self._group, tag=tag, group_peer=peer)

    def keeps_tags(self, device: torch.device) -> bool:
        return device.type == "cpu"  # gloo does, NCCL does not look at them

    def receive_word(self, message: P2P) -> Work:
        """Start to receive a message on the CPU that has the tag of words."""
        return self._group.recv([message.flat], message.peer, WORD_TAG)

    def send_word(self, message: P2P) -> Work:
        """Start to send a message on the CPU that has the tag of words."""
        return self._group.send([message.flat], message.peer, WORD_TAG)

    def abort(self) -> None:
        """Close the connections of this rank, so that those who wait for it get an error."""
        group = self._group
        with suppress(RuntimeError):  # closed already
            # Gloo has no abort, but closes all connections of a rank once it has waited in vain.
            unsent = torch.empty(1, dtype=torch.uint8)
            late = group.recv([unsent], (group.rank() + 1) % group.size(), ABORT_TAG)
            late.wait(timedelta(milliseconds=1))
        with suppress(RuntimeError):
            group.abort()


def is_plain(transport: Transport, device: torch.device) -> bool:
    """Whether messages of that device are the process group's own, and nobody changed how they go.

    Then words may carry them.
    """
    return type(transport) is ProcessGroupTransport and transport.keeps_tags(device)


def axis_group_options(device_type: str) -> dist.ProcessGroupNCCL.Options | None:
    """Options of a new group for the messages of an axis; `None` where NCCL does not connect ranks.

    Its kernels take the next multiprocessor that attention leaves, before attention's own blocks
    do. So a hop begins while the tile runs, and not after it.

    Args:
        device_type: of the mesh, `"cuda"` or `"cpu"`.
    """
    world = dist.group.WORLD
    if device_type != "cuda" or world is None:
        return None
    of_all = world._get_backend(torch.device("cuda"))
    if of_all.name() != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = of_all.options._timeout  # of a mesh's group, they decide it
    return options


def transport_of(group: dist.ProcessGroup) -> Transport:
    """The transport of a group: the one that was set for it, else point-to-point messages."""
    found = _TRANSPORTS.get(group)
    return ProcessGroupTransport(group) if found is None else found


def set_transport(group: dist.ProcessGroup, transport: Transport) -> None:
    """Move the messages of a group by that transport from now on, on this rank.

    Raises:
        TypeError: if it is not a `Transport`.
        ValueError: if the group has another one.
    """
    if not isinstance(transport, Transport):
        raise TypeError(
            f"transport must be an instance of a subclass of Transport, got {transport!r}"
        )
    known = _TRANSPORTS.setdefault(group, transport)
    if known is not transport:
        raise ValueError(
            f"this axis has the transport {known!r}, it cannot get {transport!r}: an axis is "
            "configured once; use the same transport, or a mesh of other ranks"
        )


_CONNECTED: WeakSet[dist.ProcessGroup] = WeakSet()
"""Groups whose ranks NCCL has connected; entries die with their group."""

_TRANSPORTS: WeakKeyDictionary[dist.ProcessGroup, Transport] = WeakKeyDictionary()
"""Transports that users passed. An entry dies with its group, unless the transport holds that."""
