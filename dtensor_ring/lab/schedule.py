"""Describe a ring without running it: a printable grid of its work, and its messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from dtensor_ring.balanced.balanced import layout_for, layouts_for, next_begins
from dtensor_ring.lab.problem import checked_attention
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.mask import Boundaries, Documents, Mask
from dtensor_ring.planning.plan import FULL, Plan, plan
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.strategy import Strategy, as_strategy


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

    @cached_property
    def areas(self) -> list[list[int]]:
        """Visible (query, key) pairs by rank, then by step, summed over rows of `cu_seqlens`.

        A rank with fewer steps than others has no work in the last ones.
        """
        # A route may give ranks different numbers of steps.
        num_steps = max(plan.num_steps for plan in self.plans)
        worked = ([sum(t.area for t in step.tiles) for step in plan.steps] for plan in self.plans)
        return [areas + [0] * (num_steps - len(areas)) for areas in worked]

    @property
    def total_area(self) -> int:
        """Visible pairs of all ranks."""
        return sum(map(sum, self.areas))

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank over the mean: 1.0 is perfect balance."""
        return self._over_mean(max(map(sum, self.areas)))

    def _over_mean(self, area: int) -> float:
        whole = self.total_area
        return area * len(self.plans) / whole if whole else 1.0

    @cached_property
    def begins(self) -> list[list[int]]:
        """When each rank begins, by step, and last when it is done, in pairs: see `makespan`."""
        begins = [np.zeros(len(self.plans), dtype=np.int64)]
        for step, work in enumerate(np.array(self.areas).T):
            # A rank with fewer steps has no hop.
            hops = [(x.rank, hop) for x in self.plans for hop in x.shards[step : step + 1]]
            ends = [(rank, transfer.peer) for rank, hop in hops for transfer in hop.sends]
            senders, receivers = np.array(ends, dtype=np.int64).reshape(-1, 2).T
            begins.append(next_begins(begins[-1], work, senders, receivers))
        return [x.tolist() for x in begins]

    @property
    def makespan(self) -> float:
        """When the last rank is done, over the mean work of a rank: 1.0 if no rank ever waits.

        A step of a rank begins when its previous step is done, and when all ranks that it exchanges
        keys and values with in that previous step have begun it. Messages take no time.
        """
        return self._over_mean(max(self.begins[-1]))

    @property
    def received(self) -> list[int]:
        """Tokens whose keys and values each rank receives, over all steps of a forward."""
        return [plan.num_received for plan in self.plans]

    @property
    def _strategy(self) -> str:
        spec = self.strategy.spec
        return "" if spec == Strategy.default else f", {spec}"

    def __str__(self) -> str:
        areas = self.areas
        # An attention without visible pairs prints zeros.
        whole = max(1, self.total_area)
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
        lines.append(f"busiest rank over mean: {self.imbalance:.3f}, makespan: {self.makespan:.3f}")
        received = self.received
        lines.append(f"keys and values: {sum(received)} tokens, at most {max(received)} to a rank")
        return "\n".join(lines)


@dataclass(frozen=True)
class LayoutComparison:
    """How evenly each layout shards the work of one attention. Printed, it is one line.

    Attributes:
        imbalances: work of the busiest rank over the mean, by the name of the layout.
    """

    imbalances: dict[str, float]

    def __str__(self) -> str:
        listed = ", ".join(f"{name} {value:.3f}" for name, value in self.imbalances.items())
        return f"busiest rank over mean: {listed}"


# The largest number of steps over all ranks: describing them takes a minute and 1 GB.
MAX_STEPS = 2**20


def describe_schedule(
    layout: Layout | str,
    mask: Mask | None,
    seq_len: int,
    world_size: int,
    cu_seqlens: Boundaries | None = None,
    slices: Slices | None = None,
    strategy: str = Strategy.default,
    block: int | None = None,
) -> Schedule:
    """Describe the part of the whole work that each rank does at each step of a ring.

    Args:
        layout: a layout or its name; "balanced" is the one for this mask and these documents.
        mask: which keys a query sees; `None` where `slices` say it.
        seq_len: global length, in tokens.
        world_size: ranks on the ring.
        cu_seqlens: boundaries of documents, `(D+1,)` or `(B, D+1)`; a tensor or a sequence.
        slices: what queries see, in place of mask and boundaries.
        strategy: how the attention is made parallel, see `SequenceAxis`. With "ulysses", a rank
            works on all tokens of its group, with a part of the heads.
        block: tokens of a block, for sums in a fixed order, see `TransferPolicy`; the layout must
            not cut blocks.

    Returns:
        A `Schedule`; print it. Below the grid are the balance, how long the ring takes if ranks
        wait for one another but not for messages, and how many tokens move.

    Raises:
        TypeError: if the mask is not a `Mask`, or a number is not an integer.
        ValueError: if the layout or strategy is unknown or cannot shard the length, or
            the boundaries do not fit the sequence, or there are too many ranks to describe.

    Example:
        >>> print(describe_schedule("contiguous", Mask.causal(), 8, 2))
        contiguous, left -, right 0: 8 tokens on 2 ranks, 2 steps
        share of all work, %     step 0   step 1    total
        rank 0                    27.78     0.00    27.78
        rank 1                    27.78    44.44    72.22
        busiest rank over mean: 1.444, makespan: 1.444
        keys and values: 4 tokens, at most 4 to a rank
    """
    length, num_ranks, documents = checked_attention(mask, seq_len, world_size, cu_seqlens, slices)
    chosen = layout_for(layout, mask, length, num_ranks, documents, slices)
    spelled = as_strategy(strategy, num_ranks)

    def planned(rank: int) -> Plan:
        return plan(
            chosen,
            FULL if mask is None else mask,
            rank,
            num_ranks,
            length,
            documents,
            strategy=spelled,
            slices=slices,
            block=block,
        )

    # The plan of rank 0 shows how many steps all plans have.
    num_steps = planned(0).num_steps * num_ranks
    if num_steps > MAX_STEPS:
        raise ValueError(
            f"a schedule shows all steps of all ranks, which are {num_steps:,} for world_size "
            f"{world_size}, at most {MAX_STEPS:,} can be described; describe fewer ranks"
        )
    plans = tuple(map(planned, range(num_ranks)))
    return Schedule(chosen, mask, length, documents, plans, slices, spelled)


def compare_layouts(
    mask: Mask | None,
    seq_len: int,
    world_size: int,
    cu_seqlens: Boundaries | None = None,
    slices: Slices | None = None,
) -> LayoutComparison:
    """Compare how evenly "balanced" and the layouts without parameters shard an attention.

    Arguments are those of `describe_schedule`.

    Returns:
        A `LayoutComparison`; print it. A layout that cannot shard the length is left out.

    Raises:
        TypeError: if the mask is not a `Mask`, or a number is not an integer.
        ValueError: if there are no or too many ranks, or the boundaries do not fit the sequence.

    Example:
        >>> print(compare_layouts(Mask.causal(), 8, 2))
        busiest rank over mean: contiguous 1.444, striped 1.111, zigzag 1.000, balanced 1.000
    """
    length, num_ranks, documents = checked_attention(mask, seq_len, world_size, cu_seqlens, slices)
    imbalances = {}
    for layout in layouts_for(mask, length, num_ranks, documents, slices):
        if _can_shard(layout, num_ranks, length):
            schedule = describe_schedule(layout, mask, length, num_ranks, documents, slices)
            imbalances[layout.name] = schedule.imbalance
    return LayoutComparison(imbalances)


def _can_shard(layout: Layout, world_size: int, seq_len: int) -> bool:
    """Return whether a layout can shard that length."""
    try:
        layout.runs(0, world_size, seq_len)
    except ValueError:
        return False
    return True


def _bounds(mask: Mask | None, slices: Slices | None) -> str:
    """Return the bounds of a mask as text: left and right always, chunk and prefix if set."""
    if mask is None:
        return f"{sum(map(len, slices or ())):,} slices"
    counts = {"left": mask.left, "right": mask.right}
    counts |= {"chunk": mask.chunk} if mask.chunk else {}
    counts |= {"prefix": mask.prefix} if mask.prefix else {}
    return ", ".join(f"{name} {'-' if n is None else n}" for name, n in counts.items())
