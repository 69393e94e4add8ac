"""Strategies: how an attention is made parallel over an axis."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

from dtensor_ring.planning.route import ROUTES

# The all-to-all of tokens and heads (Jacobs et al., 2023, arXiv 2309.14509).
ULYSSES = "ulysses"

# The fastest strategy on a machine, for each call.
AUTO = "auto"


@dataclass(frozen=True)
class Strategy:
    """How an attention is made parallel over the ranks of an axis.

    Each `heads` consecutive ranks of the axis form a group. An all-to-all within the group gives
    each rank a part of the heads for all tokens of the group. Keys and values then travel among
    the groups, between ranks that have the same heads.

    Attributes:
        heads: number of consecutive ranks in a group; with 1 there is no all-to-all.
        route: how keys and values travel among the groups, a name in `ROUTES`.

    >>> Strategy(heads=4).spec, Strategy(route="all_gather").spec
    ('ulysses:4', 'all_gather')
    """

    heads: int = 1
    route: str = "ring"

    default: ClassVar[str] = "ring"

    @property
    def spec(self) -> str:
        """The spec that `as_strategy` reads."""
        if self.heads == 1:
            return self.route
        ulysses = f"{ULYSSES}:{self.heads}"
        return ulysses if self.route == self.default else f"{ulysses}+{self.route}"


class _ParsedStrategy(NamedTuple):
    """A parsed spec; `heads` is `None` if the group is the whole axis."""

    heads: int | None
    route: str


@lru_cache(maxsize=256)  # the ops pass the spec of their strategy in every call
def as_strategy(strategy: Strategy | str, world_size: int) -> Strategy:
    """Return the strategy for an axis, given as a strategy or its spec.

    Args:
        strategy: a strategy or its spec. `"ring"`, `"around"`, `"direct"` and `"all_gather"`
            say how keys and values travel. `"ulysses"` is an all-to-all over all ranks.
            `"ulysses:4"` is one within groups of four, with a ring among the groups;
            `"ulysses:4+all_gather"` names another route among the groups.
        world_size: number of ranks of the axis.

    Raises:
        ValueError: if the spec is unknown, or its groups do not divide the axis.
        TypeError: if the spec is not a string.

    >>> as_strategy("ulysses", 8)
    Strategy(heads=8, route='ring')
    >>> as_strategy("ulysses:4+all_gather", 8)
    Strategy(heads=4, route='all_gather')
    """
    if isinstance(strategy, Strategy):
        strategy = strategy.spec
    heads, route = _parse(strategy)
    heads = world_size if heads is None else heads
    if world_size % heads:
        fitting = [f"{ULYSSES}:{n}" for n in range(2, world_size + 1) if world_size % n == 0]
        raise ValueError(
            f"{strategy!r} exchanges tokens for heads over groups of {heads} ranks, which do not "
            f"divide the {world_size} of the axis; these do: {', '.join(fitting) or 'ring'}"
        )
    # A single group has no other to exchange keys and values with, so all routes are the same.
    return Strategy(heads, route if heads < world_size or heads == 1 else Strategy.default)


def every_strategy(world_size: int) -> list[Strategy]:
    """Return the strategies of an axis: every route, then all-to-alls over groups of each size.

    >>> [strategy.spec for strategy in every_strategy(4)]
    ['ring', 'around', 'direct', 'all_gather', 'ulysses:2', 'ulysses:4']
    """
    sizes = [n for n in range(2, world_size + 1) if world_size % n == 0]
    return [*(Strategy(route=route) for route in ROUTES), *map(Strategy, sizes)]


def check_strategy(spec: str, world_size: int | None = None) -> None:
    """Refuse a spec that is no strategy for an axis.

    Args:
        spec: what `as_strategy` reads, or "auto".
        world_size: number of ranks of the axis; `None` is an axis of any size.

    Raises:
        ValueError: if the spec is unknown, or its groups do not divide the axis.
        TypeError: if the spec is not a string.
    """
    if isinstance(spec, str) and spec == AUTO:
        return
    if world_size is None:
        _parse(spec)
    else:
        as_strategy(spec, world_size)


def has_all_to_all(spec: str) -> bool:
    """Return whether the spec has an all-to-all, which does nothing on an axis of one rank."""
    return spec.startswith(ULYSSES)


def why_not(strategy: Strategy, num_heads: int, num_key_heads: int) -> str | None:
    """Return why an attention with these heads cannot use a strategy, or `None` if it can.

    Args:
        strategy: the strategy of the axis.
        num_heads: query heads on a rank, after tensor parallelism.
        num_key_heads: heads of keys and values on a rank; one may be copied to several ranks.

    >>> why_not(Strategy(heads=4), 2, 1)
    '2 query heads cannot be sharded over the 4 ranks of a group, each has to get one'
    """
    if strategy.heads > 1 and min(num_heads, num_key_heads) and num_heads < strategy.heads:
        return (
            f"{num_heads} query heads cannot be sharded over the {strategy.heads} ranks of a "
            "group, each has to get one"
        )
    return None


def _parse(spec: str) -> _ParsedStrategy:
    """Parse a spec."""
    if not isinstance(spec, str):
        raise TypeError(f"strategy must be a name, a str, got {spec!r}")
    if spec in ROUTES:
        return _ParsedStrategy(1, spec)
    ulysses, plus, route = spec.partition("+")
    name, colon, heads = ulysses.partition(":")
    is_known = name == ULYSSES and (not plus or route in ROUTES)
    # `isdigit` alone accepts digits that are not ASCII.
    if not is_known or (colon and not (heads.isascii() and heads.isdigit() and int(heads))):
        raise ValueError(f"unknown strategy {spec!r}; known strategies: {_known_specs()}")
    return _ParsedStrategy(int(heads) if colon else None, route or Strategy.default)


def _known_specs() -> str:
    """Return all specs, for errors."""
    routes = ", ".join(ROUTES)
    return (
        f"{routes}, {ULYSSES}, {ULYSSES}:<ranks of a group>, {ULYSSES}:<ranks>+<one of the first>"
        f", and for attention {AUTO}"
    )
