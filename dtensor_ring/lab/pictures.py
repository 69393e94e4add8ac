"""Draw a schedule as a page in one file; a button on each picture saves it as an image."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dtensor_ring.lab.recorded import no_content, shard_cost
from dtensor_ring.lab.schedule import Schedule, step_begins
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.plan import Plan, Step, layout_of_groups
from dtensor_ring.planning.strategy import Strategy
from dtensor_ring.planning.tile import Tile

# The largest number of queries, and of keys, in a picture of the mask. It is prime, so that evenly
# spaced positions fall on all ranks, whatever the stride of the layout is.
MAX_SIDE = 127

# Colours of the ranks, cyclic; colour-blind readers can distinguish them (Tol, 2021).
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#332288")


class Bar(NamedTuple):
    """A step of a rank on a time line; the unit of time is the mean work of a rank."""

    rank: int
    step: int
    begin: float
    end: float
    source: int
    tiles: int
    pairs: int


class Move(NamedTuple):
    """Keys and values that a rank sends or receives while it computes a step."""

    rank: int
    step: int
    peer: int
    source: int
    tokens: int
    is_sent: bool


class Drawing(NamedTuple):
    """The numbers of all pictures of a schedule.

    Attributes:
        title: the title of the page.
        note: how to read pictures of a strategy with an all-to-all; else empty.
        positions: global positions of the drawn queries and keys, `(P,)`.
        owners: the rank of each drawn query, or the first rank of its group, `(P,)`.
        steps: the step that computes each pair, -1 where the query does not see the key, `(P, P)`.
        areas: visible pairs by rank, then by step.
        bars: the steps of all ranks.
        moves: the messages of all ranks.
        own: tokens of each rank.
        held: tokens that the message buffers of each rank have room for.
    """

    title: str
    note: str
    positions: np.ndarray
    owners: np.ndarray
    steps: np.ndarray
    areas: list[list[int]]
    bars: list[Bar]
    moves: list[Move]
    own: list[int]
    held: list[int]


def drawing(schedule: Schedule) -> Drawing:
    """Compute the numbers of all pictures of a schedule, for its first batch row."""
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
    # Ranks of a group see the same pairs with different heads: draw the first rank only.
    for plan in schedule.plans[::heads]:
        for step in plan.steps:
            _draw(steps, plan.rank, step, owners, rows)
    areas = schedule.areas
    return Drawing(
        title=str(schedule).partition("\n")[0],
        note=_note(schedule.strategy),
        positions=positions,
        owners=owners,
        steps=steps,
        areas=areas,
        bars=_bars(schedule, areas),
        moves=[x for plan in schedule.plans for x in _moves(plan)],
        own=[plan.num_local[1] for plan in schedule.plans],
        held=[_held(plan) for plan in schedule.plans],
    )


def _note(strategy: Strategy) -> str:
    if strategy.heads == 1:
        return ""
    return (
        f"Groups of {strategy.heads} neighbouring ranks exchange tokens for heads: each of them "
        f"works on all tokens of its group with a part of the heads. A colour is the first rank of "
        "a group. The exchanges before and after are not drawn; the command compare counts them."
    )


def _local(layout: Layout, rank: int, size: int, seq_len: int, positions: np.ndarray) -> np.ndarray:
    """Return the local index of each position on a rank, -1 if another rank has it."""
    found, before = np.full(len(positions), -1), 0
    for run in layout.runs(rank, size, seq_len):
        index, rest = np.divmod(positions - run.start, run.stride)
        is_here = (rest == 0) & (index >= 0) & (index < run.length)
        found[is_here] = before + index[is_here]
        before += run.length
    return found


def _draw(steps: np.ndarray, rank: int, step: Step, owners: np.ndarray, rows: np.ndarray) -> None:
    """Write the number of a step to the pairs of its tiles."""
    queries = np.flatnonzero(owners == rank)
    keys = np.flatnonzero(owners == step.source)
    cols = _within(step.cols, rows[keys])
    for tile in step.tiles:
        if tile.batch in (None, 0):
            seen = _seen(tile, rows[queries], cols)
            steps[np.ix_(queries, keys)] = np.where(seen, step.number, steps[np.ix_(queries, keys)])


def _within(cols: Cols, local: np.ndarray) -> np.ndarray:
    """Return the column in a packet of each token of the source's shard, -1 if it has none."""
    found, before = np.full(len(local), -1), 0
    for begin, end in cols.spans:
        is_here = (begin <= local) & (local < end)
        found[is_here] = before + local[is_here] - begin
        before += end - begin
    return found


def _seen(tile: Tile, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """Return which rows of a shard see which columns of a packet in a tile, as booleans."""
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
    begins, bars = step_begins(schedule.plans, areas), list[Bar]()
    for plan, of_rank in zip(schedule.plans, areas, strict=True):
        for step in plan.steps:
            begin, pairs = begins[step.number][plan.rank], of_rank[step.number]
            times = begin / mean, (begin + pairs) / mean
            bars.append(Bar(plan.rank, step.number, *times, step.source, len(step.tiles), pairs))
    return bars


def _moves(plan: Plan) -> Iterator[Move]:
    for step, hop in enumerate(plan.shards):
        for side in (hop.sends, hop.receives):
            for x in side:
                yield Move(plan.rank, step, x.peer, x.source, len(x.cols), side is hop.sends)


def _held(plan: Plan) -> int:
    """Return the tokens that the message buffers of a forward have room for."""
    # A key of one byte, and a value of none.
    key, value = (no_content((1, 1, plan.num_local[1], dim), torch.int8) for dim in (1, 0))
    return shard_cost(plan, (key, value)).held


STYLE = (
    "body{font-family:sans-serif;max-width:1100px;margin:1em auto;padding:0 1em}"
    "h1{font-size:1.3em}h2{font-size:1.05em;margin:1.4em 0 0}p{color:#444;margin:.3em 0}"
)
LIGHT = "#e8e8e8"


def page(drawn: Drawing) -> str:
    """Return an HTML page that includes plotly's code."""
    parts = [
        ("mask", "What is seen, and at which step", MASK, _mask_figure(drawn)),
        ("time", "Time line", TIME, _time_figure(drawn)),
        ("work", "Balance: work by rank and step", WORK, _work_figure(drawn)),
        ("moves", "What travels", MOVES, _moves_figure(drawn)),
        ("memory", "Memory: tokens whose keys and values a rank has", MEMORY, _memory(drawn)),
    ]
    return page_of(drawn.title, drawn.note, parts)


def page_of(title: str, note: str, parts: Sequence[tuple[str, str, str, Any]]) -> str:
    """Return an HTML page that includes plotly's code.

    Args:
        title: plain text.
        note: HTML below the title, may be empty.
        parts: name, title, text and figure of each part; a figure is plotly's or a dict for it.
    """
    body = "".join(
        f"<h2>{what}</h2><p>{text}</p>{_fragment(figure, name, with_code=number == 0)}"
        for number, (name, what, text, figure) in enumerate(parts)
    )
    title, note = escape(title), f"<p>{note}</p>" if note else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>{note}{body}</body></html>"
    )


MASK = (
    "Queries go down, keys go across. The colour is the rank that has the query; the slider picks "
    "the pairs of one step. Long sequences are drawn by some of their tokens."
)
TIME = (
    "Each bar is a step; the number in it is the rank whose keys and values it works on. A unit is "
    "the mean work of a rank; gaps are waits for other ranks, and messages take no time."
)
WORK = "Share of all visible pairs of queries and keys, in percent."
MOVES = (
    "Keys and values, in tokens, that the rank of the slider receives (up) and sends (down) while "
    "it computes a step."
)
MEMORY = "Its own, and the most that there is room for in messages."


def _fragment(figure: Any, name: str, with_code: bool) -> str:
    from plotly import graph_objects as go
    from plotly.io import to_html

    figure = go.Figure(figure)
    figure.update_layout(margin={"t": 15})
    how = {"full_html": False, "include_plotlyjs": with_code, "div_id": name}
    return to_html(figure, config={"displaylogo": False, "responsive": True}, **how)


def _ranks(count: int) -> list[str]:
    return [f"rank {rank}" for rank in range(count)]


def _color(rank: int) -> str:
    return COLORS[rank % len(COLORS)]


def _mask_figure(drawn: Drawing) -> dict[str, Any]:
    number, size = len(drawn.areas[0]), len(drawn.areas)
    owners: Any = np.broadcast_to(drawn.owners[:, None], drawn.steps.shape)
    labels = [str(x) for x in drawn.positions.tolist()]
    maps = [
        {
            "type": "heatmap",
            "z": np.ma.array(owners, mask=~is_drawn).tolist(),  # `None` where it is masked
            "customdata": drawn.steps.tolist(),
            "x": labels,
            "y": labels,
            "visible": not step,
            "hovertemplate": "query %{y}, key %{x}<br>rank %{z}, step %{customdata}<extra></extra>",
            "zmin": -0.5,
            "zmax": size - 0.5,
            # A band of one colour for each rank.
            "colorscale": [(edge / size, _color(i)) for i in range(size) for edge in (i, i + 1)],
            "colorbar": {"title": "rank", "tickvals": [*range(size)]},
            "hoverongaps": False,
        }
        for step, is_drawn in enumerate(
            [drawn.steps >= 0, *(drawn.steps == step for step in range(number))]
        )
    ]
    axis = {"showgrid": False, "type": "category", "nticks": 9}
    layout = {
        "sliders": [_slider("step", ["all", *map(str, range(number))])],
        "height": 640,
        "plot_bgcolor": LIGHT,
        "xaxis": axis | {"title": "key"},
        "yaxis": axis | {"title": "query", "autorange": "reversed"},
    }
    return {"data": maps, "layout": layout}


def _slider(name: str, values: list[str]) -> dict[str, Any]:
    """Return a slider that shows one trace at each place."""
    steps = [
        {
            "label": value,
            "method": "restyle",
            "args": [{"visible": [shown == number for shown in range(len(values))]}],
        }
        for number, value in enumerate(values)
    ]
    return {"currentvalue": {"prefix": f"{name}: "}, "pad": {"t": 50}, "steps": steps}


def _time_figure(drawn: Drawing) -> dict[str, Any]:
    bars = [x for x in drawn.bars if x.end > x.begin]
    trace = {
        "type": "bar",
        "base": [x.begin for x in bars],
        "x": [x.end - x.begin for x in bars],
        "y": [f"rank {x.rank}" for x in bars],
        "text": [str(x.source) for x in bars],
        "customdata": [[x.step, x.source, x.tiles, f"{x.pairs:,}"] for x in bars],
        "hovertemplate": "step %{customdata[0]}, keys of rank %{customdata[1]}<br>"
        "%{customdata[2]} tiles, %{customdata[3]} pairs<extra>%{y}</extra>",
        "orientation": "h",
        "marker": {"color": [_color(x.rank) for x in bars], "line": {"color": "white", "width": 1}},
        "insidetextanchor": "middle",
        "textangle": 0,
    }
    layout = {
        "height": 140 + 34 * len(drawn.areas),
        "barmode": "overlay",
        "xaxis": {"title": "time, in the mean work of a rank", "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed"},
    }
    return {"data": [trace], "layout": layout}


def _work_figure(drawn: Drawing) -> dict[str, Any]:
    whole = max(1, sum(map(sum, drawn.areas)))
    shares = [[100 * area / whole for area in row] for row in drawn.areas]
    steps = len(shares[0])
    trace = {
        "type": "heatmap",
        "z": [[*row, sum(row)] for row in shares],
        "x": [*(f"step {i}" for i in range(steps)), "all"],
        "y": _ranks(len(shares)),
        "texttemplate": "%{z:.2f}" if steps <= 16 else None,
        "hovertemplate": "%{y}, %{x}: %{z:.3f} %<extra></extra>",
        "colorscale": "Blues",
        "zmin": 0,
        "colorbar": {"title": "%"},
    }
    layout = {"height": 140 + 34 * len(shares), "yaxis": {"autorange": "reversed"}}
    return {"data": [trace], "layout": layout}


def _moves_figure(drawn: Drawing) -> dict[str, Any]:
    size, traces = len(drawn.areas), []
    for rank in range(size):
        moves = [x for x in drawn.moves if x.rank == rank]
        trace = {
            "type": "bar",
            "x": [x.step for x in moves],
            "y": [-x.tokens if x.is_sent else x.tokens for x in moves],
            "customdata": [
                [f"{'to' if x.is_sent else 'from'} rank {x.peer}", x.tokens, x.source]
                for x in moves
            ],
            "hovertemplate": "step %{x}: %{customdata[1]:,} tokens of rank %{customdata[2]} "
            "%{customdata[0]}<extra></extra>",
            "marker": {"color": [_color(x.source) for x in moves]},
            "visible": rank == 0,
        }
        traces.append(trace)
    layout = {
        "sliders": [_slider("rank", [*map(str, range(size))])],
        "barmode": "relative",
        "height": 420,
        "xaxis": {"title": "step", "dtick": 1, "range": [-0.5, len(drawn.areas[0]) - 0.5]},
        "yaxis": {"title": "tokens"},
    }
    return {"data": traces, "layout": layout}


def _memory(drawn: Drawing) -> dict[str, Any]:
    traces = [
        {
            "type": "bar",
            "name": name,
            "x": _ranks(len(tokens)),
            "y": tokens,
            "marker": {"color": color},
            "hovertemplate": "%{x}: %{y:,} tokens<extra>" + name + "</extra>",
        }
        for name, tokens, color in (
            ("its own", drawn.own, COLORS[0]),
            ("room for messages", drawn.held, COLORS[1]),
        )
    ]
    return {
        "data": traces,
        "layout": {"barmode": "stack", "height": 320, "yaxis": {"title": "tokens"}},
    }


def save_figure(draw: Callable[[Any], None], path: Path) -> None:
    """Save what `draw` draws on an empty figure of matplotlib as a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    FigureCanvasAgg(figure)  # no window opens, whatever the user's backend is
    draw(figure)
    figure.savefig(path, dpi=130, format="png")
