"""Strategies: how an attention is made parallel over an axis."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

from dtensor_ring.planning.route import ROUTES

# The all-to-all of tokens and heads (Jacobs et al., 2023, arXiv 2309.14509).
TRADED = "ulysses"


@dataclass(frozen=True)
class Strategy:
    """How an attention is made parallel over the ranks of an axis.

    Each `heads` consecutive ranks of the axis form a group. An all-to-all within the group gives
    each rank a part of the heads for all tokens of the group. Keys and values then travel among
    the groups, between ranks that have the same heads.

    Attributes:
        heads: number of consecutive ranks in a group; with 1 there is no all-to-all.
        way: how keys and values travel among the groups, a name in `ROUTES`.

    >>> Strategy(heads=4).spec, Strategy(way="all_gather").spec
    ('ulysses:4', 'all_gather')
    """

    heads: int = 1
    way: str = "ring"

    default: ClassVar[str] = "ring"

    @property
    def spec(self) -> str:
        """The spelling that `as_strategy` reads."""
        if self.heads == 1:
            return self.way
        traded = f"{TRADED}:{self.heads}"
        return traded if self.way == self.default else f"{traded}+{self.way}"


class _Spelled(NamedTuple):
    """A parsed spelling; `heads` is `None` if the group is the whole axis."""

    heads: int | None
    way: str


@lru_cache(maxsize=256)  # the ops spell their strategy in every call
def as_strategy(strategy: Strategy | str, world_size: int) -> Strategy:
    """Return the strategy for an axis, given as a strategy or its spelling.

    Args:
        strategy: a strategy or its spelling. `"ring"`, `"around"`, `"direct"` and `"all_gather"`
            say how keys and values travel. `"ulysses"` is an all-to-all over all ranks.
            `"ulysses:4"` is one within groups of four, with a ring among the groups;
            `"ulysses:4+all_gather"` names another way among the groups.
        world_size: number of ranks of the axis.

    Raises:
        ValueError: if the spelling is unknown, or its groups do not divide the axis.
        TypeError: if the spelling is not a string.

    >>> as_strategy("ulysses", 8)
    Strategy(heads=8, way='ring')
    >>> as_strategy("ulysses:4+all_gather", 8)
    Strategy(heads=4, way='all_gather')
    """
    if isinstance(strategy, Strategy):
        strategy = strategy.spec
    heads, way = _spelled(strategy)
    heads = world_size if heads is None else heads
    if world_size % heads:
        fitting = [f"{TRADED}:{n}" for n in range(2, world_size + 1) if world_size % n == 0]
        raise ValueError(
            f"{strategy!r} trades tokens for heads over groups of {heads} ranks, which do not "
            f"divide the {world_size} of the axis; these do: {', '.join(fitting) or 'ring'}"
        )
    # A single group has no other to exchange keys and values with, so all ways are the same.
    return Strategy(heads, way if heads < world_size or heads == 1 else Strategy.default)


def check_strategy(spelling: str, world_size: int | None = None) -> None:
    """Refuse a spelling that is no strategy for an axis.

    Args:
        spelling: what `as_strategy` reads.
        world_size: number of ranks of the axis; `None` is an axis of any size.

    Raises:
        ValueError: if the spelling is unknown, or its groups do not divide the axis.
        TypeError: if the spelling is not a string.
    """
    if world_size is None:
        _spelled(spelling)
    else:
        as_strategy(spelling, world_size)


def is_traded(spelling: str) -> bool:
    """Return whether the spelling has an all-to-all, which does nothing on an axis of one rank."""
    return spelling.startswith(TRADED)


def why_not(strategy: Strategy, num_heads: int, num_key_heads: int) -> str | None:
    """Return why an attention with these heads cannot use a strategy, or `None` if it can.

    Args:
        strategy: the strategy of the axis.
        num_heads: query heads on a rank, after tensor parallelism.
        num_key_heads: heads of keys and values on a rank; one may be copied to several ranks.

    >>> why_not(Strategy(heads=4), 2, 1)
    '2 query heads cannot be dealt to the 4 ranks of a group, each has to get one'
    """
    if strategy.heads > 1 and min(num_heads, num_key_heads) and num_heads < strategy.heads:
        return (
            f"{num_heads} query heads cannot be dealt to the {strategy.heads} ranks of a group, "
            "each has to get one"
        )
    return None


def _spelled(spelling: str) -> _Spelled:
    """Parse a spelling."""
    if not isinstance(spelling, str):
        raise TypeError(f"strategy must be a name, a str, got {spelling!r}")
    if spelling in ROUTES:
        return _Spelled(1, spelling)
    traded, plus, way = spelling.partition("+")
    name, colon, heads = traded.partition(":")
    is_known = name == TRADED and (not plus or way in ROUTES)
    # `isdigit` alone accepts digits that are not ASCII.
    if not is_known or (colon and not (heads.isascii() and heads.isdigit() and int(heads))):
        raise ValueError(f"unknown strategy {spelling!r}; known strategies: {_spellings()}")
    return _Spelled(int(heads) if colon else None, way or Strategy.default)


def _spellings() -> str:
    """Return all spellings, for errors."""
    ways = ", ".join(ROUTES)
    return f"{ways}, {TRADED}, {TRADED}:<ranks of a group>, {TRADED}:<ranks>+<one of the first>"
