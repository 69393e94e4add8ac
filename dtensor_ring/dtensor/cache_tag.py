"""What torch's compile caches know of annotated axes.

Note [Compile caches]: torch keeps compiled graphs on disk, for later runs and for other ranks of
the host. The key of a graph has the mesh, the placements and the global shape of a DTensor. It has
neither how an axis is annotated, nor the name of its group, nor the length of this rank's shard,
and all of them are constants of the graph. So a graph for one layout would run for another one,
silently wrong, and that of one rank would fail on the next. torch has a tag that is part of all
keys: what they lack goes there. The graphs that torch keeps in memory have no tag, and outlive the
world: they are dropped when a later world has another axis over the same ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.compiler.config as compiler

MARK = " dtensor_ring:"
"""Ends what others have in the tag, which stays."""

_SEEN: dict[tuple[int, ...], tuple[object, ...]] = {}
"""What graphs in memory may have as constants, by the ranks of an axis."""


def tag_caches(axes: Mapping[tuple[int, ...], tuple[object, ...]]) -> None:
    """Make all that is compiled from here on belong to the axes as they are.

    Args:
        axes: what is known of them, by their ranks; what is equal has an equal `repr` in each
            process.
    """
    # Another version of the package may compile to another graph.
    facts = repr((_version(), axes)).encode()
    others, _, _ = compiler.cache_key_tag.partition(MARK)
    compiler.cache_key_tag = others + MARK + blake2b(facts, digest_size=8).hexdigest()
    changed = any(_SEEN.get(ranks, of_axis) != of_axis for ranks, of_axis in axes.items())
    _SEEN.update(axes)
    if changed and "torch._dynamo" in sys.modules:  # else nothing was compiled
        torch.compiler.reset()


@cache
def _version() -> str:
    try:
        return version("dtensor-ring")
    except PackageNotFoundError:  # from a checkout
        return ""
