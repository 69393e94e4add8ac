"""The command `simulate` prints and draws what a training step would take on a machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from math import prod
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

from dtensor_ring.lab.pictures import COLORS, page_of, save_figure
from dtensor_ring.lab.presets import as_machine
from dtensor_ring.lab.problem import config_json
from dtensor_ring.lab.report import refused, tracked
from dtensor_ring.lab.simulated_attention import Timeline
from dtensor_ring.lab.training.collectives import COLLECTIVE
from dtensor_ring.lab.training.step import SimulatedStep, simulate_step, step_trace
from dtensor_ring.lab.training.step_sweep import WinnerMap, parse_sweep, sweep_steps, winner_map

# Reads the config that a command line names, with all defaults. Raises ImportError if a package for
# that is not installed, and ValueError if there is no such config.
ReadConfig = Callable[[str], Mapping[str, Any]]


def config_file(spec: str) -> Mapping[str, Any]:
    """Return what a `config.json` has, without the defaults that it leaves out.

    Raises:
        ValueError: if there is no such file.
    """
    return config_json(Path(spec))


# Tokens of a rank, and bytes per second of a link, in a picture of winners.
MAP_TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
MAP_RATES = (10e9, 25e9, 50e9, 100e9, 200e9, 400e9, 800e9)


def simulate(
    read: ReadConfig,
    model: str,
    mesh: Mapping[str, int],
    machine: str,
    layout: str | None,
    cu_seqlens: Sequence[int] | None,
    sweep: Sequence[str] | None,
    as_json: bool,
    html: Path | None,
    png: Path | None,
    trace: Path | None,
    **options: Any,
) -> int:
    """Print what a training step takes, draw it, and return the exit status.

    Args:
        read: reads the config.
        model: names it.
        mesh: ranks by axis.
        machine: the name of a preset, or a file.
        layout: how tokens are sharded.
        cu_seqlens: boundaries of the documents of all sequences.
        sweep: what `parse_sweep` reads; `None` for one step.
        as_json: whether to print JSON.
        html: file of a page: of the step, or of a sweep which strategy wins where.
        png: file of an image of which strategy wins where.
        trace: file of a trace of the step.
        options: other arguments of `simulate_step`.
    """
    try:
        options["layout"] = layout or "zigzag"
        asked = options | {"config": read(model), "mesh": mesh, "machine": as_machine(machine)}
        if cu_seqlens is not None:
            groups = prod(mesh.get(x, 1) for x in ("dp_replicate", "dp_shard"))
            asked["batches"] = [cu_seqlens] * groups
        if sweep is None:
            lines = _one(asked, as_json, html, png, trace)
        else:
            lines = _swept(sweep, asked, as_json, html, png, trace)
    except (ImportError, OSError, TypeError, ValueError) as error:
        return refused(error)
    print(lines)
    return 0


def _one(
    asked: Mapping[str, Any],
    as_json: bool,
    html: Path | None,
    png: Path | None,
    trace: Path | None,
) -> str:
    """Simulate one step, save its pictures, and return what is printed."""
    if png is not None:
        raise ValueError("--png draws which strategy wins, and needs --sweep")
    found = simulate_step(**asked)
    if html is not None:
        html.write_text(drawn_by("html", lambda: step_page(found)))
    if trace is not None:
        trace.write_text(json.dumps(step_trace(found)))
    return json.dumps(found.as_json()) if as_json else str(found)


def _swept(
    sweep: Sequence[str],
    asked: Mapping[str, Any],
    as_json: bool,
    html: Path | None,
    png: Path | None,
    trace: Path | None,
) -> str:
    """Simulate the steps of a sweep, save its pictures, and return what is printed."""
    if trace is not None:
        raise ValueError("--trace is of one step, and not of a --sweep")
    swept = parse_sweep(sweep)
    found = sweep_steps(swept, track=tracked, **asked)
    if html is not None or png is not None:
        winners = _winners(swept, asked)
        if html is not None:
            html.write_text(drawn_by("html", lambda: _winner_page(winners)))
        if png is not None:
            path = png
            drawn_by("png", lambda: save_figure(lambda x: _draw_winners(x, winners), path))
    return json.dumps([row.as_json() for row in found.rows]) if as_json else str(found)


def _winners(swept: Mapping[str, Sequence[Any]], asked: Mapping[str, Any]) -> WinnerMap:
    """Return the winners over the largest axis of the sweep."""
    names = ("layout", "batch", "dtype", "kernel")
    options = {name: asked[name] for name in names if name in asked}
    cp = max((x for x in swept.get("cp", ())), default=asked["mesh"].get("cp", 1))
    mesh = {"cp": cp, "tp": asked["mesh"].get("tp", 1)}
    return winner_map(asked["config"], mesh, asked["machine"], MAP_TOKENS, MAP_RATES, **options)


Drawn = TypeVar("Drawn")


def drawn_by(suffix: str, draw: Callable[[], Drawn]) -> Drawn:
    """Return what `draw` makes.

    Raises:
        ImportError: if the package that draws it is not installed.
    """
    package = {"html": "plotly", "png": "matplotlib"}[suffix]
    try:
        return draw()
    except ModuleNotFoundError as error:
        raise ImportError(
            f"--{suffix} draws with {package}, which is not installed: pip install {package}"
        ) from error


# Ranks and spans of a time line, at most, and the streams of it.
MAX_RANKS = 8
MAX_SPANS = 8192
DRAWN = ("compute", "send", "receive")

PARTS = "Milliseconds of the step by part. What a rank waits for messages is exposed communication."
STEP = (
    "Kernels of a rank and the collectives of FSDP2, as they overlap: the gather of the next layer "
    "runs under the kernels of this one, and so does the reduction of the last one."
)
ATTENTION = (
    "Streams of the first ranks of an axis, forward and then backward: kernels and merges, and "
    "messages that are sent and received."
)
WINNERS = (
    "The fastest strategy for the attentions of the model, forward and backward; the number is how "
    "many times faster than the ring it is."
)


def step_page(step: SimulatedStep) -> str:
    """Return an HTML page with the parts and the time lines of a step."""
    axes = " x ".join(f"{name} {size}" for name, size in step.mesh.items())
    title = f"{step.model} on {step.machine}, {axes}, {step.strategy}, {step.seq_len:,} tokens"
    parts = [("parts", "Parts of the step", PARTS, _parts_figure(step))]
    parts.append(("step", "Time line of a rank", STEP, _spans_figure(step)))
    for number, (mask, attention) in enumerate(step.attentions.items()):
        figure = _attention_figure(attention.timeline)
        if figure["data"]:
            parts.append((f"attention{number}", f"Attention, {mask}", ATTENTION, figure))
    return page_of(title, f"{step.seconds * 1e3:,.1f} ms, MFU {step.mfu:.1%}", parts)


def _parts_figure(step: SimulatedStep) -> dict[str, Any]:
    """Return one bar that has all parts of a step."""
    bars = [
        {
            "type": "bar",
            "orientation": "h",
            "name": title,
            "x": [step.parts[name] * 1e3],
            "y": ["step"],
            "marker": {"color": color},
            "hovertemplate": f"{title}: %{{x:,.1f}} ms<extra></extra>",
        }
        for (name, title), color in zip(step.titles, cycle(COLORS), strict=False)
    ]
    layout = {"barmode": "stack", "height": 220, "legend": {"traceorder": "normal"}}
    return {"data": bars, "layout": layout | {"xaxis": {"title": {"text": "milliseconds"}}}}


def _spans_figure(step: SimulatedStep) -> dict[str, Any]:
    """Return the bars of both streams of a step."""
    spans = [span for span in step.spans if span.end > span.begin][:MAX_SPANS]
    lanes = ["FSDP2" if span.stream == COLLECTIVE else "kernels" for span in spans]
    kinds = [span.label.partition(" ")[0] for span in spans]
    bars = lanes_bar(
        lanes,
        [span.begin for span in spans],
        [span.end for span in spans],
        [span.label for span in spans],
        [COLORS[("forward", "backward", "gather", "reduce").index(kind)] for kind in kinds],
    )
    return {"data": [bars], "layout": lanes_layout(2)}


def _attention_figure(timeline: Timeline) -> dict[str, Any]:
    """Return the bars of the streams of the first ranks; no data if no spans were kept."""
    spans = [x for x in timeline.spans(range(MAX_RANKS)) if x.end > x.begin and x.stream in DRAWN]
    spans = spans[:MAX_SPANS]
    if not spans:
        return {"data": [], "layout": {}}
    # Lanes are listed in the order in which they first occur.
    spans.sort(key=lambda x: (x.rank, DRAWN.index(x.stream)))
    bars = lanes_bar(
        [f"rank {x.rank} {x.stream}" for x in spans],
        [x.begin for x in spans],
        [x.end for x in spans],
        [x.label for x in spans],
        [COLORS[DRAWN.index(x.stream)] for x in spans],
    )
    return {"data": [bars], "layout": lanes_layout(len({*bars["y"]}))}


def lanes_bar(
    lanes: Sequence[str],
    begins: Sequence[float],
    ends: Sequence[float],
    labels: Sequence[str],
    colors: Sequence[str],
) -> dict[str, Any]:
    """Return bars on the lanes of a time line; times are in seconds, `(S,)` each."""
    return {
        "type": "bar",
        "orientation": "h",
        "base": [begin * 1e3 for begin in begins],
        "x": [(end - begin) * 1e3 for begin, end in zip(begins, ends, strict=True)],
        "y": [*lanes],
        "customdata": [*labels],
        "hovertemplate": "%{customdata}: %{x:,.3f} ms from %{base:,.3f}<extra>%{y}</extra>",
        "marker": {"color": [*colors], "line": {"color": "white", "width": 0.5}},
    }


def lanes_layout(number: int) -> dict[str, Any]:
    """Return the layout of a plot with this number of lanes."""
    return {
        "barmode": "overlay",
        "showlegend": False,
        "height": 140 + 24 * number,
        "xaxis": {"title": {"text": "milliseconds"}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "type": "category"},
    }


def _winner_page(found: WinnerMap) -> str:
    """Return an HTML page with the winners."""
    number = len(found.strategies)
    edges = [(i / number, (i + 1) / number, COLORS[i % len(COLORS)]) for i in range(number)]
    heat = {
        "type": "heatmap",
        "z": [[*row] for row in found.winners],
        "x": _rate_names(found),
        "y": _token_names(found),
        "text": [[f"{gain:.2f}" for gain in row] for row in found.gains],
        "customdata": [[found.strategies[x] for x in row] for row in found.winners],
        "texttemplate": "%{customdata}<br>%{text}",
        "hovertemplate": "%{y} tokens of a rank, %{x} GB/s: %{customdata}<extra></extra>",
        "zmin": -0.5,
        "zmax": number - 0.5,
        "colorscale": [(edge, color) for begin, end, color in edges for edge in (begin, end)],
        "showscale": False,
        "xgap": 2,
        "ygap": 2,
    }
    layout = {
        "height": 160 + 60 * len(found.tokens),
        "xaxis": {"title": {"text": f"GB/s of a link {found.level} hosts"}, "type": "category"},
        "yaxis": {"title": {"text": "tokens of a rank"}, "type": "category"},
    }
    figure = {"data": [heat], "layout": layout}
    return page_of(found.title, "", [("winners", "Which strategy wins", WINNERS, figure)])


def _draw_winners(figure: Any, found: WinnerMap) -> None:
    """Draw the winners on an empty figure of matplotlib."""
    axes = figure.add_subplot()
    # A colour by number, as everywhere on these pages.
    axes.imshow([[_rgb(x) for x in row] for row in found.winners], aspect="auto", origin="lower")
    for y, (row, gains) in enumerate(zip(found.winners, found.gains, strict=True)):
        for x, (winner, gain) in enumerate(zip(row, gains, strict=True)):
            text = f"{found.strategies[winner]}\n{gain:.2f}"
            ink = "black" if mean(_rgb(winner)) > 0.5 else "white"
            axes.text(x, y, text, ha="center", va="center", color=ink, fontsize=8)
    axes.set_xticks(range(len(found.rates)), _rate_names(found))
    axes.set_yticks(range(len(found.tokens)), _token_names(found))
    axes.set(xlabel=f"GB/s of a link {found.level} hosts", ylabel="tokens of a rank")
    axes.set_title(f"{found.title}: winner, and its speed over the ring")


def _rgb(number: int) -> tuple[float, ...]:
    color = COLORS[number % len(COLORS)]
    return tuple(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))


def _rate_names(found: WinnerMap) -> list[str]:
    return [f"{rate / 1e9:g}" for rate in found.rates]


def _token_names(found: WinnerMap) -> list[str]:
    return [f"{count:,}" for count in found.tokens]
