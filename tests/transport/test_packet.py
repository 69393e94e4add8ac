"""Packets: columns of two tensors side by side in a buffer."""

from __future__ import annotations

import pytest
import torch

from dtensor_ring.compute.memory import HEAD_MAJOR
from dtensor_ring.transport.packet import Packet


@pytest.mark.parametrize("num_cols", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_packet_shares_its_buffer(num_cols: int, dtype: torch.dtype) -> None:
    buffer = torch.zeros(8 * 5 * 2 * (3 * 4 + 3 * 6) + 3, dtype=torch.uint8)
    like = torch.empty(2, 3, 9, 4), torch.empty(2, 3, 9, 6)
    packet = Packet(buffer, like, (3, 3 + num_cols), dtype, HEAD_MAJOR)
    assert [x.shape for x in packet.pair] == [(2, 3, num_cols, 4), (2, 3, num_cols, 6)]
    assert all(x.is_contiguous() for x in packet.pair), "as kernels like them"
    assert packet.flat.shape == (2 * 3 * num_cols * (4 + 6),)
    for number, x in enumerate(packet.pair, start=1):
        x.fill_(number)
    numel = 2 * 3 * num_cols
    expected = torch.tensor([1] * 4 * numel + [2] * 6 * numel, dtype=dtype)
    assert torch.equal(packet.flat, expected), "key, then value, and nothing between"
    assert packet.flat.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def test_a_part_of_a_packet() -> None:
    """Columns are counted in the whole shard, also where a pair begins later."""
    whole = torch.arange(2 * 9 * 3.0).view(1, 2, 9, 3), torch.arange(2 * 9 * 2.0).view(1, 2, 9, 2)
    first, second = (
        Packet(torch.zeros(500, dtype=torch.uint8), whole, cols, torch.float32, HEAD_MAJOR)
        for cols in ((2, 7), (4, 6))
    )
    first.fill(whole)
    second.fill(first.pair, first.cols[0])
    for part, x in zip(second.pair, whole, strict=True):
        assert torch.equal(part, x[:, :, 4:6])
