"""Which strategy wins, by the tokens of a rank and by the speed of the links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

from dtensor_ring.planning.strategy import every_strategy
from dtensor_ring.simulate.machine import Curve, Links, Machine
from dtensor_ring.simulate.training.layer_attention import AttentionKind, model_attentions
from dtensor_ring.simulate.training.step_mesh import StepMesh
from dtensor_ring.simulate.training.step_request import StepRequest, step_request

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

    return Links(*(scaled(getattr(links, name)) for name in Links.__dataclass_fields__))


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
    """Return the seconds of all attentions with so many tokens of a rank; infinite if none."""
    seq_len = tokens * asked.mesh.cp
    asked = asked._replace(seq_len=seq_len, shard=asked.shard._replace(tokens=tokens * asked.batch))
    try:
        found = model_attentions(asked)
    except ValueError:
        return inf
    return sum(found[AttentionKind.of(layer)].total for layer in asked.model.layers)
