"""A transport by copy engines: within a host, each rank pulls messages out of its peers' memory."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from dtensor_ring.compute.capture import RUN_ONCE, refuse_capture
from dtensor_ring.transport.transport import P2P, Transport, Work, set_transport, transport_of


def use_symmetric(group: dist.ProcessGroup) -> None:
    """Make symmetric memory the transport of a group, if it is not already.

    Raises:
        ValueError: if the group has another transport.
    """
    if not isinstance(transport_of(group), SymmetricTransport):
        set_transport(group, SymmetricTransport(group))


class PeerMemory(Protocol):
    """The outboxes of all ranks, and signals between them, on the current stream.

    A signal goes from one rank to another, on a channel. It is set or not, so it must be waited for
    before it is put again. None is set at first.
    """

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, at: int) -> Tensor:
        """Return a part of a rank's outbox, from element `at` on."""

    def put_signal(self, peer: int, channel: int) -> None:
        """Set this rank's signal to a peer, after all earlier copies."""

    def wait_signal(self, peer: int, channel: int) -> None:
        """Wait for a peer's signal and unset it; later copies run after that."""


class SymmetricMemory(Protocol):
    """Where outboxes come from: `CudaMemory`, or a stand-in for tests."""

    def check(self, device: torch.device, group_name: str) -> None:
        """Raise `ValueError` if the ranks of a group cannot share memory of their devices."""

    def empty(self, num_bytes: int, device: torch.device) -> Tensor:
        """Allocate a uint8 tensor that can be shared."""

    def rendezvous(self, outbox: Tensor, group_name: str) -> PeerMemory:
        """Share the outboxes of all ranks, which have one size; all ranks call this."""

    def run(self, device: torch.device, operations: Callable[[], None]) -> Callable[[], None]:
        """Run copies and signals beside the kernels of a device.

        They run in the order of the calls, after all that the kernels' stream holds now.

        Returns:
            What makes later kernels wait until these operations are done.
        """


# Slots for each peer: one is filled while the other is read.
NUM_SLOTS = 2


# Note [Order of chunks]: all copies and signals of a rank run in one order, on one stream. A hop
# goes in rounds: the n-th chunk to each peer is copied into its slot, then the n-th chunk from each
# peer is pulled. A chunk waits for a slot that the peer read in an earlier round or hop, and a pull
# waits for a copy of the same round. Ranks start their hops in one order, so every wait is for
# something that comes earlier in this order: no ranks wait for each other in a circle, whatever the
# route.
class Outbox:
    """The outbox of this rank on one device, and those of its peers.

    Args:
        rank: this rank.
        size: the number of ranks.
        chunk_bytes: the bytes of a slot.
        memory: allocates and shares.
        device: the device of the messages.
        group_name: the group of all ranks.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        chunk_bytes: int,
        memory: SymmetricMemory,
        device: torch.device,
        group_name: str,
    ) -> None:
        self._chunk_bytes = chunk_bytes
        # The outbox of rank 1 of 4, with two slots for each of its readers:
        #     | for 0 | for 0 | for 2 | for 2 | for 3 | for 3 |
        outbox = memory.empty((size - 1) * NUM_SLOTS * chunk_bytes, device)
        self._memory = memory.rendezvous(outbox, group_name)
        others = [peer for peer in range(size) if peer != rank]
        # By peer: the slots that it reads, and those that it fills for this rank.
        self._own = {peer: self._slots(rank, peer) for peer in others}
        self._theirs = {peer: self._slots(peer, rank) for peer in others}
        self._num_staged, self._num_pulled = dict.fromkeys(others, 0), dict.fromkeys(others, 0)
        memory.run(device, self._free_slots)
        self._registered = outbox  # keeps the memory

    def _slots(self, owner: int, reader: int) -> list[Tensor]:
        """Return the slots in the owner's outbox for a reader."""
        first = (reader - (reader > owner)) * NUM_SLOTS  # no rank has slots for itself
        sizes, step = (self._chunk_bytes,), self._chunk_bytes
        places = range(first * step, (first + NUM_SLOTS) * step, step)
        return [self._memory.get_buffer(owner, sizes, torch.uint8, at) for at in places]

    def _free_slots(self) -> None:
        """Tell each peer that this rank has read its slots, which are empty."""
        for peer in self._own:
            for slot in range(NUM_SLOTS):
                self._memory.put_signal(peer, NUM_SLOTS + slot)

    def move(self, sends: list[P2P], receives: list[P2P]) -> None:
        """Queue the copies and signals of a hop, see Note [Order of chunks]."""
        outgoing, incoming = self._rounds(sends), self._rounds(receives)
        for staged, pulled in zip_longest(outgoing, incoming, fillvalue=()):
            for peer, chunk in staged:
                self._stage(peer, chunk)
            for peer, chunk in pulled:
                self._pull(peer, chunk)

    def _rounds(self, messages: list[P2P]) -> Iterable[list[tuple[int, Tensor]]]:
        """Cut messages into chunks; the n-th round has the n-th chunk of each peer that has one."""
        chunks: dict[int, list[Tensor]] = {}
        for flat, peer, *_ in messages:
            parts = flat.view(torch.uint8).split(self._chunk_bytes)
            chunks.setdefault(peer, []).extend(parts)
        for parts in zip_longest(*chunks.values()):
            yield [(peer, x) for peer, x in zip(chunks, parts, strict=True) if x is not None]

    def _stage(self, peer: int, chunk: Tensor) -> None:
        # How a chunk goes through a slot. Channel `slot` says that it is full, and channel
        # `NUM_SLOTS + slot` that it is empty:
        #     sender                               receiver
        #     wait until the slot is empty
        #     copy the chunk into it
        #     signal that it is full      ----->   wait until it is full
        #                                          copy the chunk out of it
        #                                 <-----   signal that it is empty
        slot = self._num_staged[peer] % NUM_SLOTS
        self._num_staged[peer] += 1
        self._memory.wait_signal(peer, NUM_SLOTS + slot)  # the peer has read what it had
        self._own[peer][slot][: chunk.numel()].copy_(chunk)
        self._memory.put_signal(peer, slot)

    def _pull(self, peer: int, chunk: Tensor) -> None:
        # Both sides count the chunks between them alike, so that they use the same slot unasked.
        slot = self._num_pulled[peer] % NUM_SLOTS
        self._num_pulled[peer] += 1
        self._memory.wait_signal(peer, slot)  # the peer has filled it
        chunk.copy_(self._theirs[peer][slot][: chunk.numel()])
        self._memory.put_signal(peer, NUM_SLOTS + slot)


class MovedHop:
    """The messages of a hop in flight, whose tensors it keeps until the first `wait`."""

    def __init__(
        self, end: Callable[[], None], messages: list[P2P], in_flight: set[MovedHop]
    ) -> None:
        self._end, self._messages, self._in_flight = end, messages, in_flight
        in_flight.add(self)

    def wait(self) -> None:
        # All messages of a hop share this object, and each of them is waited for.
        if self in self._in_flight:
            self._end()
            self._in_flight.remove(self)
            self._messages = []


# The bytes of a slot. Smaller ones take less memory and more signals, of about 10 us a chunk.
CHUNK_BYTES = 1 << 24


# Note [Outboxes]: each rank registers one buffer, its outbox, of the same size on all ranks. It has
# `NUM_SLOTS` slots for each other rank. The sender copies a message into a slot, and signals that
# it is ready. The receiver pulls it from there, and signals that it has read it. Both are copies
# from device to device, which take no multiprocessor between GPUs. Where a message lies follows
# from its number alone, so ranks need not tell each other addresses, and their shards may have any
# sizes: the outbox never grows, and registering is for the first call only. A message larger than a
# slot travels in chunks. The price is a copy within the memory of the sender, as NCCL makes one,
# too. In return tensors of any allocator can be sent, keys and values from where they lie, and a
# sender's tensor is free as soon as it is copied.
class SymmetricTransport(Transport):
    """Moves messages by copies out of registered memory of the other ranks, within one host.

    `TransferPolicy(transport="symmetric")` chooses it. See Note [Outboxes].

    Args:
        group: the group of the axis.
        memory: where registered memory comes from, by default PyTorch's symmetric memory.
        chunk_bytes: the bytes of a slot; a rank registers two for each other rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        memory: SymmetricMemory | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        # Not the group: a transport that references its group keeps it alive.
        self._rank, self._size, self._group_name = group.rank(), group.size(), group.group_name
        self._memory = CudaMemory() if memory is None else memory
        self._chunk_bytes = chunk_bytes
        self._outboxes: dict[torch.device, Outbox] = {}
        # After an error nobody waits for some hops. Their tensors stay here, as they may change.
        self._in_flight: set[MovedHop] = set()

    def prepare(self, device: torch.device) -> None:
        """Register this rank's outbox, in the first call; all ranks do it together.

        Raises:
            ValueError: if the tensors are not on CUDA, the ranks are not on one host, or PyTorch
                has no symmetric memory.
            RuntimeError: if a CUDA graph is captured before there is an outbox.
        """
        if self._size == 1 or device in self._outboxes:
            return
        refuse_capture(device, "the ranks of this axis share no memory yet", RUN_ONCE)
        self._memory.check(device, self._group_name)
        with torch.inference_mode(False):  # tensors made in it are read-only outside
            self._outboxes[device] = Outbox(
                rank=self._rank,
                size=self._size,
                chunk_bytes=self._chunk_bytes,
                memory=self._memory,
                device=device,
                group_name=self._group_name,
            )

    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        messages = [*receives, *sends]
        if not messages:
            return []
        device = messages[0].flat.device
        end = self._memory.run(device, partial(self._outboxes[device].move, sends, receives))
        # One event ends the hop, but callers pair works with messages, so each message gets it.
        return [MovedHop(end, messages, self._in_flight)] * len(messages)


class CudaMemory:
    """PyTorch's symmetric memory of the GPUs of a host, with a side stream of high priority."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def check(self, device: torch.device, group_name: str) -> None:
        if device.type != "cuda":
            raise ValueError(
                'TransferPolicy(transport="symmetric") moves tensors on CUDA, and these are on '
                f"{device.type}; leave transport out"
            )
        backend = _binding().get_backend(device)
        if backend != "CUDA":
            raise ValueError(
                f"PyTorch's symmetric memory has the backend {backend} here, and a transport of "
                'messages needs "CUDA", see torch.distributed._symmetric_memory.set_backend'
            )
        group = _resolve_process_group(group_name)  # pyrefly: ignore[bad-argument-type]
        hosts = [""] * group.size()
        dist.all_gather_object(hosts, socket.gethostname(), group)
        if len(set(hosts)) > 1:
            raise ValueError(
                'TransferPolicy(transport="symmetric") needs all ranks of an axis on one host, and '
                f"these are on {', '.join(sorted(set(hosts)))}; leave transport out"
            )

    def empty(self, num_bytes: int, device: torch.device) -> Tensor:
        # Not from a pool: the signals of memory that was used before may be set.
        return _binding().empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)

    def rendezvous(self, outbox: Tensor, group_name: str) -> PeerMemory:
        group = _resolve_process_group(group_name)  # pyrefly: ignore[bad-argument-type]
        limit = group._get_backend(outbox.device).options._timeout
        return CudaPeers(_binding().rendezvous(outbox, group_name), limit.total_seconds())

    def run(self, device: torch.device, operations: Callable[[], None]) -> Callable[[], None]:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device, priority=-1)
        stream = self._streams[device]
        # What is sent must be complete, and what is overwritten must have been read.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            operations()
        end = stream.record_event()
        # The host goes on. From the wait on, the tensors belong to the kernels' stream again, in
        # whose order the caching allocator reuses their memory.
        return lambda: torch.cuda.current_stream(device).wait_event(end)


def _binding() -> Any:
    """Return PyTorch's class of symmetric memory.

    Raises:
        ValueError: if this PyTorch has none.
    """
    try:
        from torch._C._distributed_c10d import _SymmetricMemory
    except ImportError as error:
        raise ValueError(
            f"torch {torch.__version__} is built without symmetric memory, which "
            'TransferPolicy(transport="symmetric") uses; leave transport out'
        ) from error
    return _SymmetricMemory


class CudaPeers:
    """PyTorch's handle of shared memory, with the time limit of the group in seconds.

    A signal is a kernel of one warp. One that waits longer than the limit ends in a CUDA error.
    """

    def __init__(self, handle: Any, limit: float) -> None:
        self._handle, self._timeout_ms = handle, int(limit * 1e3)

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, at: int) -> Tensor:
        return self._handle.get_buffer(rank, sizes, dtype, at)

    def put_signal(self, peer: int, channel: int) -> None:
        self._handle.put_signal(peer, channel, self._timeout_ms)

    def wait_signal(self, peer: int, channel: int) -> None:
        self._handle.wait_signal(peer, channel, self._timeout_ms)
