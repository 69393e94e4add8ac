"""What the first rank sends to all of them."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from parallel_plans.huggingface.server.engine import (
    FRAME,
    AskedTokens,
    StepCommands,
    broadcast_bytes,
)
from tests.pool import Pool


def received(sizes: list[int]) -> list[bytes]:
    group = dist.new_group(backend="gloo")
    sent = [bytes(i % 251 for i in range(size)) if group.rank() == 0 else b"" for size in sizes]
    return [broadcast_bytes(group, data) for data in sent]


def test_bytes_of_any_size(pool: Pool) -> None:
    """Those that fit the first message, just or not at all, and empty ones."""
    sizes = [0, 1, FRAME - 9, FRAME - 8, FRAME - 7, 3 * FRAME]
    for found in pool.run(3, received, sizes):
        assert found == [bytes(i % 251 for i in range(size)) for size in sizes]


@pytest.mark.parametrize(
    "commands",
    [
        StepCommands(),
        StepCommands(is_end=True),
        StepCommands(
            [AskedTokens("a", [1, 2], {"temperature": 0.1 + 0.2, "do_sample": True}, 2**61)], ["b"]
        ),
    ],
)
def test_commands_are_read_as_they_were_sent(commands: StepCommands) -> None:
    assert StepCommands.of(commands.to_bytes()) == commands
