"""What torch's compile caches know of annotated axes.

Note [Compile caches]: torch keeps compiled graphs on disk, for later runs and for other ranks of
the host. The key of a graph has the mesh, the placements and the global shape of a DTensor. It has
neither how an axis is annotated, nor the name of its group, nor the length of this rank's shard,
and all of them are constants of the graph. So a graph for one layout would run for another one,
silently wrong, and that of one rank would fail on the next. torch has a tag that is part of all
keys: what they lack goes there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version

import torch.compiler.config as compiler

MARK = " dtensor_ring:"
"""Ends what others have in the tag, which stays."""


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
