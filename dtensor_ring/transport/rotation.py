"""Move packets of keys, values and gradients from rank to rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from torch import Tensor

from dtensor_ring.compute.execute import Pair
from dtensor_ring.compute.memory import TOKEN_MAJOR, pack, part_of, region, strides
from dtensor_ring.compute.trace import Label, note_pass
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.plan import Plan, Step
from dtensor_ring.planning.route import Hop, Transfer
from dtensor_ring.transport.transport import P2P, Transport, Work, hold_until_complete

# The owner sends key and value of a packet of at least this many bytes as two messages, in place.
# Each message wakes a thread on a core that computes: below this size, a copy of both into one
# message is faster.
LARGE = 1 << 23


def goes_apart(num_bytes: int) -> bool:
    """Return whether the owner sends keys and values of this size as two messages.

    Both ranks of a message call this, so it uses only facts that both of them have.
    """
    return num_bytes >= LARGE


# The attribute of a buffer that holds views of it, and the most that are kept.
_VIEWS, MAX_VIEWS = "dtensor_ring_views", 8


class _Dense(NamedTuple):
    """Columns of a tensor `(B, N, C, H)`, dense and token-major: shape, strides and numbers."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size: int


def _dense(whole: tuple[int, ...], num_cols: int) -> _Dense:
    shape = *whole[:2], num_cols, whole[3]
    return _Dense(shape, strides(shape, TOKEN_MAJOR), prod(shape))


class Packing:
    """How columns of two tensors `(B, N, C, H)` of one dtype lie in a buffer, see `packing_of`.

    Args:
        wholes: the shapes of both tensors, of which a packet has some columns.
        dtype: the dtype of packets.

    Attributes:
        col_bytes: bytes of a column of both.
    """

    def __init__(self, wholes: tuple[torch.Size, torch.Size], dtype: torch.dtype) -> None:
        self._wholes, self._dtype = wholes, dtype
        self.col_bytes = sum(_dense(x, 1).size for x in wholes) * dtype.itemsize

    def packet(self, buffer: Tensor, cols: Cols) -> Packet:
        """Return a packet of these columns in a buffer, see `Packet.within`."""
        num_cols = cols.offsets[-1]  # `len` would be a call
        # The same packets come again, in the next hop or call.
        kept = buffer.__dict__.get(_VIEWS)
        found = None if kept is None else kept.get((self, num_cols))
        pair, flat = found or self._views(buffer, num_cols)
        return Packet(cols, pair, buffer, flat)

    def _views(self, buffer: Tensor, num_cols: int) -> tuple[Pair, Tensor]:
        """Return columns of both tensors in a buffer, each on its own and as one message."""
        of_key, of_value = (_dense(x, num_cols) for x in self._wholes)
        # A reused buffer may be larger; only this part travels.
        flat = buffer[: num_cols * self.col_bytes].view(self._dtype)
        begin = flat.storage_offset()
        # Dense, so that a kernel reads the message as it arrived.
        pair = (
            flat.as_strided(of_key.shape, of_key.strides, begin),
            flat.as_strided(of_value.shape, of_value.strides, begin + of_key.size),
        )
        kept = buffer.__dict__.setdefault(_VIEWS, {})
        # A view that autograd tracks would keep the buffer alive.
        if flat._base is None and len(kept) < MAX_VIEWS:
            kept[self, num_cols] = pair, flat
        return pair, flat


@lru_cache(maxsize=256)
def packing_of(key: torch.Size, value: torch.Size, dtype: torch.dtype) -> Packing:
    """Return how columns of keys and values of these shapes lie in a buffer."""
    return Packing((key, value), dtype)


# Note [Life of a packet]: a packet is in flight during one hop. Then it is resident under its
# source until `Hop.releases` names the source: no later step computes on it, and no later hop
# forwards it. The next packet reuses its buffer. So a route may bring packets long before they are
# used, or all at once. The usual ring needs two buffers. Direct messages need three, and so do
# packets that lose columns in flight; the sums of those leave in two parts and need two more
# buffers.
#
# Note [Messages of a packet]: the owner sends a large key and value in place, as two messages,
# which arrive next to each other in one buffer. Later ranks forward them as one message. Both ranks
# must expect the same number of messages, so it depends on the size and the sender only, and not on
# strides. Tensors that are not contiguous are packed first.
class Packet:
    """Columns of two tensors `(B, N, C, H)`, each dense and token-major in memory.

    Args:
        cols: the columns, counted in the whole shard.
        pair: the columns of both tensors.
        buffer: the uint8 tensor that holds both, next to each other; `None` if they are views of a
            user's tensors.
        flat: both in the buffer, as one message.
    """

    __slots__ = ("_flat", "buffer", "cols", "pair")  # one for each message

    def __init__(
        self, cols: Cols, pair: Pair, buffer: Tensor | None = None, flat: Tensor | None = None
    ) -> None:
        self.cols, self.pair, self.buffer, self._flat = cols, pair, buffer, flat

    @classmethod
    def within(cls, buffer: Tensor, like: Pair, cols: Cols, dtype: torch.dtype) -> Packet:
        """Return a packet in a buffer; its content is undefined.

        Args:
            buffer: uint8, at least as large as the columns.
            like: the whole pair; the packet has its batch, heads and head dims.
            cols: the columns, counted in the whole shard.
            dtype: the dtype of the packet.
        """
        return packing_of(like[0].shape, like[1].shape, dtype).packet(buffer, cols)

    @classmethod
    def lying(cls, pair: Pair, cols: Cols) -> Packet | None:
        """Return a packet that views columns of a pair, or `None` if they are not contiguous."""
        if len(cols.spans) != 1:
            return None
        at = region(None, cols.spans[0])
        packet = cls(cols, (part_of(pair[0], at), part_of(pair[1], at)))
        is_dense = all(x.permute(TOKEN_MAJOR).is_contiguous() for x in packet.pair)
        return packet if is_dense else None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of both tensors."""
        key, value = self.pair
        return key.nbytes + value.nbytes

    def fill(self, pair: Pair, at: Cols, label: Label) -> None:
        """Copy the columns `at` of a pair into the packet, which has the same number of columns."""
        with label("pack"):
            if pair[0].is_meta:  # a dry run: nothing to copy
                both = zip(self.pair, pair, strict=True)
                note_pass("packet", sum(to.numel() * (to.itemsize + x.itemsize) for to, x in both))
                return
            pack(self.pair[0], pair[0], at)
            pack(self.pair[1], pair[1], at)

    def messages(self, is_apart: bool) -> list[Tensor]:
        """Return flat tensors: key and value apart, or the buffer that holds both."""
        if is_apart:
            return [x.permute(TOKEN_MAJOR).view(-1) for x in self.pair]
        assert self._flat is not None, "what lies somewhere else is not one message"
        return [self._flat]


# Note [Streams]: on a GPU the host only queues. Three things decide what runs when.
#
# - Kernels of attention, merges and copies run on the current stream, in the order of the code. In
#   backward that is the stream of the forward call: autograd sets it.
# - `Transport.start` puts the messages of a hop on a stream of the process group, which first waits
#   for all that the current stream holds. So a packet is packed before it is sent, and the former
#   content of a buffer was read before a message overwrites it.
# - `Work.wait` makes the current stream wait for the messages of the hop. So later kernels read
#   what arrived, and may overwrite what was sent. The host does not wait.
#
# A forward step starts its hop, launches its kernels, and waits for the hop. So kernels of one step
# run beside the messages for later steps; they do not read what is being received, nor write to
# what is being sent. A backward step starts its hop of shards and launches its kernels. Then it
# waits for the sums of the step before, adds to its own sum and starts that, and waits for its
# shards last.
#
# A forward step n on the two streams; its messages bring what later steps compute on:
#
#     current stream    | pack n | attention n           | wait | pack n + 1 | attention n + 1
#     messages                   | hop n --------------->|                   | hop n + 1 ------
#
# Note [Memory in flight]: the caching allocator gives memory back in the order of the stream on
# which it was allocated, and that is the current one. A buffer is freed after a wait for all its
# messages, so whoever gets its memory comes later on that stream. That is why nothing here calls
# `record_stream`. From `start` to `wait`, `_sent` and `_arriving` keep the packets alive. Process
# groups cannot be trusted with that:
#
# - NCCL's of torch 2.11 to 2.13 calls `record_stream` for each message between two ranks, whatever
#   TORCH_NCCL_AVOID_RECORD_STREAMS says. This is safe, but the allocator reuses a buffer only when
#   it sees that the group's stream has passed it. It keeps references for collectives only.
# - NCCL's of torch 2.15, a new one, records nothing. It keeps references to what it sends until the
#   wait, and none to what it receives.
#
# An error leaves messages in flight that nobody waits for. `hold_until_complete` records a stream
# that does. `tests/transport/test_streams.py` checks both notes for all routes.
class Rotation:
    """Moves packets along a list of hops. As a context manager, it frees its buffers on exit.

    Args:
        transport: moves the messages.
        plan: the plan of this rank.
        hops: by step, the packets that this rank sends and receives.
        like: the whole pair whose columns packets hold.
        dtype: the dtype of packets.
    """

    def __init__(
        self,
        transport: Transport,
        plan: Plan,
        hops: Sequence[Hop],
        like: Pair,
        dtype: torch.dtype,
    ) -> None:
        key, value = like
        self._device = key.device
        transport.prepare(self._device)
        self._transport, self._rank, self._hops = transport, plan.rank, hops
        self._packing, self._dtype = packing_of(key.shape, value.shape, dtype), dtype
        self._col_bytes = self._packing.col_bytes
        # All buffers have the size of the largest packet, so any buffer serves any packet. A sum is
        # as large as its packet of keys and values, though it may leave in parts.
        self._num_bytes = plan.largest_packet * self._col_bytes
        self._resident: dict[int, Packet] = {}  # by source
        self._sent: list[Packet] = []
        self._arriving: list[tuple[int, Packet]] = []  # with the source
        self._works: Sequence[Work] = ()
        self._idle: list[Tensor] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        packets = self._sent + [packet for _, packet in self._arriving]
        if self._works:
            # After an error, messages may still write to the buffers in flight, so nobody else may
            # reuse those.
            hold_until_complete(self._works, [x for packet in packets for x in packet.pair])
        if self._resident:
            self._idle += _buffers(self._resident.values(), but=packets)
        for buffer in self._idle:
            self._transport.free(buffer)
        self._resident, self._idle = {}, []

    def _packet(self, source: int, cols: Cols) -> Packet:
        """Return a packet for columns of a source in an idle buffer; allocate if there is none."""
        if self._idle:
            return self._packing.packet(self._idle.pop(), cols)
        buffer = self._transport.allocate(self._num_bytes, self._device)
        return self._packing.packet(buffer, cols)

    def _part(self, source: int, cols: Cols, label: Label) -> Packet:
        """Return these columns of a resident packet: the packet itself, or a copy of a part."""
        resident = self._resident[source]
        if resident.cols is cols or resident.cols == cols:
            return resident
        packet = self._packet(source, cols)
        packet.fill(resident.pair, cols.within(resident.cols), label)
        return packet

    def _start(self, hop: Hop, outgoing: list[Packet]) -> None:
        """Start a hop, with one packet for each of its sends."""
        self._sent, self._arriving = outgoing, []
        receives: list[P2P] = []
        # What leaves holds its buffers, so what arrives gets others: no hop writes what it sends.
        sends: list[P2P] = []
        for x in hop.receives:
            packet = self._packet(x.source, x.cols)
            self._arriving.append((x.source, packet))
            self._add_messages(receives, x, packet, sender=x.peer)
        for x, packet in zip(hop.sends, outgoing, strict=True):
            self._add_messages(sends, x, packet, sender=self._rank)
        # Receives are given first: of two ranks that both send first, gloo lets only one send.
        self._works = self._transport.start(receives, sends)

    def _add_messages(
        self, messages: list[P2P], transfer: Transfer, packet: Packet, sender: int
    ) -> None:
        """Add the messages of a transfer that are not empty."""
        source, cols, peer = transfer
        is_apart = source == sender and goes_apart(cols.offsets[-1] * self._col_bytes)
        for x in packet.messages(is_apart):
            if x.numel():
                messages.append(P2P(x, peer, 0, source))

    def _finish(self, hop: Hop) -> list[Packet]:
        """Wait for the hop. Packets of other sources become resident; the others are returned.

        The returned packets are sums for this rank's own shard; the caller frees their buffers.
        """
        for work in self._works:
            work.wait()
        arrived, sent = self._arriving, self._sent
        self._works, self._arriving, self._sent = (), [], []
        own: list[Packet] = []
        for source, packet in arrived:
            if source == self._rank:
                own.append(packet)
            else:
                self._resident[source] = packet
        for source in hop.releases:
            sent.append(self._resident.pop(source))
        # A packet that was forwarded may still be resident: its buffer is not free yet.
        self._idle += _buffers(sent, but=self._resident.values())
        return own


def _buffers(packets: Iterable[Packet], but: Iterable[Packet] = ()) -> Iterable[Tensor]:
    """Return the buffers of packets, each once, without those of others: they may be shared."""
    # By identity, as two tensors compare element by element.
    buffers = {id(x.buffer): x.buffer for x in packets if x.buffer is not None}
    for x in but:
        buffers.pop(id(x.buffer), None)
    return buffers.values()


class ShardRotation(Rotation):
    """Moves keys and values, in the dtype `kv_dtype` or, by default, their own."""

    def __init__(self, transport: Transport, plan: Plan, shard: Pair, kv_dtype: Any = None) -> None:
        super().__init__(transport, plan, plan.shards, shard, kv_dtype or shard[0].dtype)
        self._shard = shard

    def begin_step(self, step: Step, label: Label) -> Pair:
        """Start the messages of a step, and return the keys and values that it uses meanwhile."""
        self._transport.at(label)
        hop = self._hops[step.number]
        if any(hop):  # false if nothing is sent, received or released, as in the last step
            outgoing = self._outgoing(hop.sends, label)
            with label("send"):
                self._start(hop, outgoing)
        self._transport.at(label)
        return self._kv(step)

    def end_step(self, step: Step, label: Label) -> None:
        """Wait for the messages of a step, after its kernels are launched."""
        hop = self._hops[step.number]
        if any(hop):
            with label("wait"):
                self._finish(hop)

    def _kv(self, step: Step) -> Pair:
        packet = self._resident.get(step.source)
        if packet is None:
            return self._shard
        dtype = self._shard[0].dtype
        if dtype == self._dtype:
            return packet.pair
        # Packets of a narrower dtype are widened here: kernels see one dtype.
        key, value = packet.pair
        if key.is_meta:
            note_pass("pack", (key.numel() + value.numel()) * (key.itemsize + dtype.itemsize))
        return key.to(dtype), value.to(dtype)

    def _outgoing(self, sends: Sequence[Transfer], label: Label) -> list[Packet]:
        """Return the packet of each transfer; columns for several peers are packed once."""
        if len(sends) == 1:  # around the ring
            return [self._packed(sends[0].source, sends[0].cols, label)]
        packets: dict[tuple[int, Cols], Packet] = {}
        outgoing = []
        for source, cols, _ in sends:
            # Messages only read their packet, so several may share one.
            packet = packets.get((source, cols))
            if packet is None:
                packet = packets[source, cols] = self._packed(source, cols, label)
            outgoing.append(packet)
        return outgoing

    def _packed(self, source: int, cols: Cols, label: Label) -> Packet:
        if source != self._rank:
            return self._part(source, cols, label)
        # A large message of neighbouring columns leaves from the shard itself, without a copy.
        if goes_apart(cols.offsets[-1] * self._col_bytes) and self._dtype == self._shard[0].dtype:
            lying = Packet.lying(self._shard, cols)
            if lying is not None:
                return lying
        packet = self._packet(source, cols)
        packet.fill(self._shard, cols, label)
        return packet


class SumRotation(Rotation):
    """Moves sums of key and value gradients; the backward loop adds to them."""

    _NO_HOP: ClassVar = Hop()

    def __init__(self, transport: Transport, plan: Plan, shard: Pair, dtype: torch.dtype) -> None:
        super().__init__(transport, plan, plan.sums, shard, dtype)
        self._hop = self._NO_HOP
        # Gradients that come home in several messages must still round once.
        # Counted ahead: the caller adds the last sum directly in the narrow dtype.
        self._num_own = plan.num_arriving  # still to come

    def post(self, step: Step, label: Label) -> None:
        """Start the hop after a step; the sums that it sends are complete."""
        self._hop = self._hops[step.number]
        outgoing = [self._part(x.source, x.cols, label) for x in self._hop.sends]
        for source in {x.source for x in self._hop.sends}:
            whole = self._resident.pop(source)
            if whole not in outgoing:  # its parts were copied
                self._idle += _buffers([whole])
        with label("send sums"):
            self._start(self._hop, outgoing)
        self._transport.at(label)

    @property
    def is_last(self) -> bool:
        """Whether no sum comes after the one that arrived."""
        return self._num_own == 1

    def wait(self, label: Label) -> list[Packet]:
        """Wait for the last hop; return the sums for this rank's own shard, each until `leave`."""
        with label("wait for sums"):
            own = self._finish(self._hop)
        self._hop = self._NO_HOP
        return own

    def leave(self, packet: Packet) -> None:
        """Reuse the buffer of a sum that arrived and was added."""
        self._num_own -= 1
        self._idle.append(cast(Tensor, packet.buffer))

    def sum_of(self, source: int, cols: Cols) -> tuple[Packet, bool]:
        """Return the sum of a source's columns, and whether it is new, with undefined content."""
        # The first rank after a source starts its sum; later ranks add to the sum that arrived.
        is_new = source not in self._resident
        if is_new:
            self._resident[source] = self._packet(source, cols)
        return self._resident[source], is_new
