"""Seconds of collectives of a group of ranks, within hosts and across them."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

from dtensor_ring.simulate.machine import Curve, Links, Machine

# What moves, by the names of `Links`.
Kind = Literal["all_gather", "reduce_scatter"]


class RankGroup(NamedTuple):
    """Ranks of a collective.

    Attributes:
        ranks: number of ranks.
        per_host: number of them on one host.
    """

    ranks: int
    per_host: int

    @property
    def hosts(self) -> int:
        """Number of hosts that have ranks of the group."""
        return -(-self.ranks // self.per_host)


def rank_group(machine: Machine, ranks: int, stride: int = 1) -> RankGroup:
    """Return a group of ranks at a distance, as meshes have them.

    Args:
        machine: has `ranks_per_host` ranks in a row on a host.
        ranks: number of ranks.
        stride: ranks from one member of the group to the next.
    """
    return RankGroup(ranks, max(1, min(ranks, machine.ranks_per_host // stride)))


def strided(machine: Machine, stride: int) -> Machine:
    """Return a machine as an axis sees it whose neighbours are `stride` ranks apart."""
    return replace(machine, ranks_per_host=max(1, machine.ranks_per_host // stride))


def collective_seconds(machine: Machine, group: RankGroup, kind: Kind, size: float) -> float:
    """Return the seconds of an all-gather or reduce-scatter.

    Rings pass through all ranks of a host before they leave it, one ring for each rank of the host,
    so every port carries the same part. Links inside and between hosts work at the same time. Each
    host adds the latency of a message, as in NCCL's own model (`src/graph/tuning.cc`).

    Args:
        machine: the machine.
        group: the ranks.
        kind: the collective.
        size: bytes of the whole, which each rank has after a gather and before a reduction.
    """
    if group.ranks == 1 or not size:
        return 0.0
    within = _of(machine.inside, kind)(size * (group.ranks - 1) / group.ranks)
    if group.hosts == 1:
        return within
    crossing = size * (group.hosts - 1) / group.hosts / group.per_host
    # The curve has the latency of one crossing.
    later = (group.hosts - 2) * machine.between.p2p(0.0)
    across = _of(machine.between, kind)(crossing) + later
    return max(across, within) if group.per_host > 1 else across


def all_reduce_seconds(machine: Machine, group: RankGroup, size: float) -> float:
    """Return the seconds of an all-reduce, which is a reduction and a gather."""
    parts = [collective_seconds(machine, group, kind, size) for kind in _BOTH]
    return sum(parts)


_BOTH: tuple[Kind, Kind] = ("reduce_scatter", "all_gather")


def _of(links: Links, kind: Kind) -> Curve:
    return links.all_gather if kind == "all_gather" else links.reduce_scatter
