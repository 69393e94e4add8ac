"""What a picture of a schedule shows, in numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dtensor_ring.planning.layouts.layout import Layout
from dtensor_ring.planning.plan import Plan, Step, layout_of_groups
from dtensor_ring.planning.routes.columns import Cols
from dtensor_ring.planning.routes.route import Transfer
from dtensor_ring.planning.schedule import Schedule, step_begins
from dtensor_ring.planning.strategy import Strategy
from dtensor_ring.planning.tile import Tile
from dtensor_ring.planning.traffic import shard_traffic

MAX_SIDE = 127
"""Queries and keys of a picture of the mask. A prime number: evenly spaced positions then fall on
all ranks, whatever the layout's stride is."""

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#332288")
"""By rank, again and again; told apart by the colour-blind (Tol, 2021)."""


class Bar(NamedTuple):
    """A step of a rank, on a line of time whose unit is the mean work of a rank."""

    rank: int
    step: int
    begin: float
    end: float
    source: int
    tiles: int
    pairs: int
    """Of queries and keys that are seen."""


class Move(NamedTuple):
    """Keys and values that a rank sends or receives while it computes a step."""

    rank: int
    step: int
    peer: int
    source: int
    tokens: int
    is_sent: bool


class Drawing(NamedTuple):
    """All that is drawn."""

    title: str
    note: str
    """How to read what is drawn, where tokens are traded for heads; else empty."""
    positions: np.ndarray
    """Of the drawn queries and keys, `(P,)`."""
    owners: np.ndarray
    """The rank of each drawn query, or the first rank of its group, `(P,)`."""
    steps: np.ndarray
    """The step at which its rank computes each pair, -1 where nothing is seen, `(P, P)`."""
    areas: list[list[int]]
    """Pairs by rank, then by step."""
    bars: list[Bar]
    moves: list[Move]
    own: list[int]
    """Tokens of each rank."""
    held: list[int]
    """Tokens that each rank has room for at most, beside its own, for messages."""


def drawing(schedule: Schedule) -> Drawing:
    """The numbers of a picture of a schedule, of its first batch row."""
    seq_len, size = schedule.seq_len, len(schedule.plans)
    count = min(MAX_SIDE, seq_len)
    positions = (np.arange(count) * 2 + 1) * seq_len // (2 * count) if count else np.arange(0)
    owners, rows = np.zeros(count, int), np.zeros(count, int)
    heads = schedule.strategy.heads
    layout = layout_of_groups(schedule.layout, schedule.strategy)
    for group in range(size // heads):
        local = _local(layout, group, size // heads, seq_len, positions)
        owners[local >= 0], rows[local >= 0] = group * heads, local[local >= 0]
    steps = np.full((count, count), -1)
    # The ranks of a group see the same pairs, each with other heads: the first stands for all.
    for plan in schedule.plans[::heads]:
        for step in plan.steps:
            _draw(steps, plan.rank, step, owners, rows)
    areas = schedule.areas
    return Drawing(
        *(str(schedule).partition("\n")[0], _note(schedule.strategy)),
        *(positions, owners, steps, areas, _bars(schedule, areas)),
        [x for plan in schedule.plans for x in _moves(plan)],
        [plan.num_local[1] for plan in schedule.plans],
        [shard_traffic(plan).num_buffers * _largest(plan) for plan in schedule.plans],
    )


def _note(strategy: Strategy) -> str:
    if strategy.heads == 1:
        return ""
    return (
        f"Groups of {strategy.heads} neighbouring ranks trade tokens for heads: each of them works "
        f"on all tokens of its group with a part of the heads. A colour is the first rank of a "
        "group. The exchanges before and after are not drawn; the command compare counts them."
    )


def _local(layout: Layout, rank: int, size: int, seq_len: int, positions: np.ndarray) -> np.ndarray:
    """Which token of a rank each position is, -1 where it is of another."""
    found, before = np.full(len(positions), -1), 0
    for run in layout.runs(rank, size, seq_len):
        index, rest = np.divmod(positions - run.start, run.stride)
        is_here = (rest == 0) & (index >= 0) & (index < run.length)
        found[is_here] = before + index[is_here]
        before += run.length
    return found


def _draw(steps: np.ndarray, rank: int, step: Step, owners: np.ndarray, rows: np.ndarray) -> None:
    """Write the number of a step where its tiles are."""
    queries = np.flatnonzero(owners == rank)
    keys = np.flatnonzero(owners == step.source)
    cols = _within(step.cols, rows[keys])
    for tile in step.tiles:
        if tile.batch in (None, 0):
            seen = _seen(tile, rows[queries], cols)
            steps[np.ix_(queries, keys)] = np.where(seen, step.number, steps[np.ix_(queries, keys)])


def _within(cols: Cols, local: np.ndarray) -> np.ndarray:
    """Which column of a packet each token of the source's shard is, -1 where it is in none."""
    found, before = np.full(len(local), -1), 0
    for begin, end in cols.spans:
        is_here = (begin <= local) & (local < end)
        found[is_here] = before + local[is_here] - begin
        before += end - begin
    return found


def _seen(tile: Tile, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """Which rows of a shard see which columns of a packet in a tile."""
    (first, last), (begin, end), band = tile.rows, tile.cols, tile.mask
    lag = (rows - first)[:, None] - (cols - begin)
    seen = ((first <= rows) & (rows < last))[:, None] & (begin <= cols) & (cols < end)
    if band.left is not None:
        seen &= lag <= band.left
    if band.right is not None:
        seen &= -lag <= band.right
    return seen


def _bars(schedule: Schedule, areas: list[list[int]]) -> list[Bar]:
    mean = max(1, sum(map(sum, areas))) / len(areas)
    begins = step_begins(schedule.plans, areas)
    return [
        Bar(
            *(plan.rank, step.number, begins[step.number][plan.rank] / mean),
            (begins[step.number][plan.rank] + areas[plan.rank][step.number]) / mean,
            *(step.source, len(step.tiles), areas[plan.rank][step.number]),
        )
        for plan in schedule.plans
        for step in plan.steps
    ]


def _moves(plan: Plan) -> list[Move]:
    def moves(step: int, side: tuple[Transfer, ...], is_sent: bool) -> list[Move]:
        return [Move(plan.rank, step, x.peer, x.source, len(x.cols), is_sent) for x in side]

    hops = enumerate(plan.shards)
    return [
        x for i, hop in hops for x in (*moves(i, hop.sends, True), *moves(i, hop.receives, False))
    ]


def _largest(plan: Plan) -> int:
    """Tokens of the largest message: any buffer has room for it."""
    return max((len(x.cols) for hop in plan.shards for x in hop.sends + hop.receives), default=0)
