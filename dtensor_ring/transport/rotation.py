"""The packets of keys, values and gradients, as they go from rank to rank.

Note [Life of a packet]: a packet is in flight during one hop, then it is resident under its source
until no step computes on it and no hop forwards it, as `Hop.releases` says. Its buffer serves the
next packet then. So a route may bring packets long before they are used, or all at once; the usual
ring needs two buffers, direct messages three, and so do packets that leave columns behind. Their
sums leave in two parts, which takes two more.

Note [Messages of a packet]: a large key and value go from where they lie, as two messages, and
arrive side by side in one buffer. From there they go on as one message. Both ranks must know how
many messages there are: it depends on the size, and on who sends, not on how tensors lie. What does
not lie in one piece is packed first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Self

import torch
from torch import Tensor

from dtensor_ring.compute.execute import Pair
from dtensor_ring.compute.memory import TOKEN_MAJOR, pack, part_of, region, strides
from dtensor_ring.compute.trace import Label
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.plan import Plan, Step
from dtensor_ring.planning.route import Hop, Transfer
from dtensor_ring.transport.transport import P2P, Transport, Work

LARGE = 1 << 23
"""Bytes of a packet from which its owner sends key and value apart, each from where it lies.

Another message is another thread to wake, on a core that computes: below, that takes longer than to
copy both into one message.
"""


def goes_apart(num_bytes: int) -> bool:
    """Whether the owner sends keys and values of this size as two messages.

    Both ranks of a message ask this, so it knows of nothing that only one of them has.
    """
    return num_bytes >= LARGE


class Packet:
    """Columns of two tensors `(B, N, C, H)`, each dense and token-major in memory.

    Args:
        cols: the columns, counted in the whole shard.
        pair: the columns of both tensors.
        buffer: uint8, that has both side by side; `None` if they are the tensors of a user.
    """

    def __init__(self, cols: Cols, pair: Pair, buffer: Tensor | None = None) -> None:
        self.cols, self.pair, self.buffer = cols, pair, buffer

    @classmethod
    def within(cls, buffer: Tensor, like: Pair, cols: Cols, dtype: torch.dtype) -> Packet:
        """A packet of any content.

        Args:
            buffer: uint8, at least as large as the columns.
            like: the whole pair, whose batch, heads and head dims the columns have.
            cols: the columns, counted in the whole shard.
            dtype: in which they travel.
        """
        flat = buffer[: buffer.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        tensors, offset = [], 0
        for x in like:
            batch, heads, _, head_dim = x.shape
            shape = batch, heads, len(cols), head_dim
            numel = prod(shape)
            # Dense, so that a kernel reads the message as it arrived.
            part = flat[offset : offset + numel]
            tensors.append(part.as_strided(shape, strides(shape, TOKEN_MAJOR)))
            offset += numel
        return cls(cols, (tensors[0], tensors[1]), buffer)

    @classmethod
    def lying(cls, pair: Pair, cols: Cols) -> Packet | None:
        """These columns where a pair has them, if each tensor has them in one piece of memory."""
        if len(cols.spans) != 1:
            return None
        at = region(None, cols.spans[0])
        packet = cls(cols, (part_of(pair[0], at), part_of(pair[1], at)))
        is_dense = all(x.permute(TOKEN_MAJOR).is_contiguous() for x in packet.pair)
        return packet if is_dense else None

    @property
    def num_bytes(self) -> int:
        """Of both tensors."""
        key, value = self.pair
        return key.nbytes + value.nbytes

    def fill(self, pair: Pair, at: Cols) -> None:
        """Copy columns out of a pair: as many as the packet has, from where the pair has them."""
        for view, x in zip(self.pair, pair, strict=True):
            pack(view, x, at)

    def messages(self, is_apart: bool) -> list[Tensor]:
        """Flat tensors: key and value, or both in one, which takes a buffer."""
        if is_apart:
            return [x.permute(TOKEN_MAJOR).view(-1) for x in self.pair]
        assert self.buffer is not None, "what lies somewhere else is not one message"
        # A reused buffer may be larger; only this part travels.
        return [self.buffer[: self.num_bytes].view(self.pair[0].dtype)]


class Rotation:
    """Moves packets by a list of hops. As a context, it gives its buffers back at the end.

    Args:
        transport: what moves the messages.
        plan: of this rank.
        hops: by step, what it sends and receives.
        like: the whole pair that packets hold columns of.
        dtype: in which packets travel.
    """

    def __init__(
        self,
        transport: Transport,
        plan: Plan,
        hops: Sequence[Hop],
        like: Pair,
        dtype: torch.dtype,
    ) -> None:
        transport.prepare(like[0].device)
        self._transport, self._plan, self._rank, self._hops = transport, plan, plan.rank, hops
        self._like, self._dtype = like, dtype
        per_col = sum(x.shape[0] * x.shape[1] * x.shape[3] for x in like)
        self._col_bytes = per_col * dtype.itemsize
        self._resident: dict[int, Packet] = {}  # by source
        self._sent: list[Packet] = []
        self._arriving: list[tuple[int, Packet]] = []  # with the source
        self._works: Sequence[Work] = ()
        self._idle: list[Tensor] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if not (self._resident or self._idle):
            return
        # What is still in flight, as when a kernel raised, may be written to at any time: such a
        # buffer goes to nobody else.
        in_flight = _buffers(self._sent + [packet for _, packet in self._arriving])
        kept = _buffers(self._resident.values())
        for buffer in self._idle + [x for key, x in kept.items() if key not in in_flight]:
            self._transport.free(buffer)
        self._resident, self._idle = {}, []

    def _packet(self, cols: Cols) -> Packet:
        """A packet for these columns, in a buffer that nothing else is in."""
        if not self._idle:
            self._idle.append(self._allocate())
        return Packet.within(self._idle.pop(), self._like, cols, self._dtype)

    def _allocate(self) -> Tensor:
        # As large as the largest packet, so that any buffer serves any; a sum is as large as the
        # packet of keys that it belongs to, though it may leave in parts.
        hops = self._plan.shards + self._plan.sums
        num_cols = max([len(x.cols) for hop in hops for x in hop.sends + hop.receives])
        return self._transport.allocate(num_cols * self._col_bytes, self._like[0].device)

    def _part(self, source: int, cols: Cols, label: Label) -> Packet:
        """These columns of a packet that is here: as it came, or a copy of them."""
        resident = self._resident[source]
        if resident.cols == cols:
            return resident
        packet = self._packet(cols)
        with label("pack"):
            packet.fill(resident.pair, cols.within(resident.cols))
        return packet

    def _start(self, hop: Hop, outgoing: list[Packet]) -> None:
        """Start a hop, with a packet for each of its sends; nothing empty travels."""
        self._sent = outgoing
        self._arriving = [(x.source, self._packet(x.cols)) for x in hop.receives]
        receives = [
            message
            for x, (_, packet) in zip(hop.receives, self._arriving, strict=True)
            for message in self._messages(x, packet, sender=x.peer)
        ]
        sends = [
            message
            for x, packet in zip(hop.sends, outgoing, strict=True)
            for message in self._messages(x, packet, sender=self._rank)
        ]
        self._works = self._transport.start(receives, sends)

    def _messages(self, transfer: Transfer, packet: Packet, sender: int) -> list[P2P]:
        """The messages of a transfer; nothing empty travels."""
        is_apart = transfer.source == sender and goes_apart(self._num_bytes(transfer.cols))
        flats = packet.messages(is_apart)
        return [P2P(x, transfer.peer, source=transfer.source) for x in flats if x.numel()]

    def _num_bytes(self, cols: Cols) -> int:
        return len(cols) * self._col_bytes

    def _finish(self, hop: Hop) -> list[Packet]:
        """Wait for the hop; its packets are resident now, but those that are returned.

        Returned are sums for this rank's own shard, whose buffers are the caller's to give back.
        """
        for work in self._works:
            work.wait()
        arrived, sent = self._arriving, self._sent
        self._works, self._arriving, self._sent = (), [], []
        self._resident.update(x for x in arrived if x[0] != self._rank)
        gone = [self._resident.pop(source) for source in hop.releases]
        # A packet that was forwarded may still be resident: its buffer is not free yet.
        kept = _buffers(self._resident.values())
        self._idle += [x for key, x in _buffers([*sent, *gone]).items() if key not in kept]
        return [packet for source, packet in arrived if source == self._rank]


def _buffers(packets: Iterable[Packet]) -> dict[int, Tensor]:
    """The buffers that packets are in, by their id."""
    return {id(x.buffer): x.buffer for x in packets if x.buffer is not None}


class ShardRotation(Rotation):
    """Moves keys and values; `kv_dtype` is the dtype in which they travel, by default their own."""

    def __init__(
        self, transport: Transport, plan: Plan, shard: Pair, kv_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(transport, plan, plan.shards, shard, kv_dtype or shard[0].dtype)
        self._shard = shard

    @contextmanager
    def moving(self, step: Step, label: Label) -> Iterator[Pair]:
        """Keys and values of a step, while the messages for later steps are in flight."""
        self._transport.at(label)
        hop = self._hops[step.number]
        moves = any(hop)  # nothing does in the last step
        outgoing = self._outgoing(hop.sends, label) if moves else []
        with label("send"):
            if moves:
                self._start(hop, outgoing)
        self._transport.at(label)
        yield self._kv(step)
        with label("wait"):
            if moves:
                self._finish(hop)

    def _kv(self, step: Step) -> Pair:
        packet = self._resident.get(step.source)
        if packet is None:
            return self._shard
        key, value = packet.pair
        # Narrow packets are widened here, so that kernels see one dtype.
        dtype = self._shard[0].dtype
        return key.to(dtype), value.to(dtype)  # no copy where they travel as they are

    def _outgoing(self, sends: Sequence[Transfer], label: Label) -> list[Packet]:
        """The packet of each transfer; columns that go to several peers are packed once."""
        packets: dict[tuple[int, Cols], Packet] = {}
        # A message reads a packet, so several peers may read one.
        for source, cols, _ in sends:
            if (source, cols) not in packets:
                packets[source, cols] = self._packed(source, cols, label)
        return [packets[source, cols] for source, cols, _ in sends]

    def _packed(self, source: int, cols: Cols, label: Label) -> Packet:
        if source != self._rank:
            return self._part(source, cols, label)
        if goes_apart(self._num_bytes(cols)) and self._dtype == self._shard[0].dtype:
            lying = Packet.lying(self._shard, cols)
            if lying is not None:
                return lying
        packet = self._packet(cols)
        with label("pack"):
            packet.fill(self._shard, cols)
        return packet


class SumRotation(Rotation):
    """Moves sums of key and value gradients; adding to them is the loop's part."""

    def __init__(self, transport: Transport, plan: Plan, shard: Pair, dtype: torch.dtype) -> None:
        super().__init__(transport, plan, plan.sums, shard, dtype)
        self._hop = Hop()
        sources = [transfer.source for hop in plan.sums for transfer in hop.receives]
        # Known before, so that the last sum is added in the narrow dtype at once.
        self._num_own = sources.count(plan.rank)  # still to come

    def post(self, step: Step, label: Label) -> None:
        """Start the hop after a step, whose sums are complete."""
        self._hop = self._hops[step.number]
        outgoing = [self._part(x.source, x.cols, label) for x in self._hop.sends]
        for source in {x.source for x in self._hop.sends}:
            whole = self._resident.pop(source)
            if whole not in outgoing:  # it was copied, in parts
                self._idle += _buffers([whole]).values()
        with label("send sums"):
            self._start(self._hop, outgoing)
        self._transport.at(label)

    def wait(self, label: Label) -> Iterator[tuple[Packet, bool]]:
        """Wait for the last hop; the sums for this rank's own shard, and whether it is the last.

        Each is valid until the next is asked for.
        """
        with label("wait for sums"):
            own = self._finish(self._hop)
        self._hop = Hop()
        for packet in own:
            self._num_own -= 1
            # The caller adds it before it asks for the next, so its buffer is free then.
            yield packet, not self._num_own
            self._idle += _buffers([packet]).values()

    def sum_of(self, step: Step) -> tuple[Packet, bool]:
        """The sum that a step's gradients belong to, and whether it is new, without content."""
        # The first rank after a source starts its sum; the others add to what arrived.
        is_new = step.source not in self._resident
        if is_new:
            self._resident[step.source] = self._packet(step.cols)
        return self._resident[step.source], is_new
