"""Process groups whose ranks are threads: ops run over any number of them in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from unittest.mock import patch

import torch

from dtensor_ring.agreement import group_state
from dtensor_ring.agreement.group_state import GroupState
from dtensor_ring.ops import options
from dtensor_ring.transport import transport as process_group
from tests.played import PlayedTransport, play

Result = TypeVar("Result")


class PlayedGroup:
    """What the ops ask of a process group."""

    def __init__(self, rank: int, size: int, transport: PlayedTransport) -> None:
        self._rank, self._size, self.transport = rank, size, transport
        self.group_name = f"played {rank}"

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def without_records(group: Any) -> None:
    """Let calls of a group be as they are, and compare none."""
    known = GroupState(tuple(range(group.size())), sends_records=False)
    group_state._GROUP_STATES[group] = known


def play_group(world_size: int, run: Callable[[PlayedGroup], Result]) -> list[Result]:
    """What `run(group)` returns on each rank, with gradients; the ops know groups by their name."""
    groups: dict[str, PlayedGroup] = {}

    def of_rank(rank: int, transport: PlayedTransport) -> Result:
        group = PlayedGroup(rank, world_size, transport)
        groups[group.group_name] = group
        process_group._TRANSPORTS[group] = transport  # type: ignore[index]
        without_records(group)  # call records are for processes, which could differ
        with torch.enable_grad():
            return run(group)

    with patch.object(options, "_resolve_process_group", groups.__getitem__):
        return play(world_size, of_rank)
