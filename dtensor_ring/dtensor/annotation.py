"""The record of a mesh axis: its layout, and how attention over it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch._guards import TracingContext
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import _disable_current_modes

from dtensor_ring.dtensor.axis_config import (
    PER_BATCH,
    TOKENS,
    UNANNOTATED,
    AxisConfig,
    Tokens,
    configured,
    differ,
)
from dtensor_ring.dtensor.cache_tag import drop_graphs, drop_specs, tag_caches
from dtensor_ring.ops.options import group_named
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.strategy import AUTO, as_strategy

if TYPE_CHECKING:
    from dtensor_ring.dtensor.laboratory import Machine
    from dtensor_ring.ops.bound import BoundCall


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
        calls: bound calls that were made over it, see `known_calls`.
        machines: those read for the axis, by the names that were given, and "" for the default.
        token_meshes: those of its sequences that live, by device type and name, see `token_mesh`.
    """

    ranks: tuple[int, ...]
    config: AxisConfig | None = None
    is_assumed: bool = False
    group_name: str | None = None
    num_layers: int = 0
    choices: tuple[AxisConfig | None, dict[Any, Any]] = field(default_factory=lambda: (None, {}))
    calls: dict[Any, BoundCall] = field(default_factory=dict)
    machines: dict[str, Machine] = field(default_factory=dict)
    token_meshes: WeakValueDictionary[tuple[str, str], DeviceMesh] = field(
        default_factory=WeakValueDictionary
    )

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
    """Make the record of an axis that is first used in a compiled function."""
    # It is made while that is traced, because torch 2.11 cannot do it after the graph has run.
    group = group_named(group_name)
    return group in _BY_GROUP or bool(_new_record(group))


# Constant while the group is alive, see `ulysses_heads`.
_has_record._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _begin(world: ProcessGroup) -> None:
    """Drop what belongs to an earlier world, if no compiler is tracing.

    These are graphs, and results of DTensor's rules: they hold meshes of that world, which DTensor
    would give to tensors of this one.
    """
    if torch.compiler.is_dynamo_compiling() or TracingContext.try_get() is not None:
        return
    if _LAST and _LAST[0]() is world:
        return
    if _LAST:
        drop_graphs()
    drop_specs()
    _LAST[:] = [ref(world)]


def annotate(mesh: DeviceMesh, layout: Layout, **how: Any) -> AxisConfig:
    """Record the layout and the options of a 1-D mesh.

    `None` stands for the recorded value, or the default. Other values replace those recorded: plain
    calls go by the last ones, and what `shard_sequence` made before keeps its own.

    Raises:
        ValueError: if the mesh is not 1-D, a value is unknown, or the axis was used with an order
            that nobody chose.
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
    if here.is_assumed and before is not None:
        _check_assumed(mesh, here, before, config)
    if before is not None and differ(before, config):
        drop_graphs()  # graphs have what they were traced with as constants
    here.config, here.is_assumed = config, False
    # Bound calls have the options that were recorded before.
    here.calls.clear()
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


def _check_assumed(mesh: DeviceMesh, here: Annotation, old: AxisConfig, new: AxisConfig) -> None:
    """Refuse another order for tokens that were taken as contiguous without a word of the user."""
    if _contradict(old.layout, new.layout, len(here.ranks)):
        raise ValueError(
            f"{mesh} {here}, it cannot become {new.layout.spec}: tensors may already be sharded in "
            "that order; annotate it first"
        )


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


def tokens_of(mesh: DeviceMesh) -> Tokens | None:
    """Return what a mesh knows of the order of tokens, `None` if it is no token mesh.

    Raises:
        ValueError: if the mesh was loaded, and no axis here has its order.
    """
    # A compiler that traces wraps meshes.
    fields = getattr(mesh, "real_obj", mesh).__dict__
    found = fields.get(TOKENS)
    if found is not None or TOKENS not in fields:
        return found
    (name,) = mesh.mesh_dim_names or ("",)
    group = _found(mesh, 0)
    known = annotation_of(group).token_meshes.get((mesh.device_type, name))
    if known is None:
        raise ValueError(
            f"a loaded tensor has its tokens in another order than those known here: {name}; make "
            "the axis first, by a SequenceAxis with the layout and the options that it was saved "
            "with"
        )
    fields[TOKENS] = known.__dict__[TOKENS]
    return fields[TOKENS]


# A mesh is a constant of a graph.
tokens_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def config_of_call(
    group: ProcessGroup, with_runs: bool, mesh: DeviceMesh | None = None
) -> AxisConfig:
    """Return the configuration for a call over the axis.

    Args:
        group: the group of the axis.
        with_runs: whether the batch of the call has runs.
        mesh: the mesh of its tensors; a token mesh knows the configuration, else it is the axis's.

    Raises:
        ValueError: if the layout belongs to a batch and there are no runs, or vice versa.
    """
    tokens = None if mesh is None else tokens_of(mesh)
    here = annotation_of(group)
    if tokens is not None:
        is_assumed = here.is_assumed and here.config == tokens.config
        tokens.config.check_runs(with_runs, here.how if is_assumed else "is annotated")
        return tokens.config
    if here.config is None:
        # Module constants, because a compiler cannot trace how a configuration is made; nor does
        # that of torch 2.11 trace one as the default of an argument.
        return here.assumed(PER_BATCH if with_runs else UNANNOTATED)
    here.config.check_runs(with_runs, here.how)
    return here.config


def group_of(mesh: DeviceMesh, axis: int) -> ProcessGroup:
    """Return the group of an axis of a mesh that contains this rank.

    DTensor caches meshes and treats meshes over the same ranks as equal. So a mesh may come back
    whose group was destroyed. The group that was last used over the same ranks of this world then
    replaces it.

    Raises:
        ValueError: if the group was destroyed, and there is no other group over its ranks; or if
            its world, the default group, was; or if the mesh has its ranks in another order.
    """
    if torch.compiler.is_dynamo_compiling():
        tag_compiled()
        if _has_tokens(mesh):
            name, rank, size = _facts_of_group(mesh, axis)
            return _GroupInGraph(name, rank, size)  # type: ignore[return-value]
        return mesh.get_group(axis)  # the mesh is an input of the graph
    tokens = tokens_of(mesh)
    if tokens is not None:
        mesh = tokens.mesh
    # Cached on the mesh: looking up the name takes longer than resolving its group.
    kept = groups_of(mesh)
    if axis in kept:
        name, known = kept[axis]
        group = registered(name)
        # A group of a later world may have the same name.
        if group is not None and group is known():
            return group
    group = _found(mesh, axis)
    kept[axis] = group.group_name, ref(group)
    return group


def _has_tokens(mesh: DeviceMesh) -> bool:
    return tokens_of(mesh) is not None


def axis_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the user's mesh of the axis of a mesh."""
    tokens = tokens_of(mesh)
    return mesh if tokens is None else tokens.mesh


class _GroupInGraph(NamedTuple):
    """What a graph has of the group of a token mesh, which it cannot ask for one."""

    group_name: str
    own_rank: int
    num_ranks: int

    def rank(self) -> int:
        """Return this rank."""
        return self.own_rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self.num_ranks


def _facts_of_group(mesh: DeviceMesh, axis: int) -> tuple[str, int, int]:
    group = axis_mesh(mesh).get_group(axis)
    return group.group_name, group.rank(), group.size()


for _constant in (_has_tokens, _facts_of_group):
    _constant._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Groups(dict[int, tuple[str, Any]]):
    """Maps an axis to the name and a weak reference of its group; it is not pickled.

    Attributes:
        world: the default group in which the mesh was first used.
        is_of_world: whether a group of the mesh was seen to be one of that world. Then all are, and
            stay so: names are used again by later worlds only.
        calls: the known calls of a 1-D mesh, once there is one.
    """

    calls: dict[Any, Any] | None = None
    world: ref[ProcessGroup] | None = None
    is_of_world: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _Groups, ()


def groups_of(mesh: DeviceMesh) -> _Groups:
    """Return the groups of a mesh that are kept on it."""
    kept = mesh.__dict__.get("_dtensor_ring_groups")
    if kept is None:
        kept = mesh.__dict__["_dtensor_ring_groups"] = _Groups()
    return kept


def layout_of(mesh: DeviceMesh, axis: int) -> Layout | None:
    """Return the layout that an axis was annotated with, `None` without one or without a group.

    Raises:
        ValueError: if the mesh belongs to an earlier world.
    """
    tokens = tokens_of(mesh)
    if not torch.compiler.is_dynamo_compiling():
        _check_world(mesh if tokens is None else tokens.mesh)
    if tokens is not None:
        return tokens.config.layout
    try:
        return annotation_of(group_of(mesh, axis)).layout
    except ValueError:
        return None


def registered(name: str) -> ProcessGroup | None:
    """Return the group of a name, if there is one."""
    try:
        return _resolve_process_group(name)  # pyrefly: ignore[bad-argument-type]
    except RuntimeError:
        return None


def _check_world(mesh: DeviceMesh) -> None:
    """Refuse a mesh that was made in an earlier world.

    Raises:
        ValueError: says to make it again.
    """
    # A rank of it may be another process today, and the layout of its tensors is forgotten.
    world = dist.group.WORLD
    if world is None:
        return
    root = mesh._get_root_mesh()
    kept = groups_of(root)
    if kept.world is None:
        kept.world = ref(world)
    if kept.is_of_world and kept.world() is world:
        return
    # A new world gives its groups the names of the one before.
    ours = {name: root._pg_registry.get(name) for name in mesh._dim_group_names}
    found = [(x, registered(name)) for name, x in ours.items() if x]
    is_renamed = any(group not in (None, x) for x, group in found)
    kept.is_of_world = any(group is x for x, group in found) and not is_renamed
    if is_renamed or kept.world() is not world:
        raise ValueError(
            f"{mesh} was made before dist.destroy_process_group() and a new init_process_group: "
            "make the mesh again, annotate it with SequenceAxis, and shard tensors over it anew"
        )


def _found(mesh: DeviceMesh, axis: int) -> ProcessGroup:
    """Return a group over the ranks of an axis: the mesh's own, else the last one used."""
    _check_world(mesh)
    index: list[Any] = list(mesh.get_coordinate() or ())
    index[axis] = slice(None)
    with _disable_current_modes():  # a compiler's tensors have no values
        ranks = tuple(mesh.mesh[tuple(index)].tolist())
    world = dist.group.WORLD
    if world is not None:
        here = _AXES.get(world, {}).get(ranks)
        # A token mesh that was loaded has no names.
        own = mesh._dim_group_names[axis] if len(mesh._dim_group_names) else None
        for name in (own, None if here is None else here.group_name):
            group = None if name is None else registered(name)
            if group is None:
                continue
            members = tuple(dist.get_process_group_ranks(group))
            # A new world reuses names, so compare the ranks, too.
            if members == ranks:
                return group
            if members == tuple(sorted(ranks)):
                raise ValueError(
                    f"{mesh} has the ranks {list(ranks)} along an axis, and its process group has "
                    f"them as {list(members)}, so DTensor would take shards for one another's: "
                    "make the mesh with ascending ranks along the axis"
                )
    raise ValueError(
        f"the process group of {mesh} over ranks {list(ranks)} was destroyed: make the mesh again, "
        "and annotate it with SequenceAxis"
    )
