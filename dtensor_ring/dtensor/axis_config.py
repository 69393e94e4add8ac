"""How attention over a mesh axis runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dtensor_ring.compute.kernels import check_kernel
from dtensor_ring.ops.options import Place
from dtensor_ring.planning.layout import Contiguous, Layout
from dtensor_ring.planning.run_table import PerBatch
from dtensor_ring.planning.strategy import check_strategy
from dtensor_ring.transport.policy import DEFAULT_POLICY, TransferPolicy


@dataclass(frozen=True)
class AxisConfig:
    """How attention over an axis runs; the same on all of its ranks."""

    layout: Layout
    strategy: str = "ring"
    kernel: str | None = None
    policy: TransferPolicy = DEFAULT_POLICY
    spec: str = field(init=False, repr=False, compare=False)
    """The layout's spelling, which the ops take; not computed in each call."""

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
        """Where the tokens of a call are; lengths are global, `None` if runs say them.

        A call may have a strategy of its own.
        """
        strategy = strategy or self.strategy
        return Place(self.spec, strategy, seq_len, key_seq_len, group_name, self.policy)

    def check_runs(self, are_given: bool, how: str = "is annotated") -> None:
        """Refuse a call whose batch brings runs that the layout does not ask for, or the opposite.

        Raises:
            ValueError: saying how the axis got its layout.
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


UNANNOTATED: AxisConfig = AxisConfig(Contiguous())
"""How attention runs over an axis that nobody configured."""

PER_BATCH: AxisConfig = AxisConfig(PerBatch())
"""The same, where the call brings the runs of its batch."""


def check_axis_options(
    layout: Layout,
    *,
    strategy: str | None = None,
    kernel: str | None = None,
    policy: TransferPolicy | None = None,
) -> None:
    """Refuse options that no axis takes, before there is one; `None` is the default.

    Raises:
        TypeError: if one is of another type.
        ValueError: if one is unknown.
    """
    configured(layout, strategy=strategy, kernel=kernel, policy=policy)


def configured(layout: Layout, **how: Any) -> AxisConfig:
    """The configuration of a layout, strategy, kernel and policy, where `None` is the default.

    Raises:
        TypeError: if one is of another type.
        ValueError: if one is unknown.
    """
    return AxisConfig(layout, **{name: value for name, value in how.items() if value is not None})
