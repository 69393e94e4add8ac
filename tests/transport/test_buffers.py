"""Buffers of messages, which serve one call after another."""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_ring.transport.transport import MAX_SPARES, BufferPool


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
