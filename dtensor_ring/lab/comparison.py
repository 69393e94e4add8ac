"""Compare what each strategy costs over one axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from typing import Any

from typing_extensions import Unpack

from dtensor_ring.all_to_all.plan import AllToAllPlan, all_to_all_plan
from dtensor_ring.compute.execute import launches
from dtensor_ring.lab.chosen_keys import SEEN, ChosenKeys, chosen_keys, index_cost, moved_costs
from dtensor_ring.lab.machine import Machine
from dtensor_ring.lab.presets import as_machine
from dtensor_ring.lab.problem import (
    ProblemOptions,
    SimulatedProblem,
    TensorSizes,
    problem_of,
    refuse_unknown,
)
from dtensor_ring.lab.recorded import Cost, RankAttention, by_field, no_content, recorded_costs
from dtensor_ring.lab.schedule import Schedule, describe_schedule
from dtensor_ring.lab.simulated_attention import timeline_of
from dtensor_ring.planning.block_order import block_of, has_whole_blocks
from dtensor_ring.planning.layout import Layout, WholeBlocks
from dtensor_ring.planning.mask import Boundaries, Mask
from dtensor_ring.planning.plan import Plan, layout_of_groups
from dtensor_ring.planning.ranges import MAX_RANKS, as_count
from dtensor_ring.planning.strategy import Strategy, as_strategy, every_strategy
from dtensor_ring.selected.plan import key_positions
from dtensor_ring.transport.transport import DEFAULT_POLICY, TransferPolicy


@dataclass(frozen=True)
class StrategyCost:
    """What an attention costs by one strategy.

    Attributes:
        strategy: the spec of the strategy.
        why_not: why the strategy cannot be used. With too few heads, all numbers are zero; with
            too little memory, they are not.
        forward: the maximum of each number over all ranks.
        backward: likewise.
        launches: the largest number of forward launches on a rank, by a kernel that takes segments.
        tiles: the largest number of forward launches, by a kernel that takes one tile at a time.
        balance: work of the busiest rank over the mean.
        seconds: simulated seconds of the slowest rank, forward and backward; `None` without a
            machine.
        exposed: seconds of them in which the kernels of some rank wait for messages, likewise.
        counted: ranks whose messages were counted: of many, those that move most tokens.
        ranks: ranks of the axis.
    """

    strategy: str
    why_not: str | None = None
    forward: Cost = field(default_factory=Cost)
    backward: Cost = field(default_factory=Cost)
    launches: int = 0
    tiles: int = 0
    balance: float = 0.0
    seconds: tuple[float, float] | None = None
    exposed: tuple[float, float] | None = None
    counted: int = 0
    ranks: int = 0


# Headings of the columns with milliseconds.
TIMES = "forward", "exposed", "backward", "exposed"


@dataclass(frozen=True)
class StrategyComparison:
    """What an attention costs by each strategy. Printed, it is a table."""

    rows: tuple[StrategyCost, ...]

    def __str__(self) -> str:
        names = "sent", "received", "messages", "held"
        timed = any(row.seconds for row in self.rows)
        heading = *names, *names, "launches", "tiles", "balance", *(TIMES if timed else ())
        table = [heading, *map(_cells, self.rows)]
        # A row with `why_not` has one cell, which does not widen a column.
        widths = [max(len(x[i]) for x in table if len(x) > 1) for i in range(len(table[0]))]
        titles = ["strategy", *(row.strategy for row in self.rows)]
        first = max(map(len, titles))
        lines = [
            "  ".join([title.ljust(first), *map(str.rjust, cells, widths)])
            for title, cells in zip(titles, table, strict=True)
        ]
        over = "forward, MB".ljust(sum(widths[:4]) + 8) + "backward, MB"
        if timed:
            over = over.ljust(sum(widths[:11]) + 22) + "milliseconds"
        return "\n".join([" " * (first + 2) + over, *lines, *self._sample()])

    def _sample(self) -> list[str]:
        sizes = {(row.counted, row.ranks) for row in self.rows if row.counted < row.ranks}
        return [
            f"bytes and messages: the most of {few} of {ranks} ranks, those that move most tokens"
            for few, ranks in sizes
        ]


def _cells(row: StrategyCost) -> tuple[str, ...]:
    if row.why_not is not None:
        return (row.why_not,)
    numbers = []
    for x in (row.forward, row.backward):
        sent, received, held = (f"{size / 1e6:.1f}" for size in (x.sent, x.received, x.held))
        numbers += [sent, received, str(x.messages), held]
    times = [x for both in zip(row.seconds or (), row.exposed or (), strict=True) for x in both]
    counts = str(row.launches), str(row.tiles), f"{row.balance:.3f}"
    return *numbers, *counts, *(f"{1e3 * seconds:.3f}" for seconds in times)


def compare_strategies(
    mask: Mask | None,
    seq_len: int,
    world_size: int,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    cu_seqlens: Boundaries | None = None,
    *,
    strategies: Sequence[str] | None = None,
    max_held: int | None = None,
    machine: Machine | str | PathLike[str] | None = None,
    chosen: Any = None,
    **options: Unpack[ProblemOptions],
) -> StrategyComparison:
    """Count what one attention costs by each strategy, from the plans of all ranks.

    Args:
        mask: which keys a query sees; `None` where `slices` say it.
        seq_len: global length, in tokens.
        world_size: ranks of the axis.
        heads: of queries, and of keys and values; with tensor parallelism, those of a rank.
        head_dim: of queries, keys and values.
        cu_seqlens: boundaries of documents, `(D+1,)` or `(B, D+1)`; a tensor or a sequence.
        strategies: specs, see `SequenceAxis`; by default every route, and "ulysses" over groups
            of each size that divides the axis.
        max_held: bytes that a rank may hold of others at a time, forward or backward. A strategy
            that holds more on some rank gets a reason in `why_not`. By default no limit.
        machine: also simulate seconds on this machine, see `simulate_attention`.
        chosen: for attention that chooses its keys (`select_keys`): the keys of a query, the
            numbers of an index key, and those of a token that travel where it is chosen, as in
            `(2048, 128, 576)` for DeepSeek-V3.2; or a config that has them, as `simulate_step`
            takes it. Strategies are then routes of the index keys, and
            bytes those of a batch in which each key that a rank sees is chosen by one of its
            queries, which is the most. Heads and head dim are not used.
        options: `slices`, `layout`, `batch`, `dtype` and `policy`, see `simulate_attention`.

    Returns:
        A `StrategyComparison`; print it. Bytes and messages are those of the busiest rank.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if a strategy or layout is unknown or does not fit the axis or the length, the
            boundaries do not fit the sequence, or the machine is unknown or lacks the dtype; or
            if seconds are asked for of an attention that chooses its keys.

    Example:
        >>> found = compare_strategies(Mask.causal(), 8192, 4, strategies=("ring", "ulysses"))
        >>> [(row.strategy, row.forward.sent, row.launches) for row in found.rows]
        [('ring', 25165824, 4), ('ulysses:4', 31457280, 1)]
    """
    refuse_unknown(compare_strategies, options)
    num_ranks = as_count("world_size", world_size, 1, MAX_RANKS)
    allowed = None if max_held is None else as_count("max_held", max_held)
    timed_on = None if machine is None else as_machine(machine)
    choice = None if chosen is None else chosen_keys(chosen)
    policy = options.get("policy", DEFAULT_POLICY)
    problem = problem_of(mask, seq_len, num_ranks, heads, head_dim, cu_seqlens, **options)
    if choice or timed_on:
        policy.refuse_order("a comparison by seconds, or of chosen keys,")
    if choice and timed_on:
        raise ValueError(
            "seconds of an attention that chooses its keys are not simulated; leave machine out"
        )
    rows = []
    for strategy in _strategies(strategies, num_ranks):
        reason = _why_not(strategy, problem, choice)
        if reason is not None:
            rows.append(StrategyCost(strategy.spec, reason))
            continue
        cost = _cost(problem, policy, strategy, choice)
        if timed_on is not None:
            times = timeline_of(problem, strategy, timed_on)
            cost = replace(cost, seconds=times.seconds, exposed=times.exposed)
        rows.append(replace(cost, why_not=_too_much(cost, allowed)))
    return StrategyComparison(tuple(rows))


def _blocks(
    problem: SimulatedProblem, policy: TransferPolicy, strategy: Strategy
) -> tuple[int | None, Layout]:
    """Return the tokens of a block of a fixed order, and the layout that the ring gets."""
    layout, size, seq_len = problem.layout, problem.world_size, problem.seq_len
    if policy.order is None:
        return None, layout
    block = policy.block or block_of([seq_len])
    of_groups = layout_of_groups(layout, strategy)
    is_whole = has_whole_blocks(of_groups, size // strategy.heads, seq_len, block)
    return block, layout if is_whole else WholeBlocks(block)


def _why_not(
    strategy: Strategy, problem: SimulatedProblem, choice: ChosenKeys | None
) -> str | None:
    """Return why a strategy cannot be used; `None` if it can."""
    if choice and strategy.heads > 1:
        return "index keys have one head, which no all-to-all shards: they take a route"
    return problem.why_not(strategy)


def _choosing(
    cost: StrategyCost, index: Schedule, seen: Schedule, sizes: TensorSizes, choice: ChosenKeys
) -> StrategyCost:
    """Return the cost of an attention that chooses its keys.

    Args:
        cost: that of an attention to all keys, whose tiles and balance are those of the scores.
        index: the plans of the index keys.
        seen: the plans of the route "direct".
        sizes: of the attention.
        choice: how queries choose.
    """
    positions = key_positions(index.layout, len(index.plans), index.seq_len)
    there, back = [], []
    for of_index, of_keys in zip(index.plans, seen.plans, strict=True):
        key, rows = (
            no_content((sizes.batch, 1, of_index.num_local[1], dim), sizes.dtype)
            for dim in (choice.index_dim, choice.token_dim)
        )
        first = index_cost(of_index, key, positions)
        forward, backward = moved_costs(of_keys, positions, choice.num_keys, rows, sizes.sum_dtype)
        # One after the other: messages of the index are free when keys travel.
        there.append(replace(first + forward, held=max(first.held, forward.held)))
        back.append(backward)
    forward, backward = by_field(max, there), by_field(max, back)
    return replace(cost, forward=forward, backward=backward, launches=cost.tiles)


def _too_much(cost: StrategyCost, allowed: int | None) -> str | None:
    """Return why a strategy needs more than the allowed bytes; `None` if it does not."""
    held, direction = max((cost.forward.held, "forward"), (cost.backward.held, "backward"))
    if allowed is None or held <= allowed:
        return None
    return (
        f"the busiest rank would hold {held / 1e6:.1f} MB {direction}, more than the "
        f"{allowed / 1e6:.1f} MB of max_held"
    )


def _strategies(given: Sequence[str] | None, world_size: int) -> list[Strategy]:
    """Return the strategies to compare."""
    if given is None:
        return every_strategy(world_size)
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(f"strategies must be a list of names, such as ['ring'], got {given!r}")
    return [as_strategy(name, world_size) for name in given]


def _cost(
    problem: SimulatedProblem, policy: TransferPolicy, strategy: Strategy, choice: ChosenKeys | None
) -> StrategyCost:
    """Return the cost of a strategy on the busiest rank."""
    size, seq_len, sizes = problem.world_size, problem.seq_len, problem.sizes
    # The layout of the problem, as one that belongs to a batch takes time to make.
    block, there = _blocks(problem, policy, strategy)
    described = partial(
        describe_schedule, there, problem.mask, seq_len, size, problem.documents, problem.slices
    )
    schedule = described(strategy.spec, block)
    all_to_alls: list[AllToAllPlan | None] = [None] * size
    if strategy.heads > 1 or there != problem.layout:  # else there is no all-to-all
        all_to_alls = [
            all_to_all_plan(problem.layout, there, strategy.heads, rank, size, seq_len)
            for rank in range(size)
        ]
    pairs = zip(schedule.plans, all_to_alls, strict=True)
    recorded = recorded_costs([RankAttention(ring, exchange, sizes) for ring, exchange in pairs])
    shards = [None if x is None else x.head_shard(x.rank, sizes.heads[1]) for x in all_to_alls]
    heads = [sizes.heads_of(x)[0] for x in shards]
    work = [sum(steps) * count for steps, count in zip(schedule.areas, heads, strict=True)]
    cost = StrategyCost(
        strategy.spec,
        None,
        by_field(max, (forward for forward, _ in recorded)),
        by_field(max, (backward for _, backward in recorded)),
        max(sum(_num_launches(plan, sizes.batch)) for plan in schedule.plans),
        max(plan.num_tiles for plan in schedule.plans),
        max(work) * len(work) / sum(work) if any(work) else 1.0,
        counted=len(recorded),
        ranks=size,
    )
    if choice is None:
        return cost
    return _choosing(cost, schedule, described(SEEN), sizes, choice)


def _num_launches(plan: Plan, batch: int) -> Iterator[int]:
    """Yield the number of kernel launches of each step."""
    for step in plan.steps:
        shape = batch, plan.num_local[0], len(step.cols)
        yield len(launches(step, shape, has_segments=plan.order is None))
