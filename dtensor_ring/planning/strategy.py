"""Strategies: how an attention is made parallel over an axis."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

from dtensor_ring.planning.route import ROUTES

TRADED = "ulysses"
"""Tokens are traded for heads (Jacobs et al., 2023, arXiv 2309.14509)."""


@dataclass(frozen=True)
class Strategy:
    """How an attention is made parallel over the ranks of an axis.

    Ranks 0 to `heads` - 1 of the axis are the first group, the next as many the second, and so on.
    Within a group each rank gives tokens and gets heads, until it has a part of the heads of all
    tokens of its group. Keys and values then travel among the groups: between ranks that have the
    same heads.

    >>> Strategy(heads=4).spec, Strategy(way="all_gather").spec
    ('ulysses:4', 'all_gather')
    """

    heads: int = 1
    """Consecutive ranks that trade tokens for heads; with 1 nothing is traded."""
    way: str = "ring"
    """How keys and values travel among the groups, a name in `ROUTES`."""

    default: ClassVar[str] = "ring"

    @property
    def spec(self) -> str:
        """The spelling that `as_strategy` reads."""
        if self.heads == 1:
            return self.way
        traded = f"{TRADED}:{self.heads}"
        return traded if self.way == self.default else f"{traded}+{self.way}"


class _Spelled(NamedTuple):
    """What a spelling says; `heads` are `None` if they are all ranks of the axis."""

    heads: int | None
    way: str


@lru_cache(maxsize=256)  # the ops spell their strategy in every call
def as_strategy(strategy: Strategy | str, world_size: int) -> Strategy:
    """The strategy itself, or the one of that spelling.

    Args:
        strategy: a strategy or its spelling. `"ring"`, `"around"`, `"direct"` and `"all_gather"`
            say how keys and values travel. `"ulysses"` trades tokens for heads over all ranks,
            `"ulysses:4"` over groups of four, among which a ring runs; `"ulysses:4+all_gather"` has
            another way among the groups.
        world_size: ranks of the axis.

    Raises:
        ValueError: if no strategy is spelled so, or its groups do not divide the axis.
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
    # One group has nobody to exchange keys and values with: all ways are the same.
    return Strategy(heads, way if heads < world_size or heads == 1 else Strategy.default)


def check_strategy(spelling: str, world_size: int | None = None) -> None:
    """Refuse what spells no strategy for an axis.

    Args:
        spelling: what `as_strategy` reads.
        world_size: the number of ranks of the axis; `None` is an axis of any size.

    Raises:
        ValueError: if no strategy is spelled so, or its groups do not divide the axis.
        TypeError: if the spelling is not a string.
    """
    if world_size is None:
        _spelled(spelling)
    else:
        as_strategy(spelling, world_size)


def is_traded(spelling: str) -> bool:
    """Whether a spelling may trade tokens for heads: on an axis of one rank nothing is traded."""
    return spelling.startswith(TRADED)


def why_not(strategy: Strategy, num_heads: int, num_key_heads: int) -> str | None:
    """Why an attention of so many heads cannot run by a strategy; `None` if it can.

    Args:
        strategy: for an axis.
        num_heads: query heads of a rank, of which tensor parallelism may have left a part.
        num_key_heads: heads of keys and values, likewise; one may go to several ranks.

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
    """What a spelling says."""
    if not isinstance(spelling, str):
        raise TypeError(f"strategy must be a name, a str, got {spelling!r}")
    if spelling in ROUTES:
        return _Spelled(1, spelling)
    traded, plus, way = spelling.partition("+")
    name, colon, heads = traded.partition(":")
    is_known = name == TRADED and (not plus or way in ROUTES)
    # Only ASCII digits: `isdigit` alone takes others, too.
    if not is_known or (colon and not (heads.isascii() and heads.isdigit() and int(heads))):
        raise ValueError(f"unknown strategy {spelling!r}; known strategies: {_spellings()}")
    return _Spelled(int(heads) if colon else None, way or Strategy.default)


def _spellings() -> str:
    """All spellings, for errors."""
    ways = ", ".join(ROUTES)
    return f"{ways}, {TRADED}, {TRADED}:<ranks of a group>, {TRADED}:<ranks>+<one of the first>"
