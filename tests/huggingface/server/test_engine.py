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
from tests.pool import on_ranks


@on_ranks(3)
def test_bytes_of_any_size() -> None:
    """Those that fit the first message, just or not at all, and empty ones."""
    group = dist.new_group(backend="gloo")
    for size in (0, 1, FRAME - 9, FRAME - 8, FRAME - 7, 3 * FRAME):
        sent = bytes(i % 251 for i in range(size))
        assert broadcast_bytes(group, b"" if group.rank() else sent) == sent


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
