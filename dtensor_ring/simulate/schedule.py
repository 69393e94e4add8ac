"""A printable grid of the work of a ring, rank by step, and what its messages take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dtensor_ring.balanced.balanced import check_seen, layout_for, layouts_for
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.mask import Boundaries, Documents, Mask, as_documents
from dtensor_ring.planning.plan import FULL, Plan, check_documents, plan
from dtensor_ring.planning.ranges import MAX_RANKS, as_count
from dtensor_ring.planning.route import Hop
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.strategy import Strategy, as_strategy


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


MAX_STEPS = 2**20
"""The most steps, over all ranks. A schedule of this many takes a minute and 1 GB."""


@dataclass(frozen=True)
class Schedule:
    """The plans of all ranks. Printed, it shows the work of each rank at each step."""

    layout: Layout
    mask: Mask | None
    seq_len: int
    documents: Documents | None
    plans: tuple[Plan, ...]
    slices: Slices | None = None
    strategy: Strategy = field(default_factory=Strategy)

    @property
    def areas(self) -> list[list[int]]:
        """Visible (query, key) pairs by rank, then by step, summed over rows of `cu_seqlens`.

        A rank with fewer steps than others has no work in the last ones.
        """
        # A route may give ranks different numbers of steps.
        num_steps = max(plan.num_steps for plan in self.plans)
        worked = ([sum(t.area for t in step.tiles) for step in plan.steps] for plan in self.plans)
        return [areas + [0] * (num_steps - len(areas)) for areas in worked]

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank over the mean: 1.0 is perfect balance."""
        return _imbalance(self.areas)

    @property
    def makespan(self) -> float:
        """When the last rank is done, over the mean work of a rank: 1.0 if nobody ever waits.

        A step begins when the rank's step before is done, and all ranks that it exchanges keys and
        values with during that step have begun it. Messages take no time.
        """
        return _makespan(self.plans, self.areas)

    @property
    def received(self) -> list[int]:
        """Tokens whose keys and values come to each rank, over all steps of a forward pass."""
        return [plan.num_received for plan in self.plans]

    @property
    def _strategy(self) -> str:
        spec = self.strategy.spec
        return "" if spec == Strategy.default else f", {spec}"

    def __str__(self) -> str:
        areas = self.areas
        # An attention in which nothing is seen prints zeros.
        whole = max(1, sum(map(sum, areas)))
        num_steps = len(areas[0])
        lines = [
            f"{self.layout.spec}, {_bounds(self.mask, self.slices)}{self._strategy}: "
            f"{self.seq_len} tokens on {len(areas)} ranks, {num_steps} steps",
            "share of all work, %  " + "".join(f"{f'step {i}':>9}" for i in range(num_steps)),
        ]
        lines[1] += f"{'total':>9}"
        for rank, steps in enumerate(areas):
            cells = "".join(f"{100 * area / whole:9.2f}" for area in [*steps, sum(steps)])
            lines.append(f"{f'rank {rank}':<22}{cells}")
        makespan = _makespan(self.plans, areas)
        lines.append(f"busiest rank over mean: {_imbalance(areas):.3f}, makespan: {makespan:.3f}")
        received = self.received
        lines.append(f"keys and values: {sum(received)} tokens, at most {max(received)} to a rank")
        return "\n".join(lines)


@dataclass(frozen=True)
class LayoutComparison:
    """How evenly each layout deals the work of one attention. Printed, it is one line."""

    imbalances: dict[str, float]
    """Work of the busiest rank over the mean, by the name of the layout."""

    def __str__(self) -> str:
        listed = ", ".join(f"{name} {value:.3f}" for name, value in self.imbalances.items())
        return f"busiest rank over mean: {listed}"


def describe_schedule(
    layout: Layout | str,
    mask: Mask | None,
    seq_len: int,
    world_size: int,
    cu_seqlens: Boundaries | None = None,
    slices: Slices | None = None,
    strategy: str = Strategy.default,
) -> Schedule:
    """The part of the whole work that each rank does at each step of a ring.

    Args:
        layout: a layout or its name; "balanced" is the one for this mask and these documents.
        mask: which keys a query sees; `None` where `slices` say it.
        seq_len: global length, in tokens.
        world_size: ranks on the ring.
        cu_seqlens: boundaries of documents, `(D+1,)` or `(B, D+1)`; a tensor or a sequence.
        slices: what queries see, in place of mask and boundaries.
        strategy: how the attention is made parallel, see `SequenceAxis`; where tokens are traded
            for heads, the tokens of a rank are those of its group, with a part of the heads.

    Returns:
        A `Schedule`; print it. Below the grid are the balance, how long the ring takes if ranks
        wait for one another but not for messages, and how much moves.

    Raises:
        TypeError: if the mask is not a `Mask`, or a number is not an integer.
        ValueError: if the layout or strategy is unknown or cannot deal the length, or the
            boundaries do not fit the sequence, or there are too many ranks to describe.

    Example:
        >>> print(describe_schedule("contiguous", Mask.causal(), 8, 2))
        contiguous, left -, right 0: 8 tokens on 2 ranks, 2 steps
        share of all work, %     step 0   step 1    total
        rank 0                    27.78     0.00    27.78
        rank 1                    27.78    44.44    72.22
        busiest rank over mean: 1.444, makespan: 1.444
        keys and values: 4 tokens, at most 4 to a rank
    """
    asked = _checked(mask, seq_len, world_size, cu_seqlens, slices)
    chosen = layout_for(layout, *asked)
    # The first one tells how much there is to plan.
    spelled = as_strategy(strategy, asked.world_size)
    num_steps = asked.plan(chosen, 0, spelled).num_steps * asked.world_size
    if num_steps > MAX_STEPS:
        raise ValueError(
            f"a schedule shows all steps of all ranks, which are {num_steps:,} for world_size "
            f"{world_size}, at most {MAX_STEPS:,} can be described; describe fewer ranks"
        )
    plans = tuple(asked.plan(chosen, rank, spelled) for rank in range(asked.world_size))
    return Schedule(chosen, mask, asked.seq_len, asked.documents, plans, slices, spelled)


def compare_layouts(
    mask: Mask | None,
    seq_len: int,
    world_size: int,
    cu_seqlens: Boundaries | None = None,
    slices: Slices | None = None,
) -> LayoutComparison:
    """How evenly the layouts without parameters, and "balanced", deal the work of an attention.

    Args:
        mask: which keys a query sees; `None` where `slices` say it.
        seq_len: global length, in tokens.
        world_size: ranks on the ring.
        cu_seqlens: boundaries of documents, `(D+1,)` or `(B, D+1)`; a tensor or a sequence.
        slices: what queries see, in place of mask and boundaries.

    Returns:
        A `LayoutComparison`; print it. A layout that cannot deal the length is left out.

    Raises:
        TypeError: if the mask is not a `Mask`, or a number is not an integer.
        ValueError: if there are no or too many ranks, or the boundaries do not fit the sequence.

    Example:
        >>> print(compare_layouts(Mask.causal(), 8, 2))
        busiest rank over mean: contiguous 1.444, striped 1.111, zigzag 1.000, balanced 1.000
    """
    asked = _checked(mask, seq_len, world_size, cu_seqlens, slices)
    return LayoutComparison(
        {
            layout.name: describe_schedule(layout, *asked).imbalance
            for layout in layouts_for(*asked)
            if _deals(layout, asked.world_size, asked.seq_len)
        }
    )


def _deals(layout: Layout, world_size: int, seq_len: int) -> bool:
    """Whether a layout can deal that length."""
    try:
        layout.runs(0, world_size, seq_len)
    except ValueError:
        return False
    return True


class _Asked(NamedTuple):
    """The attention that is described."""

    mask: Mask | None
    seq_len: int
    world_size: int
    documents: Documents | None
    slices: Slices | None

    def plan(self, layout: Layout, rank: int, strategy: Strategy) -> Plan:
        """The plan of a rank."""
        mask = FULL if self.mask is None else self.mask
        where = rank, self.world_size, self.seq_len, self.documents
        return plan(layout, mask, *where, strategy=strategy, slices=self.slices)


def _checked(
    mask: Mask | None,
    seq_len: int,
    world_size: int,
    cu_seqlens: Boundaries | None,
    slices: Slices | None,
) -> _Asked:
    """The numbers as integers: plans are kept by them, and 8.0 would find those of 8."""
    check_seen(mask, slices)
    num_ranks = as_count("world_size", world_size, 1, MAX_RANKS)
    documents = as_documents(cu_seqlens)
    length = as_count("seq_len", seq_len)
    check_documents(num_ranks, length, documents)
    return _Asked(mask, length, num_ranks, documents, slices)


def _imbalance(areas: list[list[int]]) -> float:
    totals = [sum(steps) for steps in areas]
    return max(totals) * len(totals) / sum(totals) if any(totals) else 1.0


def step_begins(plans: Sequence[Plan], areas: list[list[int]]) -> list[list[int]]:
    """When each rank begins its steps, by step, then when all are done: see `Schedule.makespan`."""
    begins = [[0] * len(plans)]
    for step in range(len(areas[0])):
        done = [begin + work[step] for begin, work in zip(begins[-1], areas, strict=True)]
        begins.append(
            [
                max([end, *(begins[-1][peer] for peer in _peers(plan, step))])
                for end, plan in zip(done, plans, strict=True)
            ]
        )
    return begins


def _makespan(plans: Sequence[Plan], areas: list[list[int]]) -> float:
    whole = sum(map(sum, areas))
    return max(step_begins(plans, areas)[-1]) * len(plans) / whole if whole else 1.0


def _peers(plan: Plan, step: int) -> Iterator[int]:
    """The ranks that a rank exchanges keys and values with during a step."""
    for hop in plan.shards[step : step + 1]:  # none where it has fewer steps than others
        yield from (transfer.peer for transfer in hop.sends + hop.receives)


def _bounds(mask: Mask | None, slices: Slices | None) -> str:
    """The bounds of a mask, in words: left and right always, the others where there are."""
    if mask is None:
        return f"{sum(map(len, slices or ())):,} slices"
    counts = {"left": mask.left, "right": mask.right}
    counts |= {"chunk": mask.chunk} if mask.chunk else {}
    counts |= {"prefix": mask.prefix} if mask.prefix else {}
    return ", ".join(f"{name} {'-' if n is None else n}" for name, n in counts.items())
