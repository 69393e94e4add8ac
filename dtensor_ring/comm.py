"""Messages around the ring: one per hop, posted before a step's kernels, waited for after."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from dtensor_ring.buffer import BUFFERS
from dtensor_ring.order import HEAD_MAJOR, TOKEN_MAJOR, Order, strides
from dtensor_ring.plan import Plan
from dtensor_ring.wire import Message, Wire, Work


class Packet:
    """Two tensors `(B, N, C, H)` side by side in a buffer, which travel in one message."""

    def __init__(
        self,
        buffer: Tensor,
        like: tuple[Tensor, Tensor],
        num_cols: int,
        dtype: torch.dtype,
        order: Order = HEAD_MAJOR,
    ) -> None:
        flat = buffer[: buffer.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        tensors, offset = [], 0
        for x in like:
            batch, heads, _, head_dim = x.shape
            shape = batch, heads, num_cols, head_dim
            numel = prod(shape)
            tensors.append(flat[offset : offset + numel].as_strided(shape, strides(shape, order)))
            offset += numel
        self.flat = flat[:offset]
        self.pair = (tensors[0], tensors[1])


class Rotation:
    """Moves packets to the next rank and receives from the previous, as far as the plan says.

    Two buffers take turns, so that one is computed on and sent while the other is received into.
    """

    def __init__(
        self,
        wire: Wire,
        plan: Plan,
        like: tuple[Tensor, Tensor],
        dtype: torch.dtype,
    ) -> None:
        wire.prepare(like[0].device)
        self._wire, self._plan = wire, plan
        self._like, self._dtype = like, dtype
        self._order = self._order_on(like[0].device)
        self._buffers: list[Tensor] = []
        self._works: Sequence[Work] = []
        self._arriving: Packet | None = None

    @staticmethod
    def _order_on(device: torch.device) -> Order:
        """As kernels read fastest what arrives."""
        return HEAD_MAJOR if device.type == "cpu" else TOKEN_MAJOR

    def packet(self, source: int) -> Packet:
        """The buffer whose turn it is, shaped for the part of the source's shard that travels."""
        if len(self._buffers) < 2:
            buffer = self._take(max(reach.cols[1] - reach.cols[0] for reach in self._plan.reaches))
        else:
            buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        return self._packet(buffer, source)

    def post(self, hop: int, packet: Packet | None) -> None:
        """Start hop number `hop`: `packet` goes on if others need it, the next one comes in."""
        receives, sends = self._messages(hop, packet)
        self._works = self._wire.start(receives, sends)

    def wait(self) -> Packet | None:
        """The packet that came in, once the sends of this hop are done too; `None` if none did."""
        for work in self._works:
            work.wait()
        arrived, self._arriving, self._works = self._arriving, None, []
        return arrived

    def close(self) -> None:
        """Give the buffers back: no packet may be used any more."""
        for buffer in self._buffers:
            BUFFERS.give(buffer)

    def _messages(self, hop: int, packet: Packet | None) -> tuple[list[Message], list[Message]]:
        """What this rank receives, and what it sends."""
        plan = self._plan
        receives: list[Message] = []
        sends: list[Message] = []
        if packet is not None and plan.arrives(self._source(hop - 1), hop):
            self._add(sends, packet, plan.rank + 1)
        if plan.arrives(self._source(hop), hop):
            self._arriving = self.packet(self._source(hop))
            self._add(receives, self._arriving, plan.rank - 1)
        return receives, sends

    def _source(self, hop: int) -> int:
        """Whose shard this rank holds after that many hops."""
        return (self._plan.rank - hop) % self._plan.world_size

    def _add(self, messages: list[Message], packet: Packet, peer: int) -> None:
        """A message for the packet, unless it is empty."""
        if packet.flat.numel():
            messages.append(Message(packet.flat, peer % self._plan.world_size))

    def _take(self, num_cols: int) -> Tensor:
        per_col = sum(x.shape[0] * x.shape[1] * x.shape[3] for x in self._like)
        return BUFFERS.take(num_cols * per_col * self._dtype.itemsize, self._like[0].device)

    def _packet(self, buffer: Tensor, source: int) -> Packet:
        start, end = self._plan.reaches[source].cols
        return Packet(buffer, self._like, end - start, self._dtype, self._order)


class SumRotation(Rotation):
    """Moves the sums of gradients, one hop behind the shards they belong to.

    A sum starts empty on the first rank after its source, and goes home in one send from the last
    rank that adds to it. So it makes no more hops than its shard; the owner's own share, which
    never travels, is added at `home`.
    """

    home: Packet | None = None
    _home_buffer: Tensor | None = None

    @staticmethod
    def _order_on(device: torch.device) -> Order:
        """As kernels write gradients."""
        return TOKEN_MAJOR

    def close(self) -> None:
        super().close()
        if self._home_buffer is not None:
            BUFFERS.give(self._home_buffer)

    def _messages(self, hop: int, packet: Packet | None) -> tuple[list[Message], list[Message]]:
        receives, sends = super()._messages(hop, packet)
        plan = self._plan
        source, last = self._source(hop - 1), hop - 1
        if packet is not None and plan.reaches[source].num_hops == last:
            self._add(sends, packet, source)
        if plan.arrives(plan.rank, last) and plan.reaches[plan.rank].num_hops == last:
            start, end = plan.reaches[plan.rank].cols
            self._home_buffer = self._take(end - start)
            self.home = self._packet(self._home_buffer, plan.rank)
            self._add(receives, self.home, plan.rank + last)
        return receives, sends
