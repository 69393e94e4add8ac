"""Messages: what travels is what the plan says, one message per hop, in two or three buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_ring import Contiguous, Mask, Striped, ZigZag, comm
from dtensor_ring.buffer import MAX_SPARES, BufferPool
from dtensor_ring.comm import Packet, ShardRotation
from dtensor_ring.execute import Pair
from dtensor_ring.route import Mail
from dtensor_ring.tile import length
from dtensor_ring.trace import Label
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


def messages_of(mails: Sequence[Mail], per_column: int, dtype: torch.dtype) -> list[list[Message]]:
    """What a rank has to receive and to send at each hop that has messages, by its mails."""
    hops = [
        [
            Message(what, parcel.peer, length(parcel.cols) * per_column, dtype)
            for what, parcels in (("irecv", mail.receives), ("isend", mail.sends))
            for parcel in parcels
        ]
        for mail in mails
    ]
    return [hop for hop in hops if hop]


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
    "straight": Ring(ZigZag(), 4, 48, Mask.sliding(3)),
    "straight, a whole shard at each hop": Ring(Contiguous(), 4, 16, Mask.local(1, 4)),
    "straight, documents": Ring(ZigZag(), 4, 64, CAUSAL, ((0, 11, 19, 27, 34, 43, 53, 60),)),
    "rows of documents": Ring(ZigZag(), 4, 16, CAUSAL, ((0, 2, 16), (0, 14, 15))),
}


@pytest.mark.parametrize("ring", RINGS.values(), ids=list(RINGS))
def test_rotation(pool: Pool, ring: Ring) -> None:
    answers = pool.run(ring.world_size, _rotate, ring)
    for rank, (hops, held, num_buffers) in enumerate(answers):
        plan = ring.plans()[rank]
        assert hops == messages_of(plan.shards, PER_COLUMN, torch.float32), f"rank {rank}"
        assert num_buffers <= 2 + ring.goes_straight
        whole, *others = plan.steps
        steps = [whole, *(step if length(step.cols) else whole for step in others), whole]
        for hop, (step, positions) in enumerate(zip(steps, held, strict=True)):
            expected = ring.positions(step.source)[slice(*step.cols)].tolist()
            assert positions == expected, f"after hop {hop} of rank {rank}"


def _rotate(ring: Ring) -> tuple[list[list[Message]], list[list[float]], int]:
    """Messages, the positions held at first and after each hop, and how many buffers were used."""
    plan = ring.plans()[dist.get_rank()]
    mine = ring.positions(plan.rank).float().view(1, 1, -1, 1)
    shard = tuple(mine.expand(2, 1, -1, x.shape[3]).clone() for x in LIKE)
    rotation = ShardRotation(GroupWire(dist.group.WORLD), plan, (shard[0], shard[1]))
    held = [_positions(rotation.held)]
    taken: list[Tensor] = []
    with recorded() as hops, patch.multiple(comm, BUFFERS=BufferPool()):
        for hop in range(1, plan.num_steps + 1):
            label = Label("forward", hop - 1, 0)
            rotation.post(hop, label)
            assert _positions(rotation.held) == held[-1], "what is computed on stays"
            rotation.wait(label)
            held.append(_positions(rotation.held))
        with patch.object(comm.BUFFERS, "give", taken.append):
            rotation.close()
    return hops, held, len(taken)


def _positions(pair: Pair) -> list[float]:
    columns = torch.cat([x.permute(2, 0, 1, 3).flatten(1) for x in pair], 1)
    assert (columns == columns[:, :1]).all(), f"shards are mixed up:\n{columns}"
    return columns[:, 0].tolist()


def test_gloo_sends_nothing_of_a_gpu(pool: Pool) -> None:
    pool.run(2, _prepare_for_a_gpu)


def _prepare_for_a_gpu() -> None:
    with pytest.raises(ValueError, match=r"on CUDA and their group is gloo's, .*\"nccl\"\)"):
        GroupWire(dist.group.WORLD).prepare(torch.device("cuda"))


@pytest.mark.parametrize("num_cols", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_packet_shares_its_buffer(num_cols: int, dtype: torch.dtype) -> None:
    buffer = torch.zeros(8 * 5 * 2 * (3 * 4 + 3 * 6) + 3, dtype=torch.uint8)
    like = torch.empty(2, 3, 9, 4), torch.empty(2, 3, 9, 6)
    packet = Packet(buffer, like, (3, 3 + num_cols), dtype)
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
