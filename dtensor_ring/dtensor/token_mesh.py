"""The mesh of a sharded sequence, which tells the order of its tokens wherever the tensor goes."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, NoReturn

from torch.distributed import DeviceMesh, ProcessGroup

from dtensor_ring.dtensor.annotation import annotation_of, axis_group
from dtensor_ring.dtensor.axis_config import TOKENS, AxisConfig, Tokens, nothing
from dtensor_ring.planning.layout import UNEVEN, Layout

REFUSED = (
    "this operation needs tokens of other ranks, or to know where those of a rank are, and the "
    "sequence is in {layout} order over {size} ranks: make it whole first, "
    "unshard_sequence(x, dim), or take the tokens of this rank, x.to_local(), whose positions "
    "are those of SequenceAxis.positions"
)


# Note [Token meshes]: DTensor takes the shards of a tensor to be in rank order, and no placement
# says otherwise. But every result has the mesh of its inputs: in eager calls, in graphs, under
# `vmap`, in backward. So what a sharded sequence knows is kept by its mesh. A *token mesh* has the
# ranks of the axis, and a name for each order of tokens, so DTensor keeps tensors of two orders
# apart: it refuses to mix them, and its caches and the guards of compiled graphs tell them from
# each other. It has no process group and no coordinate. So what DTensor would do by rank order,
# send shards or ask where they begin, is an error that says what to write. What acts on each token
# alone needs neither, and runs as on any mesh, at no cost. Our own functions find the group by
# `group_of`.
def token_mesh(
    mesh: DeviceMesh, config: AxisConfig, layout: Layout | None = None, averages: bool = False
) -> DeviceMesh:
    """Return the mesh of sequences that are sharded over an axis in an order.

    Args:
        mesh: the 1-D mesh of the axis.
        config: how attention over it runs.
        layout: the order; by default that of the config.
        averages: whether gradients average over the axis, see `Tokens`.

    Returns:
        A token mesh, the same one for equal arguments. Of a single rank, the mesh itself: there all
        orders are the same.
    """
    group = axis_group(mesh)
    if group.size() == 1:
        return mesh
    tokens, here = Tokens(mesh, config, layout or config.layout, averages), annotation_of(group)
    known, name = here.token_meshes, _name(tokens)
    key = mesh.device_type, name
    made = known.get(key)
    if made is None:
        made = known[key] = _made(group, name, tokens)
    return made


def _name(tokens: Tokens) -> str:
    """Return the name of the axis of a token mesh."""
    mesh, layout = tokens.mesh, tokens.layout
    axis = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "tokens"
    order = f"{layout.name} {_digest(layout, mesh.size())}" if layout.per_batch else layout.spec
    averages = ["gradients averaged"] if tokens.averages else []
    return ", ".join([f"{axis} in {order} order", *tokens.config.options, *averages])


def _digest(layout: Layout, world_size: int) -> str:
    """Return a name for the runs of a layout that belongs to a batch."""
    seq_len = getattr(layout, "seq_len", 0)
    runs = [layout.runs(rank, world_size, seq_len) for rank in range(world_size)]
    return blake2b(repr(runs).encode(), digest_size=8).hexdigest()


def _made(group: ProcessGroup, name: str, tokens: Tokens) -> DeviceMesh:
    made = DeviceMesh.from_group(group, tokens.mesh.device_type, mesh_dim_names=(name,))
    why = REFUSED.format(layout=tokens.layout.spec, size=group.size())
    vars(made)["_dim_group_names"] = _NoGroups(why)
    # A mesh that outlives the group, in a cache of DTensor, must not keep its connections open.
    made._pg_registry.clear()
    vars(made)[TOKENS] = tokens
    if isinstance(tokens.layout, UNEVEN):
        # Shards have other lengths than those that DTensor computes from the coordinate.
        vars(made)["_sym_get_coordinate"] = _Refusal(why)
    return made


class _NoGroups(list[str]):
    """The names of the groups of a token mesh: whoever asks for one would send in rank order."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why = why

    def __getitem__(self, index: Any) -> NoReturn:
        raise ValueError(self.why)

    def __reduce__(self) -> tuple[Any, ...]:
        return _NoGroups, (self.why,)


class _Refusal:
    """Takes the place of a method of a mesh, and raises."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __call__(self, *args: Any) -> NoReturn:
        raise ValueError(self.why)


PARTS = _NoGroups, _Refusal, nothing
"""What a token mesh has that others lack, as it is saved."""
