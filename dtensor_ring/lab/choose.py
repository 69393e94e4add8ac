"""Choose the strategy, or the layout, that takes least time on a machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from heapq import heappop, heappush
from math import inf
from os import PathLike
from typing import Any

import torch
from typing_extensions import Unpack

from dtensor_ring.balanced.balanced import WHOLE
from dtensor_ring.lab.machine import Machine
from dtensor_ring.lab.presets import as_machine
from dtensor_ring.lab.problem import ProblemOptions, SimulatedProblem, problem_of, refuse_unknown
from dtensor_ring.lab.simulated_attention import Simulation, timeline_of
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.lru import cached_bytes
from dtensor_ring.planning.mask import Boundaries, Mask
from dtensor_ring.planning.plan import layout_of_groups
from dtensor_ring.planning.ranges import MAX_RANKS, as_count
from dtensor_ring.planning.route import ROUTES, Route
from dtensor_ring.planning.strategy import AUTO, Strategy, as_strategy, every_strategy
from dtensor_ring.transport.transport import DEFAULT_POLICY, TransferPolicy

# Times that differ by less are equal. Sums round differently on other processors, and all ranks
# have to choose alike.
TIE = 1e-6


def choose(
    mask: Mask | None,
    seq_len: int,
    world_size: int,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    cu_seqlens: Boundaries | None = None,
    *,
    machine: Machine | str | PathLike[str] = "h100",
    strategies: Sequence[Strategy] | None = None,
    **options: Unpack[ProblemOptions],
) -> Strategy:
    """Return the strategy whose forward and backward take least time together.

    It is a function of its arguments alone, so ranks that have the same ones choose alike. A second
    call takes microseconds. Of strategies that take the same time, the first one is chosen, in the
    order of `every_strategy`. Arguments are those of `simulate_attention`, but for `strategies`:
    those to choose from, by default all that fit the axis.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if no strategy can run the attention, or `simulate_attention` raises it.
    """
    refuse_unknown(choose, options)
    problem = problem_of(mask, seq_len, world_size, heads, head_dim, cu_seqlens, **options)
    listed = None if strategies is None else tuple(strategies)
    return chosen_strategy(problem, as_machine(machine), listed)


# A key has boundaries and slices, whose bytes the cache counts itself.
@cached_bytes(2**24, lambda strategy: 2000)
def chosen_strategy(
    problem: SimulatedProblem, machine: Machine, strategies: tuple[Strategy, ...] | None = None
) -> Strategy:
    """Return the strategy that takes least time, see `choose`; a cache keeps the last ones.

    Raises:
        ValueError: if no strategy can run the problem, or the machine lacks the kernel.
    """
    able = list(_able(problem, strategies))
    if not able:
        listed = ", ".join(x.spec for x in strategies or ()) or "no strategies"
        raise ValueError(f"none of {listed} can run an attention of {problem.sizes.heads} heads")
    known: dict[Hashable, Any] = {}
    simulations = [Simulation(problem, x, machine, known=known) for x in able]
    totals = _least_totals([x.bounds() for x in simulations])
    best, *others = sorted(totals)
    for number in others:
        if totals[number] < totals[best] * (1 - TIE):
            best = number
    return able[best]


def _least_totals(bounds: Sequence[Iterator[float]]) -> dict[int, float]:
    """Return the least of the last bounds by their numbers, and those that are as good as equal.

    Args:
        bounds: each yields higher ones, and last what it takes. The lowest is asked on, so most
            are not asked to their ends.
    """
    totals, most, known = dict[int, float](), inf, [(0.0, x) for x in range(len(bounds))]
    while known and known[0][0] <= most * (1 + 3 * TIE):
        least, number = heappop(known)
        higher = next(bounds[number], None)
        if higher is None:
            totals[number], most = least, min(least, most)
        else:
            heappush(known, (higher, number))
    return totals


def _able(problem: SimulatedProblem, strategies: Sequence[Strategy] | None) -> Iterator[Strategy]:
    """Yield the strategies that can run a problem; of two that do the same, the first."""
    known = set[tuple[int, type[Route]]]()
    for strategy in every_strategy(problem.world_size) if strategies is None else strategies:
        if problem.why_not(strategy) is not None:
            continue
        if strategies is None and _splits_runs(problem, strategy):
            continue
        # "ring" is one of two other routes.
        route = ROUTES[strategy.route](0, problem.inputs(strategy).demand)
        if (strategy.heads, type(route)) not in known:
            known.add((strategy.heads, type(route)))
            yield strategy


def _splits_runs(problem: SimulatedProblem, strategy: Strategy) -> bool:
    """Return whether the runs of a group's ranks interleave, as under a striped layout.

    Then the group has a run for every few tokens. Its tiles grow with the square of the length, so
    that it is slow on any machine, and so is counting them.
    """
    layout, heads, num_ranks = problem.layout, strategy.heads, problem.world_size
    joined = layout_of_groups(layout, strategy).runs(0, num_ranks // heads, problem.seq_len)
    members = [layout.runs(rank, num_ranks, problem.seq_len) for rank in range(heads)]
    return len(joined) > sum(map(len, members))


def choose_layout(
    masks: Mask | Sequence[Mask],
    seq_len: int,
    world_size: int,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    cu_seqlens: Boundaries | None = None,
    *,
    batch: int = 1,
    dtype: torch.dtype | str = torch.bfloat16,
    policy: TransferPolicy = DEFAULT_POLICY,
    strategy: str = AUTO,
    machine: Machine | str | PathLike[str] = "h100",
) -> str:
    """Return "contiguous" or "zigzag", whichever takes a model's attentions less time.

    A batch is sharded before its masks are seen, so the layout of an axis is chosen by masks that
    are known beforehand. Forward and backward of all layers are simulated in both layouts. A tie
    goes to "contiguous", which leaves tokens where they are. For documents that are known, the
    layout `Balanced` is made for each batch.

    Args:
        masks: that of all layers, or one for each layer.
        seq_len: global length, in tokens; it is padded as the layouts need it.
        world_size: ranks of the axis.
        heads: of queries, and of keys and values; with tensor parallelism, those of a rank.
        head_dim: of queries, keys and values.
        cu_seqlens: boundaries of documents that all batches have, `(D+1,)`.
        batch: rows of the batch.
        dtype: of query, key and value, or its name.
        policy: the dtypes in which messages travel.
        strategy: of all layers, see `SequenceAxis`; with "auto", each has the fastest one.
        machine: the name of a data sheet, a file of `python -m dtensor_ring calibrate`, or a
            `Machine`.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if there are no masks, a number is out of range, or the strategy or the machine
            is unknown or cannot run the attention.

    Example:
        >>> masks = Mask.causal(), Mask.sliding(1023), Mask.full()
        >>> [choose_layout(mask, 65536, 8, strategy="ring") for mask in masks]
        ['zigzag', 'contiguous', 'contiguous']
    """
    num_ranks, device = as_count("world_size", world_size, 1, MAX_RANKS), as_machine(machine)
    counted = _counted(masks)
    length = max(x.padded_length(as_count("seq_len", seq_len), num_ranks) for x in WHOLE)
    how: ProblemOptions = {"batch": batch, "dtype": dtype, "policy": policy}
    given = None if strategy == AUTO else as_strategy(strategy, num_ranks)

    def seconds(layout: Layout, mask: Mask) -> float:
        """Return the time of a layer, forward and backward."""
        problem = problem_of(
            mask, length, num_ranks, heads, head_dim, cu_seqlens, layout=layout, **how
        )
        return timeline_of(problem, given or chosen_strategy(problem, device), device).total

    totals = {
        layout: sum(count * seconds(layout, mask) for mask, count in counted.items())
        for layout in WHOLE
    }
    dealt, still = WHOLE  # of equals, the last one leaves tokens where they are
    return (dealt if totals[dealt] < totals[still] * (1 - TIE) else still).spec


def _counted(masks: Mask | Sequence[Mask]) -> Counter[Mask]:
    """Return the number of layers of each mask."""
    listed = [masks] if isinstance(masks, Mask) else masks
    if not isinstance(listed, Sequence) or not all(isinstance(mask, Mask) for mask in listed):
        raise TypeError(f"masks must be a Mask, or a sequence with one for each layer: {masks!r}")
    if not listed:
        raise ValueError("a layout is chosen by masks, and there are none")
    return Counter(listed)
