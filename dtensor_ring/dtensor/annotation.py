"""The record of a mesh axis: its layout, how attention over it runs, and compilers' tag.

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
from os import PathLike
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.compiler.config as compiler
import torch.distributed as dist
from torch._guards import TracingContext
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import _disable_current_modes

from dtensor_ring.compute.kernels import check_kernel
from dtensor_ring.dtensor.laboratory import is_machine
from dtensor_ring.ops.options import Place, group_named
from dtensor_ring.planning.layout import Contiguous, Layout
from dtensor_ring.planning.run_table import PerBatch
from dtensor_ring.planning.strategy import AUTO, as_strategy, check_strategy
from dtensor_ring.transport.transport import DEFAULT_POLICY, TransferPolicy

if TYPE_CHECKING:
    from dtensor_ring.dtensor.laboratory import Machine

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


@dataclass
class Annotation:
    """The record of one axis.

    Attributes:
        ranks: the global ranks of the axis, in order.
        config: how attention runs over the axis; `None` until it is configured or used.
        is_assumed: whether the config is a default that the first use assumed.
        group_name: the group that was last used over these ranks.
        num_layers: the number of modules that attend over the axis; ranks call them by number.
        choices: the configuration that "auto" has chosen by, and what, see `choice_of`.
        machines: those read for the axis, by the names that were given, and "" for the default.
    """

    ranks: tuple[int, ...]
    config: AxisConfig | None = None
    is_assumed: bool = False
    group_name: str | None = None
    num_layers: int = 0
    choices: tuple[AxisConfig | None, dict[Any, Any]] = field(default_factory=lambda: (None, {}))
    machines: dict[str, Machine] = field(default_factory=dict)

    @property
    def how(self) -> str:
        """How the axis got its layout, as the words of an error before the layout's name."""
        return "was used unannotated, which makes it" if self.is_assumed else "is annotated"

    def __str__(self) -> str:
        return f"{self.how} {None if self.config is None else self.config.layout.spec}"

    @property
    def layout(self) -> Layout | None:
        """The layout that the axis was annotated with; `None` if the first use assumed one."""
        return None if self.config is None or self.is_assumed else self.config.layout

    @property
    def config_or_default(self) -> AxisConfig:
        """The configuration for a call that says where its tokens are; assumes nothing.

        Such a call ignores the layout but uses the axis's strategy, kernel and policy.
        """
        return self.config or UNANNOTATED

    def assumed(self, config: AxisConfig) -> AxisConfig:
        """Return the configuration; without one, record that of the first use for good."""
        if self.config is None:
            self.config, self.is_assumed = config, True
        return self.config


# By the axis's global ranks, in order. Entries die with the default process group that numbers the
# ranks. Not by mesh or group: DTensor treats meshes over the same ranks as equal, and may replace
# one by the other.
_AXES: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], Annotation]] = WeakKeyDictionary()

# The same records by group, so that a call looks one up without listing its ranks.
_BY_GROUP: WeakKeyDictionary[ProcessGroup, Annotation] = WeakKeyDictionary()

# The default process group that numbers the ranks of the last record, if there is one.
_LAST: list[ref[ProcessGroup]] = []


def annotation_of(group: ProcessGroup) -> Annotation:
    """Return the record of the axis that a group spans."""
    if torch.compiler.is_compiling():
        _has_record(group.group_name)
    found = _BY_GROUP.get(group)
    return _new_record(group) if found is None else found


def _new_record(group: ProcessGroup) -> Annotation:
    world = dist.group.WORLD
    assert world is not None, "a mesh has a world"
    _begin(world)
    ranks = tuple(dist.get_process_group_ranks(group))
    found = _AXES.setdefault(world, {}).setdefault(ranks, Annotation(ranks))
    # Two meshes over the same ranks have two groups, but are one axis.
    _BY_GROUP[group], found.group_name = found, group.group_name
    return found


def _has_record(group_name: str) -> bool:
    """Make the record of an axis that is first used in a compiled function.

    It is made while that is traced, because torch 2.11 cannot do it after the graph has run.
    """
    group = group_named(group_name)
    return group in _BY_GROUP or bool(_new_record(group))


# Constant while the group is alive, see `ulysses_heads`.
_has_record._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _begin(world: ProcessGroup) -> None:
    """Drop the graphs of an earlier world, if no compiler is tracing."""
    if torch.compiler.is_dynamo_compiling() or TracingContext.try_get() is not None:
        return
    if _LAST and _LAST[0]() is not world:
        drop_graphs()
    _LAST[:] = [ref(world)]


def annotate(mesh: DeviceMesh, layout: Layout, **how: Any) -> AxisConfig:
    """Record the layout and the options of a 1-D mesh.

    `None` stands for the recorded value, or the default. A layout that belongs to a batch is
    recorded again for each batch.

    Raises:
        ValueError: if the mesh is not 1-D, a value is unknown, or another value was recorded.
    """
    here = annotation_of(axis_group(mesh))
    before = here.config
    given = {name: value for name, value in how.items() if value is not None}
    if (
        given.get("strategy", AUTO) != AUTO
    ):  # normalize the spec, because strategies are compared by it
        given["strategy"] = as_strategy(given["strategy"], len(here.ranks)).spec
    # This checks the values, so it runs before anything is recorded.
    config = configured(layout, **_recorded(before) | given)
    if before is not None:
        _check_same(mesh, here, before, config)
    if here.is_assumed and config != before:
        drop_graphs()
    here.config, here.is_assumed = config, False
    return config


def tag_compiled() -> None:
    """Add the constants of this rank's axes to the keys of torch's caches on disk.

    Call it while a compiler traces: afterwards, in the same thread, torch looks up a cached graph.
    """
    world = dist.group.WORLD
    if world is not None:  # else no rank has an axis
        axes = sorted(_AXES.get(world, {}).items())
        tag_caches(world.rank(), [(ranks, *constants_of(here)) for ranks, here in axes])


# Evaluated while tracing. `torch.compiler.assume_constant_result` sets the same, but loads dynamo.
tag_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]


def constants_of(here: Annotation) -> tuple[Any, ...]:
    """Return the constants that graphs have of an axis; equal ones have equal `repr` everywhere."""
    config = here.config or UNANNOTATED
    machine = config.machine and config.machine.label
    return here.group_name, config.spec, config.strategy, config.kernel, config.policy, machine


def _recorded(config: AxisConfig | None) -> dict[str, Any]:
    """Return the recorded options without the layout."""
    names = ("strategy", "kernel", "policy", "machine")
    return {} if config is None else {name: getattr(config, name) for name in names}


def _check_same(mesh: DeviceMesh, here: Annotation, old: AxisConfig, new: AxisConfig) -> None:
    if _contradict(old.layout, new.layout, len(here.ranks)):
        same = "use the same layout, or a mesh of other ranks"
        again = "annotate it first" if here.is_assumed else same
        raise ValueError(
            f"{mesh} {here}, it cannot become {new.layout.spec}: tensors may already be sharded in "
            f"that order; {again}"
        )
    # An assumed configuration was not chosen by the user, so any other may replace it.
    for name, value in {} if here.is_assumed else _recorded(old).items():
        if getattr(new, name) != value:
            old_text, new_text = map(_text, (value, getattr(new, name)))
            raise ValueError(
                f"{mesh} was configured with {name}={old_text}, it cannot get {name}={new_text}: "
                f"an axis is configured once; use the same {name}, or a mesh of other ranks"
            )


def _text(option: Any) -> str:
    return option.label if is_machine(option) else repr(option)


def _contradict(one: Layout, other: Layout, num_ranks: int) -> bool:
    """Return whether tokens cannot be in both orders; on a single rank all orders are the same."""
    # Layouts of different batches do not contradict each other.
    if one.per_batch or other.per_batch:
        return one.per_batch != other.per_batch
    return one != other and num_ranks > 1


def sequence_layout(mesh: DeviceMesh) -> Layout | None:
    """Return the layout that a 1-D mesh was annotated with, `None` if it was not.

    Raises:
        ValueError: if the mesh is not 1-D or does not contain this rank.
        TypeError: if `mesh` is not a DeviceMesh.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> sequence_layout(mesh)
        >>> axis = SequenceAxis(mesh, "striped")
        >>> sequence_layout(mesh)
        Striped()
    """
    return annotation_of(axis_group(mesh)).layout


def config_of_call(group: ProcessGroup, with_runs: bool) -> AxisConfig:
    """Return the configuration for a call over the axis; `with_runs` if its batch has runs.

    Raises:
        ValueError: if the layout belongs to a batch and there are no runs, or vice versa.
    """
    here = annotation_of(group)
    if here.config is None:
        # Module constants, because a compiler cannot trace how a configuration is made; nor does
        # that of torch 2.11 trace one as the default of an argument.
        return here.assumed(PER_BATCH if with_runs else UNANNOTATED)
    here.config.check_runs(with_runs, here.how)
    return here.config


def axis_group(mesh: DeviceMesh) -> ProcessGroup:
    """Return the group of a 1-D mesh.

    Raises:
        ValueError: if the mesh has several axes (`mesh["cp"]` picks one), or does not contain this
            rank.
        TypeError: if `mesh` is not a DeviceMesh.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        named = 'init_device_mesh(..., mesh_dim_names=...)["cp"]'
        pick = f'mesh["{names[-1]}"]' if names else named
        raise ValueError(f"a ring runs over one axis, got {mesh}; pick one as in {pick}")
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"this rank, {dist.get_rank()}, is not part of {mesh}: it has no ring there"
        )
    return group_of(mesh, 0)


def group_of(mesh: DeviceMesh, axis: int) -> ProcessGroup:
    """Return the group of an axis of a mesh that contains this rank.

    DTensor caches meshes and treats meshes over the same ranks as equal. So a mesh may come back
    whose group was destroyed. The group that was last used over the same ranks then replaces it.

    Raises:
        ValueError: if the group was destroyed, and there is no other group over its ranks.
    """
    if torch.compiler.is_dynamo_compiling():
        tag_compiled()
        return mesh.get_group(axis)  # the mesh is an input of the graph
    # Cached on the mesh: looking up the name takes longer than resolving its group.
    kept = mesh.__dict__.setdefault("_dtensor_ring_groups", _Groups())
    if axis in kept:
        name, known = kept[axis]
        group = _registered(name)
        if group is not None and group is known():
            return group
    group = _found(mesh, axis)
    kept[axis] = group.group_name, ref(group)
    return group


class _Groups(dict[int, tuple[str, Any]]):
    """Maps an axis to the name and a weak reference of its group; it is not pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Groups, ()


def layout_of(mesh: DeviceMesh, axis: int) -> Layout | None:
    """Return the layout that an axis was annotated with, `None` without one or without a group."""
    try:
        return annotation_of(group_of(mesh, axis)).layout
    except ValueError:
        return None


def _registered(name: str) -> ProcessGroup | None:
    """Return the group of a name, if there is one."""
    try:
        return _resolve_process_group(name)  # pyrefly: ignore[bad-argument-type]
    except RuntimeError:
        return None


def _found(mesh: DeviceMesh, axis: int) -> ProcessGroup:
    """Return a group over the ranks of an axis: the mesh's own, else the last one used."""
    index: list[Any] = list(mesh.get_coordinate() or ())
    index[axis] = slice(None)
    with _disable_current_modes():  # a compiler's tensors have no values
        ranks = tuple(mesh.mesh[tuple(index)].tolist())
    world = dist.group.WORLD
    if world is not None:
        here = _AXES.get(world, {}).get(ranks)
        for name in (mesh._dim_group_names[axis], None if here is None else here.group_name):
            group = None if name is None else _registered(name)
            # A new world reuses names, so compare the ranks, too.
            if group is not None and tuple(dist.get_process_group_ranks(group)) == ranks:
                return group
    raise ValueError(
        f"the process group of {mesh} over ranks {list(ranks)} was destroyed: make the mesh again, "
        "and annotate it with SequenceAxis"
    )
