"""Simulate a step over and over, with other meshes, strategies or machines, and see which wins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import inf, prod
from typing import Any, NamedTuple

from dtensor_ring.lab.machine import Curve, Links, Machine
from dtensor_ring.lab.report import Track, untracked
from dtensor_ring.lab.training.layer_attention import AttentionKind, model_attentions
from dtensor_ring.lab.training.step import SimulatedStep, simulate_step
from dtensor_ring.lab.training.step_request import MESH_AXES, StepMesh, StepRequest, step_request
from dtensor_ring.planning.strategy import Strategy, every_strategy


class SweepRow(NamedTuple):
    """One point of a sweep.

    Attributes:
        values: what was swept, by name.
        step: the simulated step; `None` if it cannot be.
        why_not: why it cannot be, or does not fit into memory; `None` if nothing is wrong.
    """

    values: Mapping[str, Any]
    step: SimulatedStep | None
    why_not: str | None

    def as_json(self) -> dict[str, Any]:
        """Return the numbers, as the command prints them in JSON."""
        step = None if self.step is None else self.step.as_json()
        return {"values": dict(self.values), "step": step, "why_not": self.why_not}


class StepSweep(NamedTuple):
    """Simulated steps of a sweep. Printed, it is a table."""

    rows: tuple[SweepRow, ...]

    def __str__(self) -> str:
        names = list(self.rows[0].values)
        table = [(*names, *COLUMNS), *(_cells(row) for row in self.rows)]
        # A reason is one cell behind the others, which does not widen a column.
        count = len(names) + len(COLUMNS)
        widths = [max(len(cells[i]) for cells in table if i < len(cells)) for i in range(count)]
        return "\n".join(
            "  ".join(
                [cell.rjust(width) for cell, width in zip(cells, widths, strict=False)]
                + [*cells[count:]]
            ).rstrip()
            for cells in table
        )


COLUMNS = ("ms", "MFU", "tokens/s", "waits, ms", "GiB")


def _cells(row: SweepRow) -> tuple[str, ...]:
    values = tuple(map(str, row.values.values()))
    reason = () if row.why_not is None else (row.why_not,)
    if row.step is None:
        return (*values, *["-"] * len(COLUMNS), *reason)
    step = row.step
    waits = sum(step.parts[name] for name in ("ring", "fsdp", "tp"))
    numbers = f"{step.seconds * 1e3:,.1f}", f"{step.mfu:.1%}", f"{step.tokens_per_second:,.0f}"
    return (
        *values,
        *numbers,
        f"{waits * 1e3:,.1f}",
        f"{step.memory['peak'] / 2**30:,.1f}",
        *reason,
    )


# What may be swept besides the axes of the mesh: arguments of `simulate_step`.
NUMBERS = ("seq_len", "batch")
WORDS = ("strategy", "layout", "machine", "dtype", "checkpoint")
ALL = "all"


def parse_sweep(text: Sequence[str]) -> dict[str, list[Any]]:
    """Parse what is swept.

    Args:
        text: names, each with values that are separated by commas.

    Raises:
        ValueError: if a name cannot be swept or is there twice, or a value is no number.

    >>> parse_sweep(["cp=1,2", "strategy=all"])
    {'cp': [1, 2], 'strategy': ['all']}
    """
    found: dict[str, list[Any]] = {}
    for part in text:
        name, _, values = part.partition("=")
        name = "dp_shard" if name == "dp" else name
        known = (*MESH_AXES, *NUMBERS, *WORDS)
        if name not in known or not values or name in found:
            raise ValueError(f"{part!r} cannot be swept: cp=1,2,4 or one of {', '.join(known)}")
        found[name] = [_value(name, x) for x in values.split(",")]
    return found


def _value(name: str, text: str) -> Any:
    if name in WORDS:
        return text
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text} is not a number") from None


def sweep_steps(
    swept: Mapping[str, Sequence[Any]],
    *,
    track: Track[dict[str, Any]] = untracked,
    **arguments: Any,
) -> StepSweep:
    """Simulate a step at each combination of values.

    The number of ranks stays what the mesh has: where an axis of it is swept, `dp_shard` takes the
    ranks that the others leave.

    Args:
        swept: values by name; the strategy "all" is every one that divides the axis.
        track: goes through the combinations, and may show how many are done.
        arguments: all other arguments of `simulate_step`.

    Returns:
        A `StepSweep`; print it. Rows have reasons where a step cannot be simulated or does not fit
        into memory.

    Raises:
        ValueError: if the mesh is not one.
    """
    rows = []
    for chosen in track(list(_points(swept, arguments)), "steps"):
        changed = arguments | {x: y for x, y in chosen.items() if x not in MESH_AXES}
        try:
            mesh = _mesh(arguments["mesh"], chosen)
            step = simulate_step(**(changed | {"mesh": mesh}))
        except ValueError as error:
            rows.append(SweepRow(chosen, None, str(error)))
        else:
            rows.append(SweepRow(chosen, step, step.why_not))
    return StepSweep(tuple(rows))


def _points(
    swept: Mapping[str, Sequence[Any]], arguments: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield each combination of values."""
    size = StepMesh.of(arguments["mesh"], arguments.get("world_size")).cp
    for values in product(*swept.values()):
        chosen = dict(zip(swept, values, strict=True))
        if chosen.get("strategy") != ALL:
            yield chosen
            continue
        found = every_strategy(cp) if (cp := chosen.get("cp", size)) > 1 else [Strategy()]
        for strategy in found:
            yield chosen | {"strategy": strategy.spec}


def _mesh(given: Mapping[str, int], chosen: Mapping[str, Any]) -> dict[str, int]:
    """Return the mesh with the swept axes, of as many ranks as before.

    Raises:
        ValueError: if the axes do not divide the ranks.
    """
    mesh = StepMesh.of(given)
    axes = mesh._asdict() | {x: y for x, y in chosen.items() if x in MESH_AXES}
    if axes == mesh._asdict() or "dp_shard" in chosen:
        return axes
    others = prod(size for name, size in axes.items() if name != "dp_shard")
    if mesh.world_size % max(others, 1):
        raise ValueError(f"{others} ranks of the other axes do not divide {mesh.world_size}")
    return axes | {"dp_shard": mesh.world_size // others}


# Two sizes of large messages, in bytes, between which the speed of a link is read.
LARGE = 2**30, 2**31


class WinnerMap(NamedTuple):
    """The fastest strategy of a model's attentions, forward and backward.

    Attributes:
        title: what model, mesh and machine.
        level: which links have the rates, "inside" hosts or "between" them.
        tokens: tokens of a rank, by row.
        rates: bytes per second of a link, by column.
        strategies: specs, in the order of the numbers in `winners`.
        winners: number of the fastest strategy by row and column.
        gains: seconds of the ring over those of the winner, by row and column.
    """

    title: str
    level: str
    tokens: tuple[int, ...]
    rates: tuple[float, ...]
    strategies: tuple[str, ...]
    winners: tuple[tuple[int, ...], ...]
    gains: tuple[tuple[float, ...], ...]


def link_rate(links: Links) -> float:
    """Return the bytes per second of large messages between two ranks.

    >>> line = Curve.line(1.0, 100.0)
    >>> round(link_rate(Links(line, line, line, line)))
    100
    """
    small, large = LARGE
    return (large - small) / (links.p2p(large) - links.p2p(small))


def with_rate(links: Links, rate: float) -> Links:
    """Return links of another speed; latencies and the order of collectives stay."""
    factor = link_rate(links) / rate

    def scaled(curve: Curve) -> Curve:
        first = curve.seconds[0]
        return Curve(curve.sizes, tuple(first + (x - first) * factor for x in curve.seconds))

    return Links(
        p2p=scaled(links.p2p),
        all_to_all=scaled(links.all_to_all),
        all_gather=scaled(links.all_gather),
        reduce_scatter=scaled(links.reduce_scatter),
    )


def winner_map(
    config: Any,
    mesh: Mapping[str, int],
    machine: Machine | str,
    tokens: Sequence[int],
    rates: Sequence[float],
    **options: Any,
) -> WinnerMap:
    """Simulate all strategies at each number of tokens and link rate.

    Args:
        config: as in `simulate_step`.
        mesh: ranks by axis.
        machine: the machine. If the ranks of `cp` are on several hosts, the links between hosts
            have the rates, else those inside.
        tokens: tokens of a rank.
        rates: bytes per second of a link.
        options: other arguments of `simulate_step`, without the strategy.

    Raises:
        ValueError: if the mesh has no context parallelism, or as `simulate_step` does.
    """
    first = step_request(config, tokens[0] * StepMesh.of(mesh).cp, mesh, machine, **options)
    cp, found = first.mesh.cp, first.machine
    if cp == 1:
        raise ValueError("without cp in the mesh, there are no strategies to choose from")
    level = "between" if cp * first.mesh.tp > found.ranks_per_host else "inside"
    changed = [_with_links(found, level, rate) for rate in rates]
    names = [x.spec for x in every_strategy(cp)]
    seconds = [
        [
            [_attention(first._replace(machine=x, strategy=name), count) for name in names]
            for x in changed
        ]
        for count in tokens
    ]
    return WinnerMap(
        title=f"{first.model.name}, {cp} ranks of {found.name}",
        level=level,
        tokens=tuple(tokens),
        rates=tuple(rates),
        strategies=tuple(names),
        winners=tuple(tuple(x.index(min(x)) for x in row) for row in seconds),
        gains=tuple(tuple(x[0] / min(x) for x in row) for row in seconds),
    )


def _with_links(machine: Machine, level: str, rate: float) -> Machine:
    """Return a machine whose links of one level have another speed."""
    if level == "inside":
        return replace(machine, inside=with_rate(machine.inside, rate))
    return replace(machine, between=with_rate(machine.between, rate))


def _attention(asked: StepRequest, tokens: int) -> float:
    """Return the seconds of all attentions by tokens of a rank; infinite if no strategy fits."""
    seq_len = tokens * asked.mesh.cp
    asked = asked._replace(seq_len=seq_len, shard=asked.shard._replace(tokens=tokens * asked.batch))
    try:
        found = model_attentions(asked)
    except ValueError:
        return inf
    layers = (layer for layer in asked.model.layers if layer.heads[0])
    return sum(found[AttentionKind.of(layer)].total for layer in layers)
