"""Counts what a process group's transport sends and receives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from dtensor_ring.lab.recorded import Cost
from dtensor_ring.transport.transport import P2P, ProcessGroupTransport


def counted(run: Callable[[], Any]) -> tuple[Any, Cost]:
    """What a call returns, and its messages; buffers are not counted."""
    cost, start = Cost(), ProcessGroupTransport.start

    def counting(this: Any, receives: list[P2P], sends: list[P2P]) -> Any:
        nonlocal cost
        sent, received = (sum(x.flat.nbytes for x in side) for side in (sends, receives))
        cost += Cost(sent, received, len(sends))
        return start(this, receives, sends)

    with patch.object(ProcessGroupTransport, "start", counting):
        result = run()
    return result, cost
