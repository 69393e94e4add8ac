"""The command `compare`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from dtensor_ring.planning.masks.mask import Mask
from dtensor_ring.transport.comparison import compare_strategies


def compare(
    seq_len: int,
    world_size: int,
    layout: str | None,
    mask: Mask,
    cu_seqlens: Sequence[int] | None,
    heads: tuple[int, int],
    head_dim: int,
    max_held: int | None,
    as_json: bool,
) -> int:
    """Print what each strategy costs, see `compare_strategies`; returns the exit status."""
    try:
        found = compare_strategies(
            *(mask, seq_len, world_size, heads, head_dim, cu_seqlens),
            layout=layout or "zigzag",
            max_held=max_held,
        )
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps([asdict(row) for row in found.rows]) if as_json else found)
    return 0
