"""What torch's compile caches know of the axes of this rank.

Note [Compile caches]: torch keeps compiled graphs on disk, for later runs and for other ranks of
the host. The key of a graph has the mesh, the placements and the global shape of a DTensor. It has
neither how an axis is annotated, nor the name of its group, nor the rank, which says how long its
shard is. All of them are constants of the graph. So a graph for one layout would run for another
one, silently wrong, and that of one rank would fail on the next. torch has a tag that is part of
all keys: what they lack goes there. The graphs that torch keeps in memory have no tag, and outlive
the world: they are dropped when a later world has another axis over the same ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.compiler.config as compiler

MARK = " dtensor_ring:"
"""Ends what others have in the tag, which stays."""

_SEEN: dict[tuple[int, ...], tuple[object, ...]] = {}
"""What graphs in memory may have as constants, by the ranks of an axis."""


def tag_caches(rank: int, axes: Sequence[object]) -> None:
    """Make the keys of all that is compiled from here on depend on the rank and its axes.

    Args:
        rank: of this process.
        axes: what is known of them; what is equal has an equal `repr` in each process.
    """
    # Another version of the package may compile to another graph.
    facts = repr((_version(), rank, axes)).encode()
    others, _, _ = compiler.cache_key_tag.partition(MARK)
    compiler.cache_key_tag = others + MARK + blake2b(facts, digest_size=8).hexdigest()


@cache
def _version() -> str:
    try:
        return version("dtensor-ring")
    except PackageNotFoundError:  # from a checkout
        return ""


def keep_graphs_of(ranks: tuple[int, ...], constants: tuple[object, ...]) -> None:
    """Drop the graphs in memory if there may be some for another axis over the same ranks.

    Args:
        ranks: of the axis, in order.
        constants: what graphs have of it.
    """
    before = _SEEN.setdefault(ranks, constants)
    _SEEN[ranks] = constants
    if before != constants and "torch._dynamo" in sys.modules:  # else nothing was compiled
        torch.compiler.reset()
