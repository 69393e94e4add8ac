"""The command `schedule`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.schedule import describe_schedule


def schedule(
    seq_len: int,
    world_size: int,
    layout: str | None,
    mask: Mask,
    cu_seqlens: Sequence[int] | None,
    as_json: bool,
) -> int:
    """Print the work of each rank at each step; returns the exit status."""
    try:
        found = describe_schedule(layout or "zigzag", mask, seq_len, world_size, cu_seqlens)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if not as_json:
        print(found)
        return 0
    measures = {"imbalance": found.imbalance, "makespan": found.makespan}
    print(json.dumps({"areas": found.areas, "received": found.received, **measures}))
    return 0
