"""What the messages of a plan take: how many there are, their columns, and buffers for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dtensor_ring.planning.plan import Plan
from dtensor_ring.planning.routes.columns import Cols
from dtensor_ring.planning.routes.route import Hop


class Traffic(NamedTuple):
    """Messages of one rank, and the most buffers that they fill at once; sizes are in columns."""

    sent: int
    received: int
    num_sent: int
    num_received: int
    num_buffers: int
    owned: tuple[int, ...]
    """Of each message with columns of the rank's own shard."""


def shard_traffic(plan: Plan) -> Traffic:
    """The messages of keys and values, as `ShardRotation` moves them."""
    resident: dict[int, Cols] = {}
    most = 0
    for hop in plan.shards:
        # What goes on as it came needs no other buffer; columns of the own shard, or a part of a
        # packet, are packed, once for all peers that get them.
        packed = {(x.source, x.cols) for x in hop.sends if resident.get(x.source) != x.cols}
        most = max(most, len(resident) + len(packed) + len(hop.receives))
        resident |= {x.source: x.cols for x in hop.receives}
        for source in hop.releases:
            del resident[source]
    return _traffic(plan.rank, plan.shards, most)


def sum_traffic(plan: Plan) -> Traffic:
    """The messages of sums of gradients, as `SumRotation` moves them."""
    resident: dict[int, Cols] = {}
    most = 0
    arriving: list[tuple[int, Cols]] = []
    for step, hop in zip(plan.steps[1:], plan.sums[1:], strict=True):
        # The last hop is over before this step adds to a sum: what passes through stays.
        resident |= {source: cols for source, cols in arriving if source != plan.rank}
        if step.cols:
            resident.setdefault(step.source, step.cols)
        wholes = {x.source: resident[x.source] for x in hop.sends}
        copied = {(x.source, x.cols) for x in hop.sends if x.cols != wholes[x.source]}
        # A sum that leaves in parts is packed part by part, while it is still there.
        most = max(most, len(resident) + len(copied))
        resident = {source: cols for source, cols in resident.items() if source not in wholes}
        flying = len({(x.source, x.cols) for x in hop.sends}) + len(hop.receives)
        most = max(most, len(resident) + flying)
        arriving = [(x.source, x.cols) for x in hop.receives]
    return _traffic(plan.rank, plan.sums, most)


def largest_packet(plan: Plan) -> int:
    """Columns that a buffer has room for: any serves any message of the plan."""
    hops = plan.shards + plan.sums
    return max((len(x.cols) for hop in hops for x in hop.sends + hop.receives), default=0)


def _traffic(rank: int, hops: Sequence[Hop], num_buffers: int) -> Traffic:
    sent = [len(x.cols) for hop in hops for x in hop.sends]
    received = [len(x.cols) for hop in hops for x in hop.receives]
    owned = tuple(len(x.cols) for hop in hops for x in hop.sends if x.source == rank)
    return Traffic(sum(sent), sum(received), len(sent), len(received), num_buffers, owned)
