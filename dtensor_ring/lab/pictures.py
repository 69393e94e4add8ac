"""Draw a schedule as a page in one file; a button on each picture saves it as an image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dtensor_ring.lab.recorded import no_content, shard_cost
from dtensor_ring.lab.schedule import Schedule
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.plan import Plan, layout_of_groups
from dtensor_ring.planning.run_table import shard_table
from dtensor_ring.planning.strategy import Strategy
from dtensor_ring.planning.tile import Tile

# Colours of the ranks, cyclic; colour-blind readers can distinguish them (Tol, 2021).
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#332288")

LIGHT = "#e8e8e8"
STYLE = (
    "body{font-family:sans-serif;max-width:1100px;margin:1em auto;padding:0 1em}"
    "h1{font-size:1.3em}h2{font-size:1.05em;margin:1.4em 0 0}p{color:#444;margin:.3em 0}"
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
HELD = "Memory: tokens whose keys and values a rank has"
MEMORY = "Its own, and the most that there is room for in messages."


def page(schedule: Schedule) -> str:
    """Return an HTML page with pictures of a schedule, which includes plotly's code."""
    parts = [
        ("mask", "What is seen, and at which step", MASK, mask_figure(schedule)),
        ("time", "Time line", TIME, time_figure(schedule)),
        ("work", "Balance: work by rank and step", WORK, _work_figure(schedule)),
        ("moves", "What travels", MOVES, moves_figure(schedule)),
        ("memory", HELD, MEMORY, memory_figure(schedule)),
    ]
    return page_of(str(schedule).partition("\n")[0], note_of(schedule.strategy), parts)


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


def _fragment(figure: Any, name: str, with_code: bool) -> str:
    from plotly import graph_objects as go
    from plotly.io import to_html

    figure = go.Figure(figure)
    figure.update_layout(margin={"t": 15})
    how = {"full_html": False, "include_plotlyjs": with_code, "div_id": name}
    return to_html(figure, config={"displaylogo": False, "responsive": True}, **how)


def save_figure(draw: Callable[[Any], None], path: Path) -> None:
    """Save what `draw` draws on an empty figure of matplotlib as a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    FigureCanvasAgg(figure)  # no window opens, whatever the user's backend is
    draw(figure)
    figure.savefig(path, dpi=130, format="png")


def note_of(strategy: Strategy) -> str:
    """Return how to read pictures of a strategy with an all-to-all; else nothing."""
    if strategy.heads == 1:
        return ""
    return (
        f"Groups of {strategy.heads} neighbouring ranks exchange tokens for heads: each of them "
        f"works on all tokens of its group with a part of the heads. A colour is the first rank of "
        "a group. The exchanges before and after are not drawn; the command compare counts them."
    )


class SeenPairs(NamedTuple):
    """Which step of which rank computes each pair of some queries and keys.

    Attributes:
        positions: global positions of the drawn queries and keys, `(P,)`.
        owners: the rank of each drawn query, or the first rank of its group, `(P,)`.
        steps: the step that computes each pair, -1 where the query does not see the key, `(P, P)`.
    """

    positions: np.ndarray
    owners: np.ndarray
    steps: np.ndarray


# The largest number of queries, and of keys, in a picture of the mask. It is prime, so that evenly
# spaced positions fall on all ranks, whatever the stride of the layout is.
MAX_SIDE = 127


def seen_pairs(schedule: Schedule) -> SeenPairs:
    """Return the pairs of evenly spaced tokens, in the first batch row of a schedule."""
    seq_len, heads = schedule.seq_len, schedule.strategy.heads
    count = min(MAX_SIDE, seq_len)
    positions = (np.arange(count) * 2 + 1) * seq_len // (2 * count) if count else np.arange(0)
    layout = layout_of_groups(schedule.layout, schedule.strategy)
    shards = shard_table(layout, len(schedule.plans) // heads, seq_len)
    # Runs of one remainder by the stride lie side by side.
    places, starts = (x % shards.stride * seq_len + x for x in (positions, shards.starts))
    order = np.argsort(starts)
    runs = order[np.searchsorted(starts[order], places, "right") - 1]
    owners = shards.owners[runs] * heads
    rows = shards.cols[runs] + (positions - shards.starts[runs]) // shards.stride
    steps = np.full((count, count), -1)
    # Ranks of a group see the same pairs with different heads: draw the first rank only.
    for plan in schedule.plans[::heads]:
        queries = np.flatnonzero(owners == plan.rank)
        for step in plan.steps:
            keys = np.flatnonzero(owners == step.source)
            cols = _within(step.cols, rows[keys])
            for tile in step.tiles:
                if tile.batch in (None, 0):
                    row, col = np.nonzero(_seen(tile, rows[queries], cols))
                    steps[queries[row], keys[col]] = step.number
    return SeenPairs(positions, owners, steps)


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


def mask_figure(schedule: Schedule) -> dict[str, Any]:
    """Return the picture of what is seen, with a slider of steps."""
    positions, ranks, steps = seen_pairs(schedule)
    number, size = len(schedule.areas[0]), len(schedule.plans)
    owners: Any = np.broadcast_to(ranks[:, None], steps.shape)
    labels = [str(x) for x in positions.tolist()]
    maps = [
        {
            "type": "heatmap",
            "z": np.ma.array(owners, mask=~is_drawn).tolist(),  # `None` where it is masked
            "customdata": steps.tolist(),
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
        for step, is_drawn in enumerate([steps >= 0, *(steps == step for step in range(number))])
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


def time_figure(schedule: Schedule) -> dict[str, Any]:
    """Return the time line of all ranks."""
    areas, begins = schedule.areas, schedule.begins
    mean = max(1, schedule.total_area) / len(areas)
    bars = [
        (plan.rank, step, begins[step.number][plan.rank], area)
        for plan, of_rank in zip(schedule.plans, areas, strict=True)
        for step in plan.steps
        if (area := of_rank[step.number])
    ]
    trace = {
        "type": "bar",
        "base": [begin / mean for _, _, begin, _ in bars],
        "x": [area / mean for *_, area in bars],
        "y": [f"rank {rank}" for rank, *_ in bars],
        "text": [str(step.source) for _, step, *_ in bars],
        "customdata": [
            [step.number, step.source, len(step.tiles), f"{area:,}"] for _, step, _, area in bars
        ],
        "hovertemplate": "step %{customdata[0]}, keys of rank %{customdata[1]}<br>"
        "%{customdata[2]} tiles, %{customdata[3]} pairs<extra>%{y}</extra>",
        "orientation": "h",
        "marker": {
            "color": [_color(rank) for rank, *_ in bars],
            "line": {"color": "white", "width": 1},
        },
        "insidetextanchor": "middle",
        "textangle": 0,
    }
    layout = {
        "height": 140 + 34 * len(areas),
        "barmode": "overlay",
        "xaxis": {"title": "time, in the mean work of a rank", "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed"},
    }
    return {"data": [trace], "layout": layout}


def _work_figure(schedule: Schedule) -> dict[str, Any]:
    whole = max(1, schedule.total_area)
    shares = [[100 * area / whole for area in row] for row in schedule.areas]
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


def moves_figure(schedule: Schedule) -> dict[str, Any]:
    """Return what each rank sends and receives at each step, with a slider of ranks."""
    size, steps = len(schedule.plans), len(schedule.areas[0])
    traces = []
    for plan in schedule.plans:
        moves = [
            (step, sign, x)
            for step, hop in enumerate(plan.shards)
            for sign, side in ((-1, hop.sends), (1, hop.receives))
            for x in side
        ]
        trace = {
            "type": "bar",
            "x": [step for step, _, _ in moves],
            "y": [sign * len(x.cols) for _, sign, x in moves],
            "customdata": [
                [f"{'to' if sign < 0 else 'from'} rank {x.peer}", len(x.cols), x.source]
                for _, sign, x in moves
            ],
            "hovertemplate": "step %{x}: %{customdata[1]:,} tokens of rank %{customdata[2]} "
            "%{customdata[0]}<extra></extra>",
            "marker": {"color": [_color(x.source) for *_, x in moves]},
            "visible": plan.rank == 0,
        }
        traces.append(trace)
    layout = {
        "sliders": [_slider("rank", [*map(str, range(size))])],
        "barmode": "relative",
        "height": 420,
        "xaxis": {"title": "step", "dtick": 1, "range": [-0.5, steps - 0.5]},
        "yaxis": {"title": "tokens"},
    }
    return {"data": traces, "layout": layout}


def memory_figure(schedule: Schedule) -> dict[str, Any]:
    """Return the tokens that each rank has, and has room for in messages."""
    own = [plan.num_local[1] for plan in schedule.plans]
    held = [_held(plan) for plan in schedule.plans]
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
            ("its own", own, COLORS[0]),
            ("room for messages", held, COLORS[1]),
        )
    ]
    return {
        "data": traces,
        "layout": {"barmode": "stack", "height": 320, "yaxis": {"title": "tokens"}},
    }


def _held(plan: Plan) -> int:
    """Return the tokens that the message buffers of a forward have room for."""
    # A key of one byte, and a value of none.
    key, value = (no_content((1, 1, plan.num_local[1], dim), torch.int8) for dim in (1, 0))
    return shard_cost(plan, (key, value)).held


def _ranks(count: int) -> list[str]:
    return [f"rank {rank}" for rank in range(count)]


def _color(rank: int) -> str:
    return COLORS[rank % len(COLORS)]
