"""Move keys and values in eight bits: each packet has their bytes and the scales of their blocks.

Note [Quantised keys and values]: a rank quantises its shard once per loop, and everybody attends to
what that shard is after it was dequantised, the rank itself included, and with one rank, too. So
results do not depend on who owns what. Backward quantises the saved keys and values again, which
gives the same bits: that costs one pass over a shard, and no memory between forward and backward,
where autograd keeps the originals in any case. Gradients are those of attention at the dequantised
keys and values; they pass straight through to the originals.

Blocks are counted in the owner's shard. A packet of some of its columns has the scales of all
blocks that these columns touch, before the bytes, so that scales are aligned in its buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtensor_ring.compute.execute import Pair
from dtensor_ring.compute.memory import TOKEN_MAJOR, pack, strides
from dtensor_ring.compute.trace import Label
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.plan import Plan, Step
from dtensor_ring.quantised.block_scales import (
    BLOCK_SIZE,
    FORMATS,
    Quantised,
    dequantise,
    num_bytes,
    quantise_keys,
    quantise_values,
)
from dtensor_ring.transport.rotation import Packet, ShardRotation
from dtensor_ring.transport.transport import Transport

# The format of each dtype that a policy may name.
BY_DTYPE = {format.dtype: format for format in FORMATS.values()}


class PacketSize(NamedTuple):
    """How many bytes a packet has.

    Attributes:
        column: bytes of a column.
        block: bytes of the scales of a block of columns, 0 without any.
    """

    column: int
    block: int = 0

    def __call__(self, cols: Cols) -> int:
        """Return the bytes of a packet of these columns.

        >>> PacketSize(256, 8)(Cols(((0, 4), (100, 170))))
        18968
        """
        num_blocks = len(cols.blocks(BLOCK_SIZE)) if self.block else 0
        return len(cols) * self.column + num_blocks * self.block


def packet_size(dtype: torch.dtype, batch: int, heads: int, head_dims: Sequence[int]) -> PacketSize:
    """Return the size of packets of keys and values.

    Args:
        dtype: the dtype in which they travel; one of 8 bits has scales.
        batch: rows of the batch.
        heads: heads of keys and values.
        head_dims: head dims of keys and of values.
    """
    column = batch * heads * sum(head_dims) * dtype.itemsize
    format = BY_DTYPE.get(dtype)
    if format is None:
        return PacketSize(column)
    kinds = zip(("keys", "values"), head_dims, strict=True)
    whole = sum(num_bytes((batch, heads, 1, dim), format, BLOCK_SIZE, kind) for kind, dim in kinds)
    return PacketSize(column, whole - column)


class QuantisedPacket(Packet):
    """Columns of quantised keys and values, and the scales of the blocks that they touch.

    Args:
        cols: the columns, counted in the whole shard.
        parts: the keys and the values.
        buffer: the uint8 tensor that holds all of it; `None` for the owner's whole shard.
    """

    def __init__(
        self, cols: Cols, parts: tuple[Quantised, Quantised], buffer: Tensor | None = None
    ) -> None:
        super().__init__(cols, (parts[0].data, parts[1].data), buffer)
        self._parts, self._blocks = parts, cols.blocks(BLOCK_SIZE)

    @classmethod
    def of(cls, shard: Pair, dtype: torch.dtype) -> QuantisedPacket:
        """Quantise a whole shard to an 8-bit dtype."""
        key, value = shard
        how = BY_DTYPE[dtype], BLOCK_SIZE
        parts = quantise_keys(key, *how), quantise_values(value, *how)
        return cls(Cols.union([(0, key.shape[2])]), parts)

    def empty_in(self, buffer: Tensor, cols: Cols) -> QuantisedPacket:
        """Return a packet of other columns of the shard, in a buffer; its content is undefined."""
        blocks, offset = cols.blocks(BLOCK_SIZE), 0
        made: tuple[dict[str, Any], ...] = {}, {}
        for number, name, x in self._tensors():
            batch, heads, _, dim = x.shape
            shape = batch, heads, len(cols if name == "data" else blocks), dim
            end = offset + prod(shape) * x.itemsize
            flat = buffer[offset:end].view(x.dtype)
            made[number][name] = flat.as_strided(shape, strides(shape, TOKEN_MAJOR))
            offset = end
        key, value = (replace(q, **x) for q, x in zip(self._parts, made, strict=True))
        return QuantisedPacket(cols, (key, value), buffer)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(x.nbytes for _, _, x in self._tensors())

    def take(self, whole: QuantisedPacket) -> None:
        """Copy the columns of this packet from one that has them among its own."""
        cols, blocks = self.cols.within(whole.cols), self._blocks.within(whole._blocks)
        for (_, name, to), (_, _, x) in zip(self._tensors(), whole._tensors(), strict=True):
            if name == "data":  # copied as bytes: few kernels know all dtypes of 8 bits
                pack(to.view(torch.uint8), x.view(torch.uint8), cols)
            else:
                pack(to, x, blocks)

    def dequantised(self, dtype: torch.dtype) -> Pair:
        """Return keys and values in the dtype of the kernels."""
        key, value = (dequantise(self._from_block(q), dtype) for q in self._parts)
        return key, value

    def messages(self, is_apart: bool) -> list[Tensor]:
        """Return the one message that has all of it."""
        assert self.buffer is not None, "only packets travel"
        return [self.buffer[: self.num_bytes]]

    def _tensors(self) -> list[tuple[int, str, Tensor]]:
        """Return all tensors, the widest dtype first: so each is aligned in a buffer."""
        names = "scales", "means", "data"
        each = ((i, name, getattr(q, name)) for i, q in enumerate(self._parts) for name in names)
        found = [x for x in each if x[2] is not None]
        return sorted(found, key=lambda x: -x[2].itemsize)

    def _from_block(self, q: Quantised) -> Quantised:
        """Return the tensors so that blocks are counted from the first column of the packet."""
        spans = [(first * BLOCK_SIZE, end * BLOCK_SIZE) for first, end in self._blocks.spans]
        at = self.cols.within(Cols.union(spans))
        if at.spans in ((), ((0, len(at)),)):
            return q
        # The packet begins within a block, or has gaps: each column gets scales of its own.
        own: dict[str, Any] = {x: self._by_column(getattr(q, x), at) for x in ("scales", "means")}
        return replace(q, block_size=1, **own)

    def _by_column(self, x: Tensor | None, at: Cols) -> Tensor | None:
        if x is None:
            return None
        made = x.new_empty(*x.shape[:2], len(at), x.shape[3])
        pack(made, x.repeat_interleave(BLOCK_SIZE, 2), at)
        return made


class QuantisedRotation(ShardRotation):
    """Moves keys and values in a dtype of 8 bits; see Note [Quantised keys and values]."""

    def __init__(self, transport: Transport, plan: Plan, shard: Pair, kv_dtype: Any = None) -> None:
        self._own = QuantisedPacket.of(shard, kv_dtype)
        of_kernels = self._own.dequantised(shard[0].dtype)
        super().__init__(transport, plan, of_kernels, kv_dtype)
        batch, heads, _, head_dim = shard[0].shape
        self._size = packet_size(kv_dtype, batch, heads, (head_dim, shard[1].shape[3]))

    def _kv(self, step: Step) -> Pair:
        packet: Any = self._resident.get(step.source)
        return self._shard if packet is None else packet.dequantised(self._shard[0].dtype)

    def _packet(self, cols: Cols) -> Packet:
        if not self._idle:
            self._idle.append(self._allocate())
        return self._own.empty_in(self._idle.pop(), cols)

    def _allocate(self) -> Tensor:
        hops = self._plan.shards + self._plan.sums
        room = max([self._size(x.cols) for hop in hops for x in hop.sends + hop.receives])
        return self._transport.allocate(room, self._shard[0].device)

    def _packed(self, source: int, cols: Cols, label: Label) -> Packet:
        whole: Any = self._own if source == self._rank else self._resident[source]
        if whole.cols == cols and whole.buffer is not None:
            return whole  # it goes on as it came
        packet: Any = self._packet(cols)
        with label("pack"):
            packet.take(whole)
        return packet


# What moves keys and values in each dtype; `ShardRotation` does in all others.
ROTATIONS: dict[Any, type[ShardRotation]] = dict.fromkeys(BY_DTYPE, QuantisedRotation)
