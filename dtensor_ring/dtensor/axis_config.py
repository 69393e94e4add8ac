"""How attention over an axis runs, and the tag by which compilers' caches know it.

Note [Compile caches]: torch keeps compiled graphs on disk, for later runs and for other ranks of
the host. The key of a graph contains the mesh, the placements and the global shape of a DTensor. It
contains neither the annotation of an axis, nor the name of its group, nor the rank, which decides
the length of its shard. All of these are constants of the graph. So a graph for one layout would
silently run for another one, and the graph of one rank would fail on the next. torch has a tag that
is part of all keys of a thread. While a ring is traced, before torch looks up a graph, we add the
missing facts to the tag. Graphs in memory have no tag and outlive the process group, so they are
dropped when there is a new group.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.compiler.config as compiler

from dtensor_ring.compute.kernels import check_kernel
from dtensor_ring.ops.options import Place
from dtensor_ring.planning.layout import Contiguous, Layout
from dtensor_ring.planning.run_table import PerBatch
from dtensor_ring.planning.strategy import check_strategy
from dtensor_ring.transport.policy import DEFAULT_POLICY, TransferPolicy

# Begins our part of the tag; only the text behind it is replaced.
MARK = " dtensor_ring:"


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


@dataclass(frozen=True)
class AxisConfig:
    """How attention over an axis runs; the same on all ranks of the axis.

    Attributes:
        layout: how tokens are sharded.
        strategy: the spec of the strategy.
        kernel: name of the block kernel.
        policy: the dtypes in which messages travel.
        spec: the spec of the layout for the ops, computed once.
    """

    layout: Layout
    strategy: str = "ring"
    kernel: str | None = None
    policy: TransferPolicy = DEFAULT_POLICY
    spec: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_strategy(self.strategy)
        check_kernel(self.kernel)
        if not isinstance(self.policy, TransferPolicy):
            raise TypeError(
                f"policy must be a TransferPolicy, such as TransferPolicy(), got {self.policy!r}"
            )
        object.__setattr__(self, "spec", self.layout.spec)

    def place(
        self,
        group_name: str,
        seq_len: int | None,
        key_seq_len: int | None,
        strategy: str | None = None,
    ) -> Place:
        """Return the place of a call; lengths are global, `None` if they follow from runs.

        The call's own strategy, if given, replaces that of the axis.
        """
        strategy = strategy or self.strategy
        return Place(self.spec, strategy, seq_len, key_seq_len, group_name, self.policy)

    def check_runs(self, are_given: bool, how: str = "is annotated") -> None:
        """Refuse runs for a layout that needs none, and missing runs for one that needs them.

        Raises:
            ValueError: says how the axis got its layout.
        """
        if are_given and not self.layout.per_batch:
            raise ValueError(
                f"the axis {how} {self.layout.name}, so its tokens are in that order: leave runs "
                "out, or annotate the axis, before its first use, with the Balanced layout of a "
                "batch"
            )
        if self.layout.per_batch and not are_given:
            raise ValueError(
                f"the axis {how} {self.layout.name}, so the order of its tokens belongs to a "
                "batch: call ring_attention(..., runs=sequence_runs(layout)), no other attention "
                "can take it"
            )


# The configuration of an axis that nobody configured.
UNANNOTATED: AxisConfig = AxisConfig(Contiguous())

# The same for calls with the runs of their batch.
PER_BATCH: AxisConfig = AxisConfig(PerBatch())


def check_axis_options(
    layout: Layout,
    *,
    strategy: str | None = None,
    kernel: str | None = None,
    policy: TransferPolicy | None = None,
) -> None:
    """Refuse options that no axis accepts, before there is an axis; `None` is the default.

    Raises:
        TypeError: if one has a wrong type.
        ValueError: if one is unknown.
    """
    configured(layout, strategy=strategy, kernel=kernel, policy=policy)


def configured(layout: Layout, **how: Any) -> AxisConfig:
    """Make the configuration of a layout, strategy, kernel and policy; `None` is the default.

    Raises:
        TypeError: if one has a wrong type.
        ValueError: if one is unknown.
    """
    return AxisConfig(layout, **{name: value for name, value in how.items() if value is not None})
