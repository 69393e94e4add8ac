"""Which ranks of an axis are recorded, and which of those stands for each rank.

Ranks whose plans are equal, if peers are counted from the rank, do the same: one of them is
recorded. Of more than `MAX_RECORDED` ranks some are, at equal distances; others are like the
nearest of those.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from dtensor_ring.all_to_all.plan import AllToAllPlan, all_to_all_plan
from dtensor_ring.lab.problem import SimulatedProblem, TensorSizes
from dtensor_ring.lab.recorded import MAX_RECORDED, RankAttention, Recording
from dtensor_ring.planning.plan import Plan, plan
from dtensor_ring.planning.route import Transfer
from dtensor_ring.planning.strategy import Strategy
from dtensor_ring.planning.tile import FULL


class StandIns(NamedTuple):
    """The ranks of an axis, and who stands for each of them.

    Attributes:
        heads: consecutive ranks of a group of an all-to-all.
        ranks: the rank that was recorded for each rank, `(W,)`.
        kinds: the number of its recording, `(W,)`.
    """

    heads: int
    ranks: np.ndarray
    kinds: np.ndarray


class RecordedRank:
    """A rank, for all that do the same; the loop of a direction runs when it is asked for.

    Args:
        attention: of this rank.
        content: what the attentions of all of them have in common.
        run: its recordings, forward and backward.
    """

    def __init__(
        self, attention: RankAttention, content: Hashable, run: Iterator[Recording]
    ) -> None:
        self.attention, self.content, self._run = attention, content, run
        self._recorded: list[Recording] = []

    def direction(self, is_forward: bool) -> Recording:
        """Return what it does forward, or backward, which runs after the forward."""
        while len(self._recorded) < (1 if is_forward else 2):
            self._recorded.append(next(self._run))
        return self._recorded[not is_forward]


class RecordedRanks:
    """What ranks of an axis do in one attention.

    Args:
        problem: the attention.
        strategy: how it is made parallel.
        has_segments: whether its kernel takes segments.
        on_gpu: whether it runs on GPUs.

    Attributes:
        heads: consecutive ranks of a group of an all-to-all.
        size: ranks of the axis.
        last_rank: the last one that is looked at.
        last: its recordings; no other rank is planned for it.
    """

    def __init__(
        self, problem: SimulatedProblem, strategy: Strategy, has_segments: bool, on_gpu: bool
    ) -> None:
        self.heads, self.size = strategy.heads, problem.world_size
        self._asked = problem, strategy
        self._has_segments, self._on_gpu = has_segments, on_gpu
        self._members, self._alike = dict[Hashable, RecordedRank](), dict[Hashable, RecordedRank]()
        self._nearest = looked_at(self.size, self.heads)
        self.last_rank = int(self._nearest.max())
        self.last = self._first_alike(self.last_rank)

    def _first_alike(self, rank: int) -> RecordedRank:
        """Return the first rank that was asked for and does the same."""
        problem, strategy = self._asked
        exchange = _exchange(problem, strategy, rank)
        trade = strategy.heads, _exchange_content(exchange, problem.sizes)
        # Ranks of a group have the same ring, and so the same plan.
        member = rank // strategy.heads, trade
        if member not in self._members:
            attention = _rank_attention(problem, strategy, rank, exchange)
            content = trade, _plan_content(attention.plan, problem.world_size)
            run = attention.recordings(self._has_segments, self._on_gpu)
            recorded = RecordedRank(attention, content, run)
            self._members[member] = self._alike.setdefault(content, recorded)
        return self._members[member]

    @cached_property
    def _looked_at(self) -> dict[int, RecordedRank]:
        """The ranks that are looked at; nobody stands for the last one, which was the first."""
        return {x: self._first_alike(x) for x in np.unique(self._nearest)[::-1].tolist()}

    @property
    def num_planned(self) -> int:
        """Ranks that were looked at; others are taken to be like the nearest of those."""
        return len(self._looked_at)

    @property
    def content(self) -> Hashable:
        """What strategies have in common whose ranks do the same."""
        return tuple(x.content for x in self._looked_at.values())

    @cached_property
    def stand_ins(self) -> StandIns:
        """Who stands for each rank."""
        alike = [self._looked_at[x].attention.plan.rank for x in self._nearest.tolist()]
        return StandIns(self.heads, np.array(alike), np.unique(alike, return_inverse=True)[1])

    def direction(self, is_forward: bool) -> list[Recording]:
        """Return the recordings of the forward, or of the backward, by the number of their kind."""
        ranks = {x.attention.plan.rank: x for x in self._looked_at.values()}
        return [ranks[rank].direction(is_forward) for rank in sorted(ranks)]


def rank_attention(problem: SimulatedProblem, strategy: Strategy, rank: int) -> RankAttention:
    """Return an attention as a rank runs it."""
    return _rank_attention(problem, strategy, rank, _exchange(problem, strategy, rank))


def _rank_attention(
    problem: SimulatedProblem, strategy: Strategy, rank: int, exchange: AllToAllPlan | None
) -> RankAttention:
    made = plan(
        problem.layout,
        FULL if problem.mask is None else problem.mask,
        rank,
        problem.world_size,
        problem.seq_len,
        problem.documents,
        strategy=strategy,
        slices=problem.slices,
    )
    return RankAttention(made, exchange, problem.sizes, problem.num_parts)


def _exchange(problem: SimulatedProblem, strategy: Strategy, rank: int) -> AllToAllPlan | None:
    """Return the plan of the all-to-alls of a rank; `None` without them."""
    if strategy.heads == 1:
        return None
    layout, size = problem.layout, problem.world_size
    return all_to_all_plan(layout, layout, strategy.heads, rank, size, problem.seq_len)


# The most steps that these ranks have together; at least `FEWEST` ranks are recorded.
MAX_STEPS, FEWEST = 4096, 4


def looked_at(world_size: int, heads: int) -> np.ndarray:
    """Return the rank that is looked at for each rank, `(W,)`: itself, or the nearest one.

    >>> looked_at(4, 1).tolist()
    [0, 1, 2, 3]
    >>> sorted(set(looked_at(1024, 1).tolist()))
    [0, 341, 682, 1023]
    """
    ranks = np.arange(world_size)
    if world_size <= MAX_RECORDED:
        return ranks
    groups = world_size // heads
    num_members = min(heads, max(1, MAX_RECORDED // min(groups, 8)))
    num_groups = max(FEWEST, min(MAX_RECORDED // num_members, MAX_STEPS // groups))
    group, member = (
        _nearest(count, num)[of]
        for count, num, of in (
            (groups, num_groups, ranks // heads),
            (heads, num_members, ranks % heads),
        )
    )
    return group * heads + member


def _nearest(count: int, num_chosen: int) -> np.ndarray:
    """Return, of numbers up to `count`, the nearest chosen one of each."""
    chosen = np.unique(np.linspace(0, count - 1, min(count, num_chosen)).round().astype(np.int64))
    return chosen[np.abs(np.arange(count)[:, None] - chosen).argmin(1)]


def _plan_content(made: Plan, world_size: int) -> Hashable:
    """Return what equal plans have in common, with ranks counted from their own."""

    def moved(side: tuple[Transfer, ...]) -> Hashable:
        return tuple(
            ((x.source - made.rank) % world_size, x.cols, (x.peer - made.rank) % world_size)
            for x in side
        )

    hops = [(moved(x.sends), moved(x.receives)) for x in (*made.shards, *made.sums)]
    return tuple(step.tiles for step in made.steps), tuple(hops), made.num_local


def _exchange_content(exchange: AllToAllPlan | None, sizes: TensorSizes) -> Hashable:
    """Return what equal all-to-alls have in common, with ranks counted from their own."""
    if exchange is None:
        return None
    rank, heads, key_heads = exchange.rank, exchange.heads, sizes.heads[1]
    shards = [exchange.head_shard(rank + x, key_heads) for x in range(heads)]
    # Blocks are counted in the shards of their owners, and copies of a head summed in their order.
    if sizes.kv_dtype.itemsize == 1 or any(shard.num_parts > 1 for shard in shards):
        return rank
    arrived = tuple(sorted(((x.peer - rank) % heads, len(x.cols)) for x in exchange.receives))
    # What stays here is copied twice if it does not lie side by side.
    lies = [len(x.cols.spans) == 1 for x in exchange.receives if x.peer == rank]
    return (*map(sizes.heads_of, shards), arrived, *lies, exchange.num_tokens)
