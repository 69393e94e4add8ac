"""A page that shows a schedule, in one file that needs no network."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np

from dtensor_ring.command.drawing import COLORS, Drawing

STYLE = (
    "body{font-family:sans-serif;max-width:1100px;margin:1em auto;padding:0 1em}"
    "h1{font-size:1.3em}h2{font-size:1.05em;margin:1.4em 0 0}p{color:#444;margin:.3em 0}"
)
LIGHT = "#e8e8e8"


def page(drawn: Drawing) -> str:
    """The page, with plotly's code in it."""
    parts = [
        ("mask", "What is seen, and at which step", MASK, _mask(drawn)),
        ("time", "Time line", TIME, _time(drawn)),
        ("work", "Balance: work by rank and step", WORK, _work(drawn)),
        ("moves", "What travels", MOVES, _moves(drawn)),
        ("memory", "Memory: tokens whose keys and values a rank has", MEMORY, _memory(drawn)),
    ]
    body = "".join(
        f"<h2>{title}</h2><p>{text}</p>{_fragment(figure, name, with_code=name == 'mask')}"
        for name, title, text, figure in parts
    )
    title, note = escape(drawn.title), f"<p>{drawn.note}</p>" if drawn.note else ""
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
    from plotly.io import to_html

    figure.update_layout(margin={"t": 15})
    how = {"full_html": False, "include_plotlyjs": with_code, "div_id": name}
    return to_html(figure, config={"displaylogo": False, "responsive": True}, **how)


def _mask(drawn: Drawing) -> Any:
    from plotly import graph_objects as go

    number, size = len(drawn.areas[0]), len(drawn.areas)
    owners = np.broadcast_to(drawn.owners[:, None], drawn.steps.shape)
    labels = [str(x) for x in drawn.positions.tolist()]
    hover = "query %{y}, key %{x}<br>rank %{z}, step %{customdata}<extra></extra>"
    figure = go.Figure()
    for step in (None, *range(number)):
        is_drawn = drawn.steps >= 0 if step is None else drawn.steps == step
        figure.add_heatmap(
            z=[
                [owner if here else None for owner, here in zip(*row, strict=True)]
                for row in zip(owners.tolist(), is_drawn.tolist(), strict=True)
            ],
            customdata=drawn.steps.tolist(),
            **{"x": labels, "y": labels, "visible": step is None, "hovertemplate": hover},
            **{"zmin": -0.5, "zmax": size - 0.5, "colorscale": _scale(size)},
            colorbar={"title": "rank", "tickvals": [*range(size)]},
            hoverongaps=False,
        )
    names = ["all", *map(str, range(number))]
    figure.update_layout(sliders=[_slider("step", names)], height=640, plot_bgcolor=LIGHT)
    figure.update_xaxes(title="key", showgrid=False, type="category", nticks=9)
    figure.update_yaxes(
        title="query", showgrid=False, type="category", nticks=9, autorange="reversed"
    )
    return figure


def _scale(size: int) -> list[tuple[float, str]]:
    """A band of the colour scale for each rank."""
    bands = [(i / size, (i + 1) / size, COLORS[i % len(COLORS)]) for i in range(size)]
    return [(edge, color) for begin, end, color in bands for edge in (begin, end)]


def _slider(name: str, values: list[str]) -> dict[str, Any]:
    """A slider of which each place shows one trace."""
    steps = [
        {
            "label": value,
            "method": "restyle",
            "args": [{"visible": [shown == number for shown in range(len(values))]}],
        }
        for number, value in enumerate(values)
    ]
    return {"currentvalue": {"prefix": f"{name}: "}, "pad": {"t": 50}, "steps": steps}


def _time(drawn: Drawing) -> Any:
    from plotly import graph_objects as go

    figure = go.Figure()
    for rank in range(len(drawn.areas)):
        bars = [x for x in drawn.bars if x.rank == rank and x.end > x.begin]
        figure.add_bar(
            base=[x.begin for x in bars],
            x=[x.end - x.begin for x in bars],
            y=[f"rank {rank}"] * len(bars),
            text=[str(x.source) for x in bars],
            customdata=[[x.step, x.source, x.tiles, f"{x.pairs:,}"] for x in bars],
            hovertemplate="step %{customdata[0]}, keys of rank %{customdata[1]}<br>"
            "%{customdata[2]} tiles, %{customdata[3]} pairs<extra>%{y}</extra>",
            orientation="h",
            marker={"color": COLORS[rank % len(COLORS)], "line": {"color": "white", "width": 1}},
            insidetextanchor="middle",
            textangle=0,
        )
    figure.update_layout(showlegend=False, height=140 + 34 * len(drawn.areas), barmode="overlay")
    figure.update_xaxes(title="time, in the mean work of a rank", rangemode="tozero")
    figure.update_yaxes(autorange="reversed")
    return figure


def _work(drawn: Drawing) -> Any:
    from plotly import graph_objects as go

    whole = max(1, sum(map(sum, drawn.areas)))
    shares = [[100 * area / whole for area in row] for row in drawn.areas]
    figure = go.Figure()
    figure.add_heatmap(
        z=[[*row, sum(row)] for row in shares],
        x=[*(f"step {i}" for i in range(len(shares[0]))), "all"],
        y=[f"rank {i}" for i in range(len(shares))],
        texttemplate="%{z:.2f}" if len(shares[0]) <= 16 else None,
        hovertemplate="%{y}, %{x}: %{z:.3f} %<extra></extra>",
        **{"colorscale": "Blues", "zmin": 0, "colorbar": {"title": "%"}},
    )
    figure.update_layout(height=140 + 34 * len(shares))
    figure.update_yaxes(autorange="reversed")
    return figure


def _moves(drawn: Drawing) -> Any:
    from plotly import graph_objects as go

    figure, size = go.Figure(), len(drawn.areas)
    for rank in range(size):
        moves = [x for x in drawn.moves if x.rank == rank]
        figure.add_bar(
            x=[x.step for x in moves],
            y=[-x.tokens if x.is_sent else x.tokens for x in moves],
            customdata=[
                [f"to rank {x.peer}" if x.is_sent else f"from rank {x.peer}", x.tokens, x.source]
                for x in moves
            ],
            hovertemplate="step %{x}: %{customdata[1]:,} tokens of rank %{customdata[2]} "
            "%{customdata[0]}<extra></extra>",
            marker={"color": [COLORS[x.source % len(COLORS)] for x in moves]},
            visible=rank == 0,
        )
    figure.update_layout(
        sliders=[_slider("rank", [*map(str, range(size))])], barmode="relative", height=420
    )
    figure.update_xaxes(title="step", dtick=1, range=[-0.5, len(drawn.areas[0]) - 0.5])
    figure.update_yaxes(title="tokens")
    return figure


def _memory(drawn: Drawing) -> Any:
    from plotly import graph_objects as go

    ranks = [f"rank {i}" for i in range(len(drawn.own))]
    figure = go.Figure()
    for name, tokens, color in (
        ("its own", drawn.own, COLORS[0]),
        ("room for messages", drawn.held, COLORS[1]),
    ):
        figure.add_bar(
            **{"name": name, "x": ranks, "y": tokens, "marker": {"color": color}},
            hovertemplate="%{x}: %{y:,} tokens<extra>" + name + "</extra>",
        )
    figure.update_layout(barmode="stack", height=320)
    figure.update_yaxes(title="tokens")
    return figure
