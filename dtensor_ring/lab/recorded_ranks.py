"""Which ranks of an axis are recorded, and which of those stands for each rank.

Ranks whose plans are equal, if peers are counted from the rank, do the same: one of them is
recorded. Of more than `MAX_RECORDED` ranks some are, at equal distances; others are like the
nearest of those.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property

import numpy as np

from dtensor_ring.all_to_all.plan import AllToAllPlan, all_to_all_plan
from dtensor_ring.lab.problem import SimulatedProblem, TensorSizes
from dtensor_ring.lab.recorded import RankAttention, Recording
from dtensor_ring.planning.plan import Plan, plan
from dtensor_ring.planning.route import Transfer
from dtensor_ring.planning.strategy import Strategy
from dtensor_ring.planning.tile import FULL

# The loops of at most this many ranks run.
MAX_RECORDED = 32

# The most steps that these ranks have together; at least `FEWEST` ranks are recorded.
MAX_STEPS, FEWEST = 4096, 4


class RecordedRanks:
    """What ranks of an axis do in one attention.

    Args:
        problem: the attention.
        strategy: how it is made parallel.
        has_segments: whether its kernel takes segments.
        on_gpu: whether it runs on GPUs.

    Attributes:
        heads: consecutive ranks of a group of an all-to-all.
    """

    def __init__(
        self, problem: SimulatedProblem, strategy: Strategy, has_segments: bool, on_gpu: bool
    ) -> None:
        self.heads = strategy.heads
        self._asked, self._how = (problem, strategy), (has_segments, on_gpu)
        self._runs = [rank_attention(problem, strategy, 0).recordings(*self._how)]

    @cached_property
    def first(self) -> Recording:
        """The recording of the forward of rank 0; no other rank is planned for it."""
        return next(self._runs[0])

    @cached_property
    def _looked_at(self) -> tuple[dict[int, RankAttention], np.ndarray]:
        """The attentions of the ranks that are looked at, and which of these is each rank's."""
        problem, strategy = self._asked
        nearest = looked_at(problem.world_size, strategy.heads)
        return _alike(problem, strategy, np.unique(nearest).tolist()), nearest

    @property
    def num_planned(self) -> int:
        """Ranks that were looked at; others are taken to be like the nearest of those."""
        return len(self._looked_at[0])

    @cached_property
    def ranks(self) -> np.ndarray:
        """The rank that was recorded for each rank, `(W,)`."""
        found, nearest = self._looked_at
        return np.array([found[x].plan.rank for x in nearest.tolist()])

    @cached_property
    def kinds(self) -> np.ndarray:
        """The number of the recording that stands for each rank, `(W,)`."""
        numbers = {rank: number for number, rank in enumerate(dict.fromkeys(self.ranks.tolist()))}
        return np.array([numbers[x] for x in self.ranks.tolist()])

    @cached_property
    def forward(self) -> list[Recording]:
        """The recordings of the forward."""
        found = self._looked_at[0]
        # Rank 0 is looked at first, so nobody stands for it.
        alike = list({x.plan.rank: x for x in found.values()}.values())
        self._runs += [x.recordings(*self._how) for x in alike[1:]]
        return [self.first, *(next(x) for x in self._runs[1:])]

    @cached_property
    def backward(self) -> list[Recording]:
        """The recordings of the backward, which is run when it is asked for."""
        assert self.forward, "it comes first"
        return [next(x) for x in self._runs]


def _alike(
    problem: SimulatedProblem, strategy: Strategy, ranks: list[int]
) -> dict[int, RankAttention]:
    """Return for each rank its attention, or that of a rank that does the same."""
    found: dict[int, RankAttention] = {}
    members, alike = dict[Hashable, RankAttention](), dict[Hashable, RankAttention]()
    for rank in ranks:
        # Ranks of a group have the same ring, and so the same plan.
        exchange = _exchange(problem, strategy, rank)
        trade = _exchange_content(exchange, problem.sizes)
        member = rank // strategy.heads, trade
        if member not in members:
            attention = _rank_attention(problem, strategy, rank, exchange)
            content = trade, _plan_content(attention.plan, problem.world_size)
            members[member] = alike.setdefault(content, attention)
        found[rank] = members[member]
    return found


def rank_attention(problem: SimulatedProblem, strategy: Strategy, rank: int) -> RankAttention:
    """Return an attention as a rank runs it."""
    return _rank_attention(problem, strategy, rank, _exchange(problem, strategy, rank))


def _rank_attention(
    problem: SimulatedProblem, strategy: Strategy, rank: int, exchange: AllToAllPlan | None
) -> RankAttention:
    mask = FULL if problem.mask is None else problem.mask
    where = rank, problem.world_size, problem.seq_len, problem.documents
    made = plan(problem.layout, mask, *where, strategy=strategy, slices=problem.slices)
    return RankAttention(made, exchange, problem.sizes, problem.num_parts)


def _exchange(problem: SimulatedProblem, strategy: Strategy, rank: int) -> AllToAllPlan | None:
    """Return the plan of the all-to-alls of a rank; `None` without them."""
    if strategy.heads == 1:
        return None
    layouts, size = (problem.layout, problem.layout), problem.world_size
    return all_to_all_plan(*layouts, strategy.heads, rank, size, problem.seq_len)


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
    if sizes.kv_itemsize == 1 or any(shard.num_parts > 1 for shard in shards):
        return rank
    arrived = tuple(sorted(((x.peer - rank) % heads, len(x.cols)) for x in exchange.receives))
    # What stays here is copied twice if it does not lie side by side.
    lies = [len(x.cols.spans) == 1 for x in exchange.receives if x.peer == rank]
    return (*map(sizes.heads_of, shards), arrived, *lies, exchange.num_tokens)
