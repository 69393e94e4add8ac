"""Messages: what travels is what the plan says, in one message per hop and two buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_ring import Contiguous, Mask, Striped, ZigZag
from dtensor_ring.buffer import MAX_SPARES, BufferPool
from dtensor_ring.comm import Packet, Rotation
from dtensor_ring.wire import GroupWire
from tests.pool import Pool
from tests.rings import Ring

CAUSAL, FULL = Mask.causal(), Mask.full()
LIKE = torch.empty(2, 1, 0, 3), torch.empty(2, 1, 0, 2)
PER_COLUMN = 2 * (3 + 2)  # numbers of both tensors


class Message(NamedTuple):
    """A send or a receive, as this rank posted it."""

    what: str
    peer: int
    numel: int
    dtype: torch.dtype


@contextmanager
def recorded() -> Iterator[list[list[Message]]]:
    """The messages of each hop that has any."""
    hops: list[list[Message]] = []
    start = dist.batch_isend_irecv

    def record(operations: list[dist.P2POp]) -> list[dist.Work]:
        hops.append(
            [
                Message(x.op.__name__, x.group_peer, x.tensor.numel(), x.tensor.dtype)
                for x in operations
            ]
        )
        return start(operations)

    with patch.object(dist, "batch_isend_irecv", record):
        yield hops


def messages_of(ring: Ring, rank: int, per_column: int, dtype: torch.dtype) -> list[list[Message]]:
    """What a rank has to receive and to send at each hop, from the reaches of the shards."""
    reaches, hops = ring.plans()[0].reaches, []
    for hop in range(1, ring.world_size):
        messages = []
        for what, held, peer in (("irecv", hop, rank - 1), ("isend", hop - 1, rank + 1)):
            reach = reaches[(rank - held) % ring.world_size]
            if hop <= reach.num_hops:
                numel = (reach.cols[1] - reach.cols[0]) * per_column
                messages.append(Message(what, peer % ring.world_size, numel, dtype))
        hops += [messages] if messages else []
    return hops


RINGS = {
    "zigzag": Ring(ZigZag(), 4, 16, CAUSAL),
    "striped, three": Ring(Striped(), 3, 12, FULL),
    "contiguous": Ring(Contiguous(), 4, 16, CAUSAL),
    "uneven": Ring(Contiguous(), 4, 10, FULL),
    "empty shards": Ring(ZigZag(), 4, 5, FULL),
    "window": Ring(Contiguous(), 4, 16, Mask.sliding(2)),
    "window ahead": Ring(Contiguous(), 3, 12, Mask(0, 1)),
    "two ranks": Ring(ZigZag(), 2, 8, CAUSAL),
    "one rank": Ring(ZigZag(), 1, 8, CAUSAL),
    "documents": Ring(Contiguous(), 4, 16, CAUSAL, ((0, 4, 8, 9, 12, 16),)),
    "rows of documents": Ring(ZigZag(), 4, 16, CAUSAL, ((0, 2, 16), (0, 14, 15))),
}


@pytest.mark.parametrize("ring", RINGS.values(), ids=list(RINGS))
def test_rotation(pool: Pool, ring: Ring) -> None:
    answers = pool.run(ring.world_size, _rotate, ring)
    for rank, (hops, arrived, num_buffers) in enumerate(answers):
        assert hops == messages_of(ring, rank, PER_COLUMN, torch.float32), f"rank {rank}"
        assert num_buffers <= 2, f"rank {rank}"
        plan = ring.plans()[rank]
        for index, step in enumerate(plan.steps[1:], start=1):
            positions = ring.positions(step.source)[slice(*step.cols)].tolist()
            expected = positions if plan.arrives(step.source, index) else None
            assert arrived[index - 1] == expected, f"hop {index} of rank {rank}"
        assert arrived[-1] is None, "nothing follows the last step"


def _rotate(ring: Ring) -> tuple[list[list[Message]], list[list[float] | None], int]:
    """Messages, the positions that arrived at each hop, and how many buffers were used."""
    plan = ring.plans()[dist.get_rank()]
    rotation = Rotation(GroupWire(dist.group.WORLD), plan, LIKE, torch.float32)
    packet, packets, arrived = None, [], []
    if plan.reaches[plan.rank].num_hops:
        packet = rotation.packet(plan.rank)
        mine = ring.positions(plan.rank)[slice(*plan.reaches[plan.rank].cols)]
        for view in packet.pair:
            view.copy_(mine.view(1, 1, -1, 1))
    with recorded() as hops:
        for hop in range(1, plan.num_steps + 1):
            packets.append(packet)
            rotation.post(hop, packet)
            packet = rotation.wait()
            arrived.append(packet and _positions(packet))
    rotation.close()
    return hops, arrived, len({x.flat.untyped_storage().data_ptr() for x in packets if x})


def _positions(packet: Packet) -> list[float]:
    columns = torch.cat([x.permute(2, 0, 1, 3).flatten(1) for x in packet.pair], 1)
    assert (columns == columns[:, :1]).all(), f"shards are mixed up:\n{columns}"
    return columns[:, 0].tolist()


@pytest.mark.parametrize("num_cols", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_packet_shares_its_buffer(num_cols: int, dtype: torch.dtype) -> None:
    buffer = torch.zeros(8 * 5 * 2 * (3 * 4 + 3 * 6) + 3, dtype=torch.uint8)
    like = torch.empty(2, 3, 9, 4), torch.empty(2, 3, 9, 6)
    packet = Packet(buffer, like, num_cols, dtype)
    assert [x.shape for x in packet.pair] == [(2, 3, num_cols, 4), (2, 3, num_cols, 6)]
    assert all(x.is_contiguous() for x in packet.pair), "as kernels like them"
    assert packet.flat.shape == (2 * 3 * num_cols * (4 + 6),)
    for number, x in enumerate(packet.pair, start=1):
        x.fill_(number)
    numel = 2 * 3 * num_cols
    expected = torch.tensor([1] * 4 * numel + [2] * 6 * numel, dtype=dtype)
    assert torch.equal(packet.flat, expected), "key, then value, and nothing between"
    assert packet.flat.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def test_spare_buffers_are_reused_and_few() -> None:
    spares, cpu = BufferPool(), torch.device("cpu")
    buffers = [spares.take(size, cpu) for size in (100, 300, 200)]
    assert [x.numel() for x in buffers] == [100, 300, 200]
    for buffer in buffers:
        spares.give(buffer)
    assert spares.take(150, cpu) is buffers[2], "the smallest that fits"
    assert spares.take(150, cpu) is buffers[1], "the next"
    assert spares.take(150, cpu).numel() == 150, "a new one, none fits"
    many = [torch.empty(50 + n, dtype=torch.uint8) for n in range(2 * MAX_SPARES)]
    for buffer in many:
        spares.give(buffer)
    taken = {id(spares.take(1, cpu)) for _ in many} & {id(x) for x in many}
    assert taken == {id(x) for x in many[-MAX_SPARES:]}, "the last ones are kept"


def test_buffers_of_inference_mode_serve_outside_of_it() -> None:
    with torch.inference_mode():
        buffer = BufferPool().take(4, torch.device("cpu"))
    written: Tensor = buffer.fill_(1)
    assert written.sum() == 4
