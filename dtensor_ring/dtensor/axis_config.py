"""How attention over an axis runs: the options of an axis, and what a token mesh knows of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from torch.distributed import DeviceMesh

from dtensor_ring.compute.kernels import check_kernel
from dtensor_ring.dtensor.laboratory import is_machine
from dtensor_ring.ops.options import Place
from dtensor_ring.planning.layout import Contiguous, Layout
from dtensor_ring.planning.run_table import PerBatch
from dtensor_ring.planning.strategy import check_strategy
from dtensor_ring.transport.transport import DEFAULT_POLICY, TransferPolicy

if TYPE_CHECKING:
    from dtensor_ring.dtensor.laboratory import Machine

# Where a mesh keeps what it knows of the order of tokens, see Note [Token meshes].
TOKENS = "_dtensor_ring_tokens"


@dataclass(frozen=True)
class AxisConfig:
    """How attention over an axis runs; the same on all ranks of the axis.

    Attributes:
        layout: how tokens are sharded.
        strategy: the spec of the strategy.
        kernel: name of the block kernel.
        policy: the dtypes in which messages travel.
        machine: by which the strategy "auto" chooses; `None` for the data sheet of the device.
        spec: the spec of the layout for the ops, computed once.
    """

    layout: Layout
    strategy: str = "ring"
    kernel: str | None = None
    policy: TransferPolicy = DEFAULT_POLICY
    machine: Machine | None = None
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

    @property
    def options(self) -> list[str]:
        """Describe the options that are not the defaults; equal ones read the same on all ranks."""
        named: dict[str, Any] = {
            "strategy": self.strategy,
            "kernel": self.kernel,
            "policy": self.policy,
        }
        named["machine"] = self.machine and self.machine.label
        defaults = {"strategy": "ring", "policy": DEFAULT_POLICY}
        return [f"{name}={x}" for name, x in named.items() if x != defaults.get(name)]

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
    machine: Any = None,
) -> None:
    """Refuse options that no axis accepts, before there is an axis; `None` is the default.

    Raises:
        TypeError: if one has a wrong type.
        ValueError: if one is unknown.
    """
    check_machine(machine)
    configured(layout, strategy=strategy, kernel=kernel, policy=policy)


def check_machine(given: Any) -> None:
    """Refuse what cannot name a machine, without reading a file.

    Raises:
        TypeError: if it is neither a machine nor a name.
    """
    if given is not None and not isinstance(given, str | PathLike) and not is_machine(given):
        raise TypeError(
            f"machine must be a Machine, a name such as 'h100', or a file, got {given!r}"
        )


def configured(layout: Layout, **how: Any) -> AxisConfig:
    """Make the configuration of a layout and the options of an axis; `None` is the default.

    Raises:
        TypeError: if one has a wrong type.
        ValueError: if one is unknown.
    """
    return AxisConfig(layout, **{name: value for name, value in how.items() if value is not None})


def differ(old: AxisConfig, new: AxisConfig) -> bool:
    """Return whether a graph of one configuration is wrong for the other."""
    # The layouts of two batches differ, but graphs take their runs as inputs.
    same = old.layout.per_batch and new.layout.per_batch
    return old != (replace(new, layout=old.layout) if same else new)


@dataclass(frozen=True)
class Tokens:
    """What a token mesh knows, see Note [Token meshes].

    Attributes:
        mesh: the user's mesh of the axis.
        config: how attention over the axis runs.
        layout: the order of the tokens: that of the config, or of a batch, or `Padded`.
        averages: whether gradients average over the axis, as those of a plan's outputs do; else
            they are those of DTensor.
    """

    mesh: DeviceMesh
    config: AxisConfig
    layout: Layout
    averages: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Tokens:
        """Return itself: a copy of a tensor is on the same axis."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle nothing: a mesh that is loaded finds its order by its name."""
        return nothing, ()


def nothing() -> None:
    """Return `None`, for what is pickled as nothing."""
