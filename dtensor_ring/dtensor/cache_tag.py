"""The tag of torch's caches of compiled graphs, which says what a graph has of a rank's axes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.compiler.config as compiler
from torch.distributed.tensor import DTensor

# Our part of the tag begins with it; only the text after it is replaced.
MARK = " dtensor_ring:"


# Note [Compile caches]: torch keeps compiled graphs on disk, for later runs and for other ranks of
# the host. The key of a graph contains the mesh, the placements and the global shape of a DTensor.
# It contains neither the annotation of an axis, nor the name of its group, nor the rank, which
# decides the length of its shard. All of these are constants of the graph. So a graph for one
# layout would silently run for another one, and the graph of one rank would fail on the next. torch
# has a tag that is part of all keys of a thread. While a ring is traced, before torch looks up a
# graph, we add the missing facts to the tag. Graphs in memory have no tag and outlive the process
# group, so they are dropped when there is a new group.
def tag_caches(rank: int, axes: Sequence[object]) -> None:
    """Make the cache keys of this thread depend on the rank and its axes from now on.

    Args:
        rank: the rank of this process.
        axes: facts about the axes; equal facts must have an equal `repr` in each process.
    """
    # Another version of the package may compile to a different graph.
    facts = repr((_version(), rank, axes)).encode()
    others, _, _ = compiler.cache_key_tag.partition(MARK)
    compiler.cache_key_tag = others + MARK + blake2b(facts, digest_size=8).hexdigest()


@cache
def _version() -> str:
    try:
        return version("dtensor-ring")
    except PackageNotFoundError:  # a checkout that is not installed
        return ""


def drop_graphs() -> None:
    """Drop all graphs in memory; other functions compile again, too."""
    if "torch._dynamo" in sys.modules:  # otherwise nothing was compiled
        torch._dynamo.reset_code_caches()


def drop_specs() -> None:
    """Drop the results of DTensor's rules, which hold the meshes of the tensors they came from."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    # As `torch.distributed.tensor.debug`, whose import loads much.
    propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
