"""Messages of a ring: one per hop, posted before a step's kernels, waited for after."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from dtensor_ring.buffer import BUFFERS
from dtensor_ring.execute import Pair
from dtensor_ring.gradient import GradientShare, GradientSum
from dtensor_ring.order import HEAD_MAJOR, TOKEN_MAJOR, Order, strides
from dtensor_ring.plan import Plan
from dtensor_ring.route import Mail
from dtensor_ring.tile import Span, length
from dtensor_ring.trace import Label
from dtensor_ring.wire import Message, Wire, Work


class Packet:
    """Columns of two tensors `(B, N, C, H)` side by side in a buffer: what one message moves."""

    def __init__(
        self, buffer: Tensor, like: Pair, cols: Span, dtype: torch.dtype, order: Order = HEAD_MAJOR
    ) -> None:
        flat = buffer[: buffer.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        tensors, offset = [], 0
        for x in like:
            batch, heads, _, head_dim = x.shape
            shape = batch, heads, length(cols), head_dim
            numel = prod(shape)
            tensors.append(flat[offset : offset + numel].as_strided(shape, strides(shape, order)))
            offset += numel
        self.buffer, self.cols = buffer, cols
        self.flat = flat[:offset]
        self.pair = (tensors[0], tensors[1])

    def fill(self, shard: Pair) -> None:
        """Copy its columns of a whole shard."""
        for view, x in zip(self.pair, shard, strict=True):
            view.copy_(x[:, :, slice(*self.cols)])


class Rotation:
    """Sends and receives packets, one hop at a time, in buffers that are used again and again."""

    def __init__(
        self,
        wire: Wire,
        rank: int,
        mails: Sequence[Mail],
        like: Pair,
        dtype: torch.dtype,
        order: Order,
    ) -> None:
        wire.prepare(like[0].device)
        self._wire, self._rank, self._mails = wire, rank, mails
        self._like, self._dtype, self._order = like, dtype, order
        self._buffers: list[Tensor] = []
        self._free: list[Tensor] = []
        self._works: Sequence[Work] = []
        self._arriving: dict[int, Packet] = {}  # by source
        self._passing: Packet | None = None  # what the next hop sends, if it sends any

    def close(self) -> None:
        """Give the buffers back: no packet may be used any more."""
        for buffer in self._buffers:
            BUFFERS.give(buffer)

    def _packet(self, cols: Span) -> Packet:
        """A packet for those columns, in a buffer that nothing else is in."""
        if not self._free:
            parcels = [x for mail in self._mails for side in mail for x in side]
            self._free.append(self._take(max(length(parcel.cols) for parcel in parcels)))
            self._buffers += self._free
        return Packet(self._free.pop(), self._like, cols, self._dtype, self._order)

    def _take(self, num_cols: int) -> Tensor:
        per_col = sum(x.shape[0] * x.shape[1] * x.shape[3] for x in self._like)
        return BUFFERS.take(num_cols * per_col * self._dtype.itemsize, self._like[0].device)

    def _start(self, hop: int) -> None:
        """Send what is passing, if this hop sends any, and begin to receive; nothing empty."""
        sends, receives = self._mails[hop]
        packet = self._passing
        self._arriving = {parcel.source: self._packet(parcel.cols) for parcel in receives}
        incoming = [Message(self._arriving[x.source].flat, x.peer) for x in receives]
        assert packet is not None or not sends, "a peer would wait for it"
        outgoing = [Message(packet.flat, x.peer) for x in sends if packet is not None]
        self._works = self._wire.start(
            *([x for x in messages if x.flat.numel()] for messages in (incoming, outgoing))
        )

    def _finish(self) -> Packet | None:
        """What came home, once the sends are done too; what else came is passing.

        Other buffers are free then.
        """
        for work in self._works:
            work.wait()
        arrived, self._arriving, self._works = self._arriving, {}, []
        kept = {id(packet.buffer) for packet in arrived.values()}
        self._free = [buffer for buffer in self._buffers if id(buffer) not in kept]
        home = arrived.pop(self._rank, None)
        self._passing = next(iter(arrived.values()), None)
        return home


class ShardRotation(Rotation):
    """Moves keys and values; `held` are those to compute on."""

    def __init__(self, wire: Wire, plan: Plan, shard: Pair) -> None:
        order = self.order_on(shard[0].device)
        super().__init__(wire, plan.rank, plan.shards, shard, shard[0].dtype, order)
        self.held = self._shard = shard

    @staticmethod
    def order_on(device: torch.device) -> Order:
        """As kernels read fastest what arrives."""
        return HEAD_MAJOR if device.type == "cpu" else TOKEN_MAJOR

    def post(self, hop: int, label: Label) -> None:
        """Start that hop: what came with the last one goes on, or a part of the own shard goes."""
        for parcel in self._mails[hop].sends:
            if parcel.source == self._rank:
                with label("pack"):
                    self._passing = self._packet(parcel.cols)
                    self._passing.fill(self._shard)
                if hop == 1 and parcel.cols == (0, self._shard[0].shape[2]):
                    self.held = self._passing.pair  # tokens of a head lie next to each other there
        with label("send"):
            self._start(hop)

    def wait(self, label: Label) -> None:
        """Until `held` is what came in."""
        with label("wait"):
            self._finish()
        self.held = self._passing.pair if self._passing else self._shard


class SumRotation(Rotation):
    """Moves the sums of gradients, one hop behind the shards they belong to."""

    def __init__(self, wire: Wire, plan: Plan, shard: Pair, dtype: torch.dtype) -> None:
        # As kernels write gradients.
        super().__init__(wire, plan.rank, plan.sums, shard, dtype, TOKEN_MAJOR)
        coming = [parcel.source for mail in plan.sums for parcel in mail.receives]
        self._num_homes = coming.count(plan.rank)  # still to come

    def post(self, step: int, shares: tuple[GradientShare, GradientShare], label: Label) -> None:
        """Start the hop behind that step: to the sum that came, or a new one, goes its share."""
        with label("merge"):
            for parcel in self._mails[step].sends:
                is_new = self._passing is None
                packet = self._passing or self._packet(parcel.cols)
                for total, share in zip(packet.pair, shares, strict=True):
                    share.add_to(total, first=is_new)
                self._passing = packet
        with label("send sums"):
            self._start(step)

    def wait(self, grads: tuple[GradientSum, GradientSum], label: Label) -> None:
        """Until a sum has come by, or home: then it is added to the gradients of the own shard."""
        with label("wait for sums"):
            home = self._finish()
        if home:
            with label("merge"):
                self._num_homes -= 1
                for grad, total in zip(grads, home.pair, strict=True):
                    grad.add_home(total, home.cols, is_last=not self._num_homes)
            self._free.append(home.buffer)
