"""What torch's compile caches know of the axes of this rank.

Note [Compile caches]: torch keeps compiled graphs on disk, for later runs and for other ranks of
the host. The key of a graph has the mesh, the placements and the global shape of a DTensor. It has
neither how an axis is annotated, nor the name of its group, nor the rank, which says how long its
shard is. All of them are constants of the graph. So a graph for one layout would run for another
one, silently wrong, and that of one rank would fail on the next. torch has a tag that is part of
the keys of a thread: what they lack goes there while a ring is traced, before torch looks for a
graph. The graphs that torch keeps in memory have no tag, and outlive the process group: they are
dropped when there is a new one.
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
"""Separates what is in the tag from our part; only what follows it is replaced."""


def tag_caches(rank: int, axes: Sequence[object]) -> None:
    """Make the keys of what this thread compiles from here on depend on the rank and its axes.

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


def drop_graphs() -> None:
    """Drop the graphs in memory, those of other functions among them: they compile again."""
    if "torch._dynamo" in sys.modules:  # else nothing was compiled
        torch._dynamo.reset_code_caches()
