"""Chooses the strategy of an attention: the fastest one on a machine."""

from __future__ import annotations

from typing import Any

from dtensor_ring.planning.mask import Boundaries, Mask
from dtensor_ring.planning.route import ROUTES
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.strategy import Strategy, why_not
from dtensor_ring.simulate.machine import Machine
from dtensor_ring.simulate.machine_files import as_machine
from dtensor_ring.transport.transport import DEFAULT_POLICY, TransferPolicy


def choose(
    mask: Mask | None,
    seq_len: int,
    world_size: int,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    cu_seqlens: Boundaries | None = None,
    *,
    slices: Slices | None = None,
    layout: Any = "zigzag",
    batch: int = 1,
    dtype: Any = "bfloat16",
    policy: TransferPolicy = DEFAULT_POLICY,
    machine: Machine | str = "h100",
) -> Strategy:
    """Stand in for the choice by simulation."""
    found = as_machine(machine)
    sizes = [n for n in range(2, world_size + 1) if world_size % n == 0]
    asked = [*(Strategy(route=route) for route in ROUTES), *map(Strategy, sizes)]
    asked = [x for x in asked if why_not(x, *heads) is None]
    num_local = seq_len // world_size
    seen = num_local * (world_size - 1)
    if mask is not None and mask.left is not None:
        seen = min(seen, mask.left)
    if cu_seqlens is not None:
        seen = min(seen, int(cu_seqlens[1]))
    token = 2 * batch * head_dim

    def seconds(strategy: Strategy) -> float:
        links, u = found.inside, strategy.heads
        if u > 1:
            rest = (world_size // u - 1) * num_local * u * heads[1] / u
            moved = token * 2 * (heads[0] + heads[1]) * num_local * (u - 1) / u
            return 2 * links.all_to_all(moved) + 4 * links.p2p(token * rest) * (rest > 0)
        if strategy.route == "all_gather":
            return 4 * links.all_gather(2 * token * heads[1] * seen)
        return 4 * links.p2p(2 * token * heads[1] * seen) + 1e-9 * (strategy.route != "ring")

    return min(asked, key=seconds)
