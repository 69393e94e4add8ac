"""Counts of tokens and ranks, as users give them."""

from __future__ import annotations

from operator import index
from typing import Any

MAX_TOKENS = 2**40
"""Of a sequence: a thousand times what anybody trains on, and far from where int64 ends."""
MAX_RANKS = 2**16
"""The most ranks of a ring. Planning time grows with them; this many take seconds."""


def as_int(name: str, given: Any) -> int:
    """An integer of any type that is one.

    Raises:
        TypeError: if it is not an integer; the message names the argument.
    """
    try:
        if isinstance(given, bool):  # an int in Python, but True is not a number of anything
            raise TypeError
        return index(given)
    except (TypeError, RuntimeError):  # the latter of a tensor without content
        raise TypeError(f"{name} must be an int, got {given!r}") from None


def as_count(name: str, given: Any, smallest: int = 0, largest: int = MAX_TOKENS) -> int:
    """An integer in a range.

    Raises:
        TypeError: if it is no integer; names the argument.
        ValueError: if it is outside of the range.

    >>> as_count("seq_len", 8)
    8
    """
    count = as_int(name, given)
    if not smallest <= count <= largest:
        raise ValueError(f"{name} must be from {smallest} to {largest:,}, got {count}")
    return count
