"""An all-to-all whose keys and values travel in eight bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtensor_ring.all_to_all.plan import AllToAllPlan
from dtensor_ring.all_to_all.run import TensorShape, messages_of, run_all_to_all
from dtensor_ring.compute.memory import TOKEN_MAJOR, empty
from dtensor_ring.compute.trace import Label
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.plan import KeyOwners
from dtensor_ring.quantised.block_scales import Quantised
from dtensor_ring.transport.quantised_rotation import (
    PacketSize,
    QuantisedPacket,
    ScaleBlocks,
    packet_size,
    quantised_pair,
)
from dtensor_ring.transport.transport import Transport


def exchanged(
    tensors: list[Tensor],
    plan: AllToAllPlan,
    owners: KeyOwners | None,
    heads: tuple[tuple[int, ...], int],
    is_back: bool,
    kv_dtype: torch.dtype | None,
    transport: Transport,
    label: Label,
) -> list[Tensor]:
    """Return the tensors after an all-to-all, in eight bits or not.

    Args:
        tensors: as `run_all_to_all` or, with a dtype of eight bits, `run_rounded` takes them.
        plan: the plan for tokens.
        owners: whose keys a rank gets; `None` without a dtype of eight bits.
        heads: the number of heads of each tensor, and of key heads.
        is_back: whether heads are given for tokens.
        kv_dtype: the dtype of eight bits, or `None`.
        transport: moves the messages.
        label: names the all-to-all in a profile.

    Raises:
        ValueError: if the heads cannot be sharded over the ranks.
    """
    if kv_dtype is not None:
        assert owners is not None, "scales are those of the blocks of an owner"
        return run_rounded(tensors, kv_dtype, plan, owners, heads, transport, label)
    num_heads, num_key_heads = heads
    shapes = tuple(map(TensorShape.of, tensors))
    messages = messages_of(plan, num_heads, num_key_heads, shapes, is_back)
    return run_all_to_all(tensors, messages, transport, label)


class RoundedTensor(NamedTuple):
    """A tensor of quantised keys or values, which has a row for each token or for each block.

    Attributes:
        number: 0 for keys, 1 for values.
        name: the field of `Quantised`.
        rows: `(B, N, rows, ...)`.
        block_size: tokens of a row.
    """

    number: int
    name: str
    rows: Tensor
    block_size: int


# Note [Rounded once]: the owner of a shard rounds its keys and values, in blocks of its tokens, and
# sends the rounded numbers and their scales in one message. All ranks, the owner too, compute with
# the dequantised values. If a ring among groups follows, the rounded numbers travel on unchanged.
# So nothing is rounded twice, and results are those of a ring in eight bits.
def run_rounded(
    tensors: Sequence[Tensor],
    dtype: torch.dtype,
    plan: AllToAllPlan,
    owners: KeyOwners,
    heads: tuple[tuple[int, ...], int],
    transport: Transport,
    label: Label,
) -> list[Tensor]:
    """Return the tensors after an all-to-all to heads, see `run_all_to_all`.

    Args:
        tensors: the last two are keys and values, which travel in eight bits; see
            Note [Rounded once].
        dtype: the dtype of eight bits.
        plan: the plan for tokens; a rank sends its whole shard to each rank of its group.
        owners: whose keys a rank gets.
        heads: the number of heads of each tensor, and of key heads.
        transport: moves the messages.
        label: names the all-to-all in a profile.

    Raises:
        ValueError: if the heads cannot be sharded over the ranks.
    """
    (*others, key, value), (num_heads, num_key_heads) = tensors, heads
    with label("pack"):
        pair = quantised_pair((key, value), dtype)
    leaving = list(_tensors_of(pair))
    shapes = *map(TensorShape.of, others), *(TensorShape.of(x.rows, x.block_size) for x in leaving)
    counts = *num_heads[:-2], *[num_key_heads] * len(leaving)
    messages = messages_of(plan, counts, num_key_heads, shapes)
    found = run_all_to_all([*others, *(x.rows for x in leaving)], messages, transport, label)
    results = found[: len(others)]
    with label("unpack"):
        packet = _packet(pair, leaving, found[len(others) :], plan, owners)
        results += [_token_major(x) for x in packet.dequantised(key.dtype)]
        if owners.num_groups > 1:
            results.append(empty_rounded(results[-2:], dtype, plan.heads))
            cols = packet.cols
            packet.empty_in(results[-1], plan.rank, cols).take(packet)
    return results


def _tensors_of(pair: tuple[Quantised, Quantised]) -> Iterator[RoundedTensor]:
    """Yield all tensors; numbers as bytes, as few kernels know all dtypes of eight bits."""
    for number, q in enumerate(pair):
        yield RoundedTensor(number, "data", q.data.view(torch.uint8), 1)
        for name in ("scales", "means"):
            x = getattr(q, name)
            if x is not None:
                yield RoundedTensor(number, name, x, q.block_size)


def _packet(
    pair: tuple[Quantised, Quantised],
    left: Sequence[RoundedTensor],
    arrived: Sequence[Tensor],
    plan: AllToAllPlan,
    owners: KeyOwners,
) -> QuantisedPacket:
    """Return all that arrived, if `pair` and its tensors left."""
    found: tuple[dict[str, Any], ...] = {}, {}
    for (number, name, _, _), x in zip(left, arrived, strict=True):
        found[number][name] = x.view(pair[number].data.dtype) if name == "data" else x
    key, value = (replace(q, **x) for q, x in zip(pair, found, strict=True))
    cols, blocks = Cols.union([(0, plan.num_tokens[1])]), ScaleBlocks(key.block_size, owners)
    return QuantisedPacket(plan.rank, cols, (key, value), blocks)


def _token_major(x: Tensor) -> Tensor:
    return empty(x, x.shape, TOKEN_MAJOR).copy_(x)


def empty_rounded(pair: Sequence[Tensor], dtype: torch.dtype, num_owners: int) -> Tensor:
    """Return bytes for keys and values that travel on.

    Args:
        pair: keys and values of a rank after the all-to-all.
        dtype: the dtype of eight bits.
        num_owners: ranks of a group.
    """
    key, value = pair
    batch, heads, _, head_dim = key.shape
    size = packet_size(dtype, batch, heads, (head_dim, value.shape[3]))
    return key.new_empty(room_of_rounded(size, key.shape[2], num_owners), dtype=torch.uint8)


def room_of_rounded(size: PacketSize, num_tokens: int, num_owners: int) -> int:
    """Return the bytes that are enough for tokens of several owners, whoever has how many.

    >>> room_of_rounded(PacketSize(4, 1, ScaleBlocks(64)), 100, 2)
    403
    """
    # The last block of each owner may have one token only.
    num_blocks = (num_tokens + num_owners * (size.blocks.size - 1)) // size.blocks.size
    return size.of(num_tokens, num_blocks)
