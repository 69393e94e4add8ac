"""Packets: columns of two tensors side by side in a buffer."""

from __future__ import annotations

import pytest
import torch

from dtensor_ring.compute.memory import HEAD_MAJOR, TOKEN_MAJOR, Order, empty
from dtensor_ring.compute.trace import Label
from dtensor_ring.planning.demand import Cols
from dtensor_ring.transport.rotation import Packet
from tests.columns import indices_of


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
