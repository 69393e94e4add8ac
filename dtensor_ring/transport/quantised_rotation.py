"""Move keys and values in eight bits: each packet has their bytes and the scales of their blocks.

Blocks are counted in the owner's shard. A packet of some of its columns has the scales of all
blocks that these columns touch, before the bytes, so that scales are aligned in its buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtensor_ring.compute.execute import Pair
from dtensor_ring.compute.memory import TOKEN_MAJOR, Numbers, listed, pack, strides
from dtensor_ring.compute.trace import Label, note_pass, stands_for_gpu
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.lru import cached_bytes
from dtensor_ring.planning.plan import KeyOwners, Plan, Step
from dtensor_ring.planning.route import Transfer
from dtensor_ring.quantised.block_scales import (
    BLOCK_SIZE,
    FORMATS,
    Quantised,
    dequantise_pair,
    has_pair_kernel,
    num_bytes,
    quantise_pair,
)
from dtensor_ring.transport.rotation import Packet, ShardRotation
from dtensor_ring.transport.transport import Transport

# The format of each dtype that a policy may name.
BY_DTYPE = {format.dtype: format for format in FORMATS.values()}


class ScaleBlocks(NamedTuple):
    """The blocks of columns of shards.

    Attributes:
        size: columns of a block.
        owners: whose columns a shard has, in whose shards blocks are counted; `None` if it has
            one owner.
    """

    size: int
    owners: KeyOwners | None = None

    def touched(self, source: int, cols: Cols) -> Cols:
        """Return the numbers of the blocks that these columns touch.

        >>> ScaleBlocks(64).touched(0, Cols(((0, 4), (100, 170))))
        Cols(spans=((0, 3),))
        """
        if self.owners is None:
            return cols.blocks(self.size)
        # All columns, as the usual ring sends them: whole blocks, counted without a table.
        counts = self.owners.num_tokens(source)
        if cols.spans == ((0, sum(counts)),):
            return Cols(((0, sum(-(-x // self.size) for x in counts)),))
        return _places(self, source, cols)[0]

    def places(self, source: int, cols: Cols, device: torch.device) -> Tensor:
        """Return the place of each column's block among those touched."""
        if device.type == "meta":  # a list of millions of tokens takes seconds
            return torch.empty(len(cols), dtype=torch.int64, device=device)
        return _places(self, source, cols)[1].on(device)[0]


@cached_bytes(2**26, lambda found: 1000 + 150 * len(found[0].spans) + found[1].num_bytes)
def _places(blocks: ScaleBlocks, source: int, cols: Cols) -> tuple[Cols, Numbers]:
    """Return the blocks that columns touch, and the place of each column's among them."""
    numbers = listed(cols)
    if blocks.owners is None:
        of_columns = numbers // blocks.size
    else:
        # Along such a shard blocks do not ascend: its tokens come from several owners.
        of_columns = torch.from_numpy(blocks.owners.block_table(source, blocks.size))[numbers]
    touched, places = of_columns.unique(return_inverse=True)
    return Cols.union((x, x + 1) for x in touched.tolist()), Numbers(torch.int64, places)


class PacketSize(NamedTuple):
    """How many bytes a packet has.

    Attributes:
        column: bytes of a column.
        block: bytes of the scales of a block of columns, 0 without any.
        blocks: which columns are a block.
    """

    column: int
    block: int = 0
    blocks: ScaleBlocks = ScaleBlocks(1)

    def __call__(self, transfer: Transfer) -> int:
        """Return the bytes of a packet that is sent or received.

        >>> PacketSize(256, 8, ScaleBlocks(64))(Transfer(0, Cols(((0, 4), (100, 170))), 1))
        18968
        """
        source, cols, _ = transfer
        return self.of(len(cols), len(self.blocks.touched(source, cols)) if self.block else 0)

    def of(self, num_columns: int, num_blocks: int) -> int:
        """Return the bytes of columns with the scales of so many blocks."""
        return num_columns * self.column + num_blocks * self.block

    def of_shard(self, num_tokens: int) -> int:
        """Return the bytes of all tokens of an owner."""
        return self.of(num_tokens, -(-num_tokens // self.blocks.size))


def packet_size(
    dtype: torch.dtype,
    batch: int,
    heads: int,
    head_dims: Sequence[int],
    owners: KeyOwners | None = None,
) -> PacketSize:
    """Return the size of packets of keys and values.

    Args:
        dtype: the dtype in which they travel; one of 8 bits has scales.
        batch: rows of the batch.
        heads: heads of keys and values.
        head_dims: head dims of keys and of values.
        owners: in whose shards blocks are counted; `None` for those of the source.
    """
    column = batch * heads * sum(head_dims) * dtype.itemsize
    format = BY_DTYPE.get(dtype)
    if format is None:
        return PacketSize(column)
    kinds = zip(("keys", "values"), head_dims, strict=True)
    whole = sum(num_bytes((batch, heads, 1, dim), format, BLOCK_SIZE, kind) for kind, dim in kinds)
    return PacketSize(column, whole - column, ScaleBlocks(BLOCK_SIZE, owners))


def quantised_pair(shard: Pair, dtype: torch.dtype) -> tuple[Quantised, Quantised]:
    """Quantise the keys and values of a whole shard to an 8-bit dtype.

    Raises:
        ValueError: if the device cannot convert to the dtype, or the head dim is 0.
    """
    key, value = shard
    why_not = _why_no_numbers(dtype, key.device)
    if why_not is not None:
        raise ValueError(
            f"keys and values on {key.device.type} cannot travel as {dtype}: {why_not}; use "
            'TransferPolicy(kv_dtype="int8"), or leave kv_dtype out'
        )
    return quantise_pair(key, value, BY_DTYPE[dtype], BLOCK_SIZE)


@cache
def _why_no_numbers(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return the error of a device that cannot convert to a dtype; `None` if it can."""
    try:
        torch.zeros(1, device=device).to(dtype).float()
    except (NotImplementedError, RuntimeError, TypeError) as error:
        return str(error).partition("\n")[0]
    return None


class QuantisedPacket(Packet):
    """Columns of quantised keys and values, and the scales of the blocks that they touch.

    Args:
        source: whose shard it is.
        cols: the columns, counted in the whole shard.
        parts: the keys and the values.
        blocks: which columns of shards are a block.
        memory: the uint8 tensor that holds all of it, as one message; `None` if nothing does.
        is_own: whether it is a rank's own whole shard, whose memory no other packet may have.
    """

    def __init__(
        self,
        source: int,
        cols: Cols,
        parts: tuple[Quantised, Quantised],
        blocks: ScaleBlocks,
        memory: Tensor | None = None,
        is_own: bool = False,
    ) -> None:
        super().__init__(cols, (parts[0].data, parts[1].data), None if is_own else memory)
        self.memory = memory
        self._source, self._parts, self._blocks = source, parts, blocks
        self._touched = blocks.touched(source, cols)

    @classmethod
    def of(cls, source: int, shard: Pair, dtype: torch.dtype) -> QuantisedPacket:
        """Quantise a whole shard of one owner to an 8-bit dtype, on a GPU as it is sent.

        One launch writes the message there, so that nothing is packed if all of it is sent.
        """
        key, value = shard
        cols, blocks = Cols.union([(0, key.shape[2])]), ScaleBlocks(BLOCK_SIZE)
        is_dry = key.is_meta and stands_for_gpu()
        if not (is_dry or has_pair_kernel(key, value, BLOCK_SIZE)):
            return cls(source, cols, quantised_pair(shard, dtype), blocks)
        batch, heads, num_tokens, head_dim = key.shape
        size = packet_size(dtype, batch, heads, (head_dim, value.shape[3])).of_shard(num_tokens)
        memory = torch.empty(size, dtype=torch.uint8, device=key.device)
        packet = cls.lying_in(memory, source, shard, dtype, blocks)
        if is_dry:
            note_pass("pack", key.nbytes + value.nbytes + packet.num_bytes)
        else:
            quantise_pair(key, value, BY_DTYPE[dtype], BLOCK_SIZE, packet._parts)
        return packet

    @classmethod
    def lying_in(
        cls, buffer: Tensor, source: int, like: Pair, dtype: torch.dtype, blocks: ScaleBlocks
    ) -> QuantisedPacket:
        """Return the packet of a whole shard that a buffer holds; `like` has its shapes."""
        key, value = (x[:, :, :0] for x in like)
        none = cls(source, Cols(), quantised_pair((key, value), dtype), blocks)
        return none.empty_in(buffer, source, Cols.union([(0, like[0].shape[2])]), is_own=True)

    def empty_in(
        self, buffer: Tensor, source: int, cols: Cols, is_own: bool = False
    ) -> QuantisedPacket:
        """Return a packet of other columns, in a buffer; its content is undefined."""
        # A packet's buffer, each part dense and token-major:
        #     | scales of keys | scales of values | means of values | keys | values |
        blocks, offset = self._blocks.touched(source, cols), 0
        made: tuple[dict[str, Any], ...] = {}, {}
        for number, name, x in self._tensors():
            batch, heads, _, dim = x.shape
            shape = batch, heads, len(cols if name == "data" else blocks), dim
            end = offset + prod(shape) * x.itemsize
            flat = buffer[offset:end].view(x.dtype)
            made[number][name] = flat.as_strided(shape, strides(shape, TOKEN_MAJOR))
            offset = end
        key, value = (replace(q, **x) for q, x in zip(self._parts, made, strict=True))
        return QuantisedPacket(source, cols, (key, value), self._blocks, buffer, is_own)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(x.nbytes for _, _, x in self._tensors())

    def take(self, whole: QuantisedPacket) -> None:
        """Copy the columns of this packet from one that has them among its own."""
        if self.pair[0].is_meta:  # a dry run: nothing to copy
            return note_pass("packet", 2 * self.num_bytes)
        cols, blocks = self.cols.within(whole.cols), self._touched.within(whole._touched)
        for (_, name, to), (_, _, x) in zip(self._tensors(), whole._tensors(), strict=True):
            if name == "data":  # copied as bytes: few kernels know all dtypes of 8 bits
                pack(to.view(torch.uint8), x.view(torch.uint8), cols)
            else:
                pack(to, x, blocks)

    def dequantised(self, dtype: torch.dtype) -> Pair:
        """Return keys and values in the dtype of the kernels."""
        keys, values = self._parts
        key, value = dequantise_pair(self._by_token(keys), self._by_token(values), dtype)
        if key.is_meta:
            note_pass("pack", self.num_bytes + key.nbytes + value.nbytes)
        return key, value

    def messages(self, is_apart: bool) -> list[Tensor]:
        """Return the one message that has all of it."""
        assert self.memory is not None, "only what is one message travels"
        return [self.memory[: self.num_bytes]]

    def _tensors(self) -> list[tuple[int, str, Tensor]]:
        """Return all tensors, the widest dtype first: so each is aligned in a buffer."""
        names = "scales", "means", "data"
        each = ((i, name, getattr(q, name)) for i, q in enumerate(self._parts) for name in names)
        found = [x for x in each if x[2] is not None]
        return sorted(found, key=lambda x: -x[2].itemsize)

    def _by_token(self, q: Quantised) -> Quantised:
        """Return keys or values with scales of whole blocks, or else with scales by token."""
        spans, (size, owners) = self.cols.spans, self._blocks
        begins_with_block = len(spans) == 1 and spans[0][0] % size == 0
        if not spans or (owners is None and begins_with_block):
            return q
        # The packet begins within a block, has gaps, or the blocks of several owners alternate.
        places = self._blocks.places(self._source, self.cols, q.data.device)
        by_block = {"scales": q.scales, "means": q.means}
        own: dict[str, Any] = {
            name: None if x is None else x.index_select(2, places) for name, x in by_block.items()
        }
        return replace(q, block_size=1, **own)


# Note [Quantised keys and values]: a rank quantises its shard once per loop, and everybody attends
# to what that shard is after it was dequantised, the rank itself included, and with one rank, too.
# So results do not depend on who owns what. Backward quantises the saved keys and values again,
# which gives the same bits: that costs one pass over a shard, and no memory between forward and
# backward, where autograd keeps the originals in any case. Gradients are those of attention at the
# dequantised keys and values; they pass straight through to the originals.
class QuantisedRotation(ShardRotation):
    """Moves keys and values in a dtype of 8 bits; see Note [Quantised keys and values].

    Args:
        transport: moves the messages.
        plan: the plan of this rank.
        shard: keys and values of this rank.
        kv_dtype: the dtype of 8 bits.
        rounded: keys and values as their owners rounded them, if an all-to-all brought them, see
            Note [Rounded once]. Then `shard` are those, dequantised.
    """

    def __init__(
        self,
        transport: Transport,
        plan: Plan,
        shard: Pair,
        kv_dtype: Any = None,
        rounded: Tensor | None = None,
    ) -> None:
        owners = None if rounded is None else plan.owners
        if rounded is None:
            self._own = QuantisedPacket.of(plan.rank, shard, kv_dtype)
            of_kernels = self._own.dequantised(shard[0].dtype)
        else:
            blocks, of_kernels = ScaleBlocks(BLOCK_SIZE, owners), shard
            self._own = QuantisedPacket.lying_in(rounded, plan.rank, shard, kv_dtype, blocks)
        super().__init__(transport, plan, of_kernels, kv_dtype)
        batch, heads, _, head_dim = shard[0].shape
        size = packet_size(kv_dtype, batch, heads, (head_dim, shard[1].shape[3]), owners)
        moved = [x for hop in plan.shards + plan.sums for x in hop.sends + hop.receives]
        self._num_bytes = max(map(size, moved), default=0)

    def _kv(self, step: Step) -> Pair:
        packet: Any = self._resident.get(step.source)
        return self._shard if packet is None else packet.dequantised(self._shard[0].dtype)

    def _packet(self, source: int, cols: Cols) -> Packet:
        if not self._idle:
            self._idle.append(self._transport.allocate(self._num_bytes, self._device))
        return self._own.empty_in(self._idle.pop(), source, cols)

    def _packed(self, source: int, cols: Cols, label: Label) -> Packet:
        whole: Any = self._own if source == self._rank else self._resident[source]
        if whole.cols == cols and whole.memory is not None:
            return whole  # it goes as it was rounded, or on as it came
        packet: Any = self._packet(source, cols)
        with label("pack"):
            packet.take(whole)
        return packet


def shard_rotation(
    transport: Transport, plan: Plan, shard: Pair, kv_dtype: Any, rounded: Tensor | None
) -> ShardRotation:
    """Return the rotation of keys and values in a dtype, see `QuantisedRotation`."""
    if kv_dtype in BY_DTYPE:
        return QuantisedRotation(transport, plan, shard, kv_dtype, rounded)
    return ShardRotation(transport, plan, shard, kv_dtype)
