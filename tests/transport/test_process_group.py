"""Messages between processes: their buffers, packets and policies."""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dtensor_ring import TransferPolicy
from dtensor_ring.compute.memory import HEAD_MAJOR, TOKEN_MAJOR, Order, empty
from dtensor_ring.compute.trace import Label
from dtensor_ring.planning.demand import Cols
from dtensor_ring.transport import transport as process_group
from dtensor_ring.transport.rotation import Packet
from dtensor_ring.transport.transport import (
    MAX_SPARES,
    P2P,
    BufferPool,
    ProcessGroupTransport,
    set_transport,
    transport_of,
)
from tests.columns import indices_of
from tests.pool import on_ranks


@on_ranks(2)
def test_gloo_sends_nothing_of_a_gpu() -> None:
    with pytest.raises(ValueError, match=r"on CUDA and their group is gloo's, .*\"nccl\"\)"):
        ProcessGroupTransport(dist.group.WORLD).prepare(torch.device("cuda"))


@on_ranks(2)
def test_receives_go_first() -> None:
    rank, group = dist.get_rank(), Posting()
    given, got = [torch.full((2,), 10.0 * rank + i) for i in range(2)], torch.zeros(2, 2)
    transport = ProcessGroupTransport(group)
    works = transport.start([P2P(x, 1 - rank) for x in got], [P2P(x, 1 - rank) for x in given])
    for work in works:
        work.wait()
    assert got.tolist() == [[10.0 * (1 - rank) + i] * 2 for i in range(2)]
    assert not transport.start([], [])
    assert group.order == ["recv", "recv", "send", "send"]


class Posting:
    """A group that remembers the order of what it starts."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def recv(self, *message: Any) -> dist.Work:
        self.order.append("recv")
        return dist.group.WORLD.recv(*message)

    def send(self, *message: Any) -> dist.Work:
        self.order.append("send")
        return dist.group.WORLD.send(*message)


@on_ranks(2)
def test_messages_of_gpus_start_together() -> None:
    started: list[str] = []

    def start(operations: list[dist.P2POp]) -> list[dist.Work]:
        started.extend(operation.op.__name__ for operation in operations)
        return []

    peer = 1 - dist.get_rank()
    with FakeTensorMode(), patch.object(dist, "batch_isend_irecv", start):
        coming, leaving = (P2P(torch.empty(2, device="cuda"), peer) for _ in range(2))
        ProcessGroupTransport(dist.group.WORLD).start([coming], [leaving])
    assert started == ["irecv", "isend"]


@on_ranks(1)
def test_the_transport_of_a_group() -> None:
    group = dist.group.WORLD
    assert isinstance(transport_of(group), ProcessGroupTransport)
    mine = ProcessGroupTransport(group)
    set_transport(group, mine)
    assert transport_of(group) is mine


class World:
    """A group whose ranks that backend connects, after a timeout of its own."""

    def __init__(self, backend: str) -> None:
        options = SimpleNamespace(_timeout=timedelta(seconds=77))
        self._backend = SimpleNamespace(name=lambda: backend, options=options)

    def _get_backend(self, device: torch.device) -> SimpleNamespace:
        assert device.type == "cuda"
        return self._backend


@pytest.mark.skipif(not dist.is_nccl_available(), reason="a build without NCCL")
def test_messages_of_gpus_have_a_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """In groups that are made here, which keep the timeout of the job."""
    for backend, device, is_urgent in (
        ("nccl", "cuda", True),
        ("nccl2", "cuda", True),
        ("nccl", "cpu", False),
        ("gloo", "cuda", False),
    ):
        world = SimpleNamespace(WORLD=World(backend))
        monkeypatch.setattr(process_group.dist, "group", world)
        options = process_group.axis_group_options(device)
        assert (options is not None) == is_urgent
        if options is not None:
            assert options.is_high_priority_stream
            assert options._timeout == timedelta(seconds=77)


# Buffers of messages, which serve one call after another.


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


# Packets: columns of two tensors side by side in a buffer.


@pytest.mark.parametrize("num_cols", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_packet_shares_its_buffer(num_cols: int, dtype: torch.dtype) -> None:
    buffer = torch.zeros(8 * 5 * 2 * (3 * 4 + 3 * 6) + 3, dtype=torch.uint8)
    like = torch.empty(2, 3, 9, 4), torch.empty(2, 3, 9, 6)
    packet = Packet.within(buffer, like, Cols.union([(3, 3 + num_cols)]), dtype)
    assert [x.shape for x in packet.pair] == [(2, 3, num_cols, 4), (2, 3, num_cols, 6)]
    (flat,) = packet.messages(is_apart=False)
    assert flat.shape == (2 * 3 * num_cols * (4 + 6),)
    for number, x in enumerate(packet.pair, start=1):
        x.fill_(number)
    numel = 2 * 3 * num_cols
    expected = torch.tensor([1] * 4 * numel + [2] * 6 * numel, dtype=dtype)
    assert torch.equal(flat, expected), "key, then value, and nothing between"
    assert flat.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    apart = packet.messages(is_apart=True)
    assert torch.equal(torch.cat(apart), expected), "the same, in two messages"
    assert [x.data_ptr() for x in apart] == [x.data_ptr() for x in packet.pair]


MANY = Cols(tuple((i, i + 1 + i % 5) for i in range(0, 120, 6)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cols", [Cols(((2, 7),)), Cols(((0, 1), (4, 6))), MANY], ids=str)
def test_a_packet_has_its_columns_side_by_side(cols: Cols, dtype: torch.dtype) -> None:
    whole = torch.randn(2, 3, 120, 4), torch.randn(2, 3, 120, 2)
    packet = Packet.within(torch.zeros(2**14, dtype=torch.uint8), whole, cols, dtype)
    packet.fill(whole, cols, Label("forward", 0, 0))
    for part, x in zip(packet.pair, whole, strict=True):
        assert torch.equal(part, x[:, :, indices_of(cols)].to(dtype))


@pytest.mark.parametrize(
    ("batch", "orders", "cols", "lies"),
    [
        (1, (TOKEN_MAJOR, TOKEN_MAJOR), ((0, 9),), True),
        (1, (TOKEN_MAJOR, TOKEN_MAJOR), ((2, 6),), True),
        (2, (TOKEN_MAJOR, TOKEN_MAJOR), ((0, 9),), True),
        (2, (TOKEN_MAJOR, TOKEN_MAJOR), ((2, 6),), False),
        (1, (TOKEN_MAJOR, TOKEN_MAJOR), ((0, 2), (4, 9)), False),
        (1, (TOKEN_MAJOR, HEAD_MAJOR), ((0, 9),), False),
        (1, (HEAD_MAJOR, TOKEN_MAJOR), ((0, 9),), False),
    ],
)
def test_columns_that_lie_in_one_piece(
    batch: int, orders: tuple[Order, Order], cols: tuple[tuple[int, int], ...], lies: bool
) -> None:
    like = torch.empty(0)
    key, value = (empty(like, (batch, 3, 9, 4), order).normal_() for order in orders)
    at = Cols(cols)
    packet = Packet.lying((key, value), at)
    assert (packet is not None) == lies
    if packet is not None:
        assert packet.buffer is None
        for message, x in zip(packet.messages(is_apart=True), (key, value), strict=True):
            part = x[:, :, indices_of(at)].transpose(1, 2)
            assert torch.equal(message, part.flatten())
            assert message.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


# The policy of transfers as the text that an op takes.

POLICIES = {
    "the default": {},
    "narrow": {"kv_dtype": torch.bfloat16, "grad_dtype": torch.float16},
    "eight bits": {"kv_dtype": "int8", "num_parts": 3, "transport": "symmetric"},
    "fixed": {"order": "fixed", "block": 64},
}


def test_every_field_is_in_a_case() -> None:
    given = {name for fields_of in POLICIES.values() for name in fields_of}
    assert given == {x.name for x in fields(TransferPolicy) if x.init}


@pytest.mark.parametrize("given", POLICIES.values(), ids=list(POLICIES))
def test_a_policy_comes_back_from_its_text(given: dict[str, object]) -> None:
    policy = TransferPolicy(**given)  # type: ignore[arg-type]
    assert TransferPolicy.of_spec(policy.spec) == policy
    assert (policy.spec == "") == (not given), "an op takes no text for the default"
    assert len(policy.spec.split()) == len(given)
