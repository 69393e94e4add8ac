"""Compare what each strategy costs over one axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from os import PathLike

import torch

from dtensor_ring.all_to_all.plan import AllToAllPlan, all_to_all_plan
from dtensor_ring.all_to_all.rounded_keys import room_of_rounded
from dtensor_ring.all_to_all.run import aligned
from dtensor_ring.compute.execute import launches
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.mask import Boundaries, Mask
from dtensor_ring.planning.plan import Plan
from dtensor_ring.planning.ranges import MAX_RANKS, as_count
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.strategy import Strategy, as_strategy, every_strategy, why_not
from dtensor_ring.simulate.machine import Machine
from dtensor_ring.simulate.machine_files import as_machine
from dtensor_ring.simulate.problem import problem_of
from dtensor_ring.simulate.schedule import (
    Schedule,
    Traffic,
    describe_schedule,
    largest_packet,
    shard_traffic,
    sum_traffic,
)
from dtensor_ring.simulate.simulated_attention import timeline_of
from dtensor_ring.simulate.sizes import TensorSizes
from dtensor_ring.transport.quantised_rotation import packet_size
from dtensor_ring.transport.rotation import goes_apart
from dtensor_ring.transport.transport import DEFAULT_POLICY, QUANTISED, TransferPolicy


@dataclass(frozen=True)
class Cost:
    """What a rank sends and holds in one direction of an attention; sizes are in bytes.

    Attributes:
        sent: bytes that the rank sends.
        received: bytes that the rank receives.
        messages: number of messages that the rank sends.
        held: the most bytes at once in message buffers and tensors of an all-to-all. Large
            contiguous keys and values are sent without a buffer, but count as if they had one.
    """

    sent: int = 0
    received: int = 0
    messages: int = 0
    held: int = 0

    def __add__(self, other: Cost) -> Cost:
        return by_field(sum, [self, other])


def by_field(of: Callable[[Iterable[int]], int], costs: Iterable[Cost]) -> Cost:
    """Return the sum or the maximum of each field, as `of` computes it."""
    return Cost(*map(of, zip(*map(astuple, costs), strict=True)))


def rank_costs(
    plan: Plan, all_to_all: AllToAllPlan | None, sizes: TensorSizes
) -> tuple[Cost, Cost]:
    """Return the forward and backward cost of one rank, with the all-to-alls around its plan."""
    num_heads, num_key_heads = sizes.heads_after(all_to_all)
    rounded = sizes.kv_dtype if sizes.kv_dtype in QUANTISED and all_to_all is not None else None
    forward, sums = ring_costs(plan, sizes, num_key_heads, rounded is not None)
    backward = forward + sums
    if all_to_all is None:
        return forward, backward
    # Forward sends queries, keys and values and returns outputs; backward does the reverse.
    (heads, key_heads), (head_dim, value_dim) = sizes.heads, sizes.head_dims
    inputs = (heads, head_dim), (key_heads, head_dim), (key_heads, value_dim)
    output = ((heads, value_dim),)
    there = all_to_all_cost(all_to_all, sizes, inputs, kv_dtype=rounded)
    given = all_to_all_cost(all_to_all, sizes, output)
    back, returned = (all_to_all_cost(all_to_all, sizes, x, is_back=True) for x in (output, inputs))
    token = (num_heads + num_key_heads) * sum(sizes.head_dims) * sizes.batch * sizes.itemsize
    kept = token * all_to_all.num_tokens[1]
    travelling = 0
    if rounded is not None and plan.owners is not None and plan.owners.num_groups > 1:
        of_keys = packet_size(rounded, sizes.batch, num_key_heads, sizes.head_dims)
        travelling = room_of_rounded(of_keys, all_to_all.num_tokens[1], all_to_all.heads)
    # Backward also holds the gradients of query, key, value and output.
    return (
        _around(there, forward, back, kept + travelling),
        _around(given, backward, returned, 2 * kept + travelling),
    )


def _around(first: Cost, inner: Cost, last: Cost, kept: int) -> Cost:
    """Add three costs that follow one another while `kept` bytes stay allocated."""
    return replace(first + inner + last, held=kept + max(first.held, inner.held, last.held))


def ring_costs(
    plan: Plan, sizes: TensorSizes, num_key_heads: int, are_rounded: bool = False
) -> tuple[Cost, Cost]:
    """Return the cost of the messages of keys and values, and of those of their gradients.

    Args:
        plan: the plan of the rank.
        sizes: the sizes of the attention.
        num_key_heads: key heads of the rank.
        are_rounded: whether an all-to-all brought them in eight bits, see Note [Rounded once].
    """
    owners = plan.owners if are_rounded else None
    shards, sums = (
        packet_size(dtype, sizes.batch, num_key_heads, sizes.head_dims, owners)
        for dtype in (sizes.kv_dtype, sizes.sum_dtype)
    )
    # Bytes and scales are one message, however large.
    may_part = not shards.block
    return (
        _moved(shard_traffic(plan, shards), largest_packet(plan, shards), may_part),
        _moved(sum_traffic(plan, sums), largest_packet(plan, sums), may_part=True),
    )


def _moved(traffic: Traffic, room: int, may_part: bool) -> Cost:
    """Return the cost of messages: sizes and the `room` of a buffer are in bytes."""
    num_second = sum(map(goes_apart, traffic.owned)) if may_part else 0
    num_sent, held = traffic.num_sent + num_second, traffic.num_buffers * room
    return Cost(traffic.sent, traffic.received, num_sent, held)


def all_to_all_cost(
    all_to_all: AllToAllPlan,
    sizes: TensorSizes,
    tensors: Sequence[tuple[int, int]],
    is_back: bool = False,
    kv_dtype: torch.dtype | None = None,
) -> Cost:
    """Return the cost of one all-to-all.

    Args:
        all_to_all: the plan of the rank.
        sizes: the sizes of the attention.
        tensors: pairs of a head count and a head dim.
        is_back: whether heads are given for tokens.
        kv_dtype: the dtype of 8 bits of the last two tensors, keys and values; `None` for that of
            all tensors.
    """
    num_key_heads = sizes.heads[1]
    leaving, coming = Counter[int](), Counter[int]()
    there, here = (coming, leaving) if is_back else (leaving, coming)
    together: list[tuple[torch.dtype, int, tuple[int, ...]]]
    together = [(sizes.dtype, count, (head_dim,)) for count, head_dim in tensors]
    if kv_dtype is not None:
        together[-2:] = [(kv_dtype, num_key_heads, tuple(dim for _, dim in tensors[-2:]))]
    for dtype, num_heads, head_dims in together:
        for num_bytes, amounts in ((there, all_to_all.sent), (here, all_to_all.received)):
            for peer, (tokens, heads) in amounts(num_heads, num_key_heads).items():
                of_tokens = packet_size(dtype, sizes.batch, heads, head_dims)
                num_bytes[peer] += of_tokens.of_shard(tokens)
    held = sum(aligned(size) for side in (leaving, coming) for size in side.values())
    num_messages = sum(size > 0 for size in leaving.values())  # empty messages are not sent
    return Cost(leaving.total(), coming.total(), num_messages, held)


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
        return "\n".join([" " * (first + 2) + over, *lines])


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
    slices: Slices | None = None,
    layout: Layout | str = "zigzag",
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    policy: TransferPolicy = DEFAULT_POLICY,
    strategies: Sequence[str] | None = None,
    max_held: int | None = None,
    machine: Machine | str | PathLike[str] | None = None,
) -> StrategyComparison:
    """Count what one attention costs by each strategy, from the plans of all ranks.

    Args:
        mask: which keys a query sees; `None` where `slices` say it.
        seq_len: global length, in tokens.
        world_size: ranks of the axis.
        heads: of queries, and of keys and values; with tensor parallelism, those of a rank.
        head_dim: of queries, keys and values.
        cu_seqlens: boundaries of documents, `(D+1,)` or `(B, D+1)`; a tensor or a sequence.
        slices: what queries see, in place of mask and boundaries.
        layout: a layout or its name.
        batch: rows of the batch, if boundaries do not say it by row.
        dtype: of query, key and value.
        policy: the dtypes in which messages travel.
        strategies: specs, see `SequenceAxis`; by default every route, and "ulysses" over groups
            of each size that divides the axis.
        max_held: bytes that a rank may hold of others at a time, forward or backward. A strategy
            that holds more on some rank gets a reason in `why_not`. By default no limit.
        machine: also simulate seconds on this machine, see `simulate_attention`.

    Returns:
        A `StrategyComparison`; print it. Bytes and messages are those of the busiest rank.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if a strategy or layout is unknown or does not fit the axis or the length, the
            boundaries do not fit the sequence, or the machine is unknown or lacks the dtype.

    Example:
        >>> found = compare_strategies(Mask.causal(), 8192, 4, strategies=("ring", "ulysses"))
        >>> [(row.strategy, row.forward.sent, row.launches) for row in found.rows]
        [('ring', 25165824, 4), ('ulysses:4', 31457280, 1)]
    """
    num_ranks = as_count("world_size", world_size, 1, MAX_RANKS)
    allowed = None if max_held is None else as_count("max_held", max_held)
    timed_on = None if machine is None else as_machine(machine)
    problem = problem_of(
        *(mask, seq_len, num_ranks, heads, head_dim, cu_seqlens),
        slices=slices,
        layout=layout,
        batch=batch,
        dtype=dtype,
        policy=policy,
    )
    sizes, rows = problem.sizes, []
    for strategy in _strategies(strategies, num_ranks):
        reason = why_not(strategy, *sizes.heads)
        if reason is not None:
            rows.append(StrategyCost(strategy.spec, reason))
            continue
        # The layout of the problem, as one that belongs to a batch takes time to make.
        asked = problem.layout, mask, seq_len, num_ranks, cu_seqlens, slices, strategy.spec
        cost = _cost(describe_schedule(*asked), strategy, sizes)
        if timed_on is not None:
            times = timeline_of(problem, strategy, timed_on)
            cost = replace(cost, seconds=times.seconds, exposed=times.exposed)
        rows.append(replace(cost, why_not=_too_much(cost, allowed)))
    return StrategyComparison(tuple(rows))


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


def _cost(schedule: Schedule, strategy: Strategy, sizes: TensorSizes) -> StrategyCost:
    """Return the cost of a strategy on the busiest rank."""
    layout, size, seq_len = schedule.layout, len(schedule.plans), schedule.seq_len
    all_to_alls: list[AllToAllPlan | None] = [None] * size
    if strategy.heads > 1:  # else there is no all-to-all
        all_to_alls = [
            all_to_all_plan(layout, layout, strategy.heads, rank, size, seq_len)
            for rank in range(size)
        ]
    pairs = list(zip(schedule.plans, all_to_alls, strict=True))
    costs = [rank_costs(plan, all_to_all, sizes) for plan, all_to_all in pairs]
    forward, backward = (by_field(max, side) for side in zip(*costs, strict=True))
    heads = [sizes.heads_after(all_to_all)[0] for all_to_all in all_to_alls]
    work = [sum(steps) * count for steps, count in zip(schedule.areas, heads, strict=True)]
    return StrategyCost(
        strategy.spec,
        None,
        forward,
        backward,
        max(sum(_num_launches(plan, sizes.batch)) for plan in schedule.plans),
        max(sum(len(step.tiles) for step in plan.steps) for plan in schedule.plans),
        max(work) * len(work) / sum(work) if any(work) else 1.0,
    )


def _num_launches(plan: Plan, batch: int) -> Iterator[int]:
    """Yield the number of kernel launches of each step."""
    for step in plan.steps:
        shape = batch, plan.num_local[0], len(step.cols)
        yield len(launches(step, shape, has_segments=True))
