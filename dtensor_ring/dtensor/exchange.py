"""What users call: `exchange` gives heads for tokens, `relayout` one layout for another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from dtensor_ring.all_to_all.op import AllToAllArgs, BatchRuns, all_to_all_op, flatten_all_to_all
from dtensor_ring.all_to_all.plan import head_shard_of
from dtensor_ring.balanced.balanced import Balanced
from dtensor_ring.dtensor.annotation import (
    annotation_of,
    axis_group,
    config_of_call,
    group_of,
    tokens_of,
)
from dtensor_ring.dtensor.gather import all_to_all_tokens, sequence_runs
from dtensor_ring.dtensor.sequence import canonical
from dtensor_ring.dtensor.sequence_tensor import known
from dtensor_ring.dtensor.token_mesh import token_mesh
from dtensor_ring.ops.checks import called_by_user, check_all_to_all, check_strided
from dtensor_ring.planning.layout import Contiguous, Layout
from dtensor_ring.planning.ranges import as_count
from dtensor_ring.planning.run_table import PerBatch, RunTable, as_layout
from dtensor_ring.planning.tile import FULL


def relayout(
    tensor: Tensor,
    mesh: DeviceMesh,
    dim: int,
    to: Layout | str = Contiguous.name,
    *,
    layout: Layout | str | None = None,
    seq_len: int | None = None,
) -> Tensor:
    """Reshard the tokens of a sharded tensor in the order of another layout.

    For models whose convolutions or recurrent layers need neighbouring tokens on one rank, while
    attention needs a balanced layout. Only tokens that change their rank travel, in one message
    per pair of ranks. Differentiable: backward sends the gradients back.

    Args:
        tensor: a local shard with this rank's tokens in `dim`, of any number of dimensions; or a
            DTensor that is `Shard(dim)` over the axis, with any placements over other axes.
        mesh: the 1-D mesh of the axis. Its annotation does not change: attention still takes
            tokens in that layout.
        dim: the dimension of the sequence.
        to: the new layout; a layout or its spec, or the `Balanced` layout of this batch.
        layout: the present layout; by default that of the mesh, contiguous if it has none.
        seq_len: the global length, for local shards of different lengths.

    Returns:
        A tensor of the same kind, or the tensor itself if both layouts are the same. A DTensor has
        the same placements: they do not say the order, and `unshard_sequence` assumes that of the
        mesh.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if a layout cannot shard the length or belongs to another batch, or the DTensor
            has other placements.
        IndexError: if the tensor has no such dimension.
        RingError: if calls of ranks differ, or a rank ended, raised, or did not answer in time.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> axis = SequenceAxis(mesh, "zigzag")
        >>> hidden = torch.randn(2, 8, 16)  # (B, L, features), in zigzag order
        >>> in_order = relayout(hidden, mesh, 1)
        >>> back = relayout(in_order, mesh, 1, "zigzag", layout="contiguous")
        >>> torch.equal(back, hidden)
        True
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor must be a tensor or a DTensor, got {type(tensor).__name__}")
    check_strided("tensor", tensor)
    group, dim = axis_group(mesh), canonical(dim, "tensor", tensor)
    if isinstance(tensor, DTensor):
        _check_placed(tensor, dim, group, seq_len)
        local, length = tensor.to_local(), tensor.shape[dim]
    else:
        local, length = tensor, tensor.shape[dim] * group.size()
    if seq_len is not None:
        length = as_count("seq_len", seq_len)
    now = _order(tensor, group) if layout is None else layout
    before, after = _side("layout", now, length, group), _side("to", to, length, group)
    if before.layout == after.layout:
        return tensor
    # Groups of one rank: tokens change their rank, and heads stay whole.
    args = AllToAllArgs.of_tokens(
        batch_runs=BatchRuns(before.runs, after.runs),
        layout=before.spec,
        to=after.spec,
        heads=1,
        seq_len=length,
        group=group,
    )
    result = called_by_user(all_to_all_tokens, local, dim, args)
    if not isinstance(tensor, DTensor):
        return result
    tokens = tokens_of(tensor.device_mesh)
    on = tensor.device_mesh
    # The result has another order, which its mesh must say.
    if tokens is not None:
        on = token_mesh(tokens.mesh, tokens.config, after.layout)
    made = DTensor.from_local(
        result,
        on,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return known(made)


def exchange(
    tensors: Sequence[Tensor],
    mesh: DeviceMesh,
    *,
    to: Literal["heads", "tokens"] = "heads",
    heads: int | None = None,
    num_heads: Sequence[int] | None = None,
    num_key_heads: int | None = None,
    seq_len: int | None = None,
    runs: Tensor | None = None,
) -> list[Tensor]:
    """Shard by heads instead of tokens over the ranks of an axis, or back: an all-to-all.

    With `to="heads"`, a rank sends the tokens of its shard and gets all tokens of its group, in the
    order of their positions, with a part of the heads. Layers other than attention that mix tokens
    within a head need this (Jacobs et al., 2023, arXiv 2309.14509). `to="tokens"` is the reverse.
    Each rank sends one message to each other rank of its group. Differentiable: backward is the
    reverse exchange. For attention, use the strategy "ulysses" instead, see `SequenceAxis`.

    Args:
        tensors: local shards `(B, N, L, H)`, such as query, key and value, with equal batch size
            and length; or the results of `to="heads"`. Head dims and dtypes may differ.
        mesh: the 1-D mesh of the axis. Its layout is that of its `SequenceAxis`, contiguous if
            there is none.
        to: what this rank gets, "heads" or "tokens".
        heads: the number of consecutive ranks that share the heads; all ranks by default.
        num_heads: N of each tensor, for the reverse exchange; by default for evenly sharded heads.
        num_key_heads: the number of key heads to shard. The query heads of a group stay with their
            key head. By default the smallest number of heads of all tensors; pass the same number
            on the reverse exchange. A tensor with fewer heads than ranks is copied to several
            ranks.
        seq_len: the global length, if ranks hold different numbers of tokens.
        runs: which tokens each rank has, for a layout that belongs to a batch, see `sequence_runs`.

    Returns:
        The exchanged tensors in new memory, with the heads of each token adjacent.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if the heads cannot be sharded this way, or lengths do not fit.
        RingError: if calls of ranks differ, or a rank ended, raised, or did not answer in time.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> query, key = torch.randn(1, 8, 6, 4), torch.randn(1, 2, 6, 4)
        >>> sharded = exchange([query, key], mesh)
        >>> [out] = exchange(sharded[:1], mesh, to="tokens", num_key_heads=2)
        >>> torch.equal(out, query)
        True
    """
    group = axis_group(mesh)
    _check_tensors(tensors)
    if to not in ("heads", "tokens"):
        raise ValueError(f'to must be "heads" or "tokens", got {to!r}')
    is_back, size = to == "tokens", group.size()
    num_sharing = size if heads is None else as_count("heads", heads, 1, size)
    counts = _counts(tensors, num_heads, num_sharing if is_back else 1)
    num_sharded = min(counts) if num_key_heads is None else num_key_heads
    num_sharded = as_count("num_key_heads", num_sharded, 1, max([1, *counts]))
    _check_heads(counts, num_sharded, num_sharing, is_back)
    if runs is not None and (not isinstance(runs, Tensor) or isinstance(runs, DTensor)):
        raise TypeError(f"runs must be a plain tensor, got {type(runs).__name__}")
    spec = config_of_call(group, runs is not None).spec
    # Ranks that share the heads have the same tokens, so together they are one shard.
    num_shards = size // num_sharing if is_back else size
    length: Any = tensors[0].shape[2] * num_shards
    if seq_len is not None:
        length = as_count("seq_len", seq_len)
    args = AllToAllArgs(
        batch_runs=BatchRuns(runs, runs),
        layout=spec,
        to=spec,
        heads=num_sharing,
        num_heads=tuple(counts),
        num_key_heads=num_sharded,
        seq_len=length,
        num_tokens=None,
        group_name=group.group_name,
        mask=FULL,
        is_back=is_back,
        is_compiled=torch.compiler.is_compiling(),
    )
    return called_by_user(all_to_all_op, list(tensors), *flatten_all_to_all(args))


def _check_tensors(tensors: Any) -> None:
    is_list = isinstance(tensors, (list, tuple))
    if not is_list or not all(isinstance(x, Tensor) for x in tensors):
        raise TypeError(f"tensors must be a list of tensors, got {type(tensors).__name__}")
    if any(isinstance(x, DTensor) for x in tensors):
        raise TypeError("tensors must be local shards, got a DTensor; use .to_local()")
    for x in tensors:
        check_strided("tensors", x)
    check_all_to_all(tensors)


def _counts(tensors: Sequence[Tensor], given: Any, factor: int) -> list[int]:
    """Return the global number of heads of each tensor, `factor` times its own if not given."""
    if given is None:
        return [x.shape[1] * factor for x in tensors]
    if not isinstance(given, (list, tuple)) or len(given) != len(tensors):
        raise TypeError(
            f"num_heads must be a list of numbers, one for each of {len(tensors)} tensors, got "
            f"{given!r}"
        )
    return [as_count("num_heads", count) for count in given]


def _check_heads(counts: list[int], num_key_heads: int, num_sharing: int, is_back: bool) -> None:
    """Refuse heads that cannot be sharded, or that a reverse exchange would return as copies."""
    shard = head_shard_of(0, num_sharing, num_key_heads)  # no rank splits a key head more
    for count in counts:
        try:
            shard.span(count, num_key_heads)
        except ValueError as error:
            raise ValueError(
                f"the heads of tensors, num_heads {counts} with num_key_heads {num_key_heads}, "
                f"cannot be sharded over {num_sharing} ranks, heads: {error}"
            ) from None
        if is_back and shard.is_copied(count, num_key_heads):
            raise ValueError(
                f"heads that were copied to several ranks cannot come back: num_heads is {count} "
                f"of num_key_heads {num_key_heads}, for {num_sharing} ranks, heads"
            )


def _order(tensor: Tensor, group: ProcessGroup) -> Layout:
    """Return the layout of a tensor, else of the axis; that of a batch must be given."""
    tokens = tokens_of(tensor.device_mesh) if isinstance(tensor, DTensor) else None
    if tokens is not None:
        return tokens.layout
    layout = annotation_of(group).config_or_default.layout
    return PerBatch() if layout.per_batch else layout


class _Side(NamedTuple):
    """A layout in the form that the op takes."""

    layout: Layout
    runs: Tensor | None

    @property
    def spec(self) -> str:
        return self.layout.name if self.layout.per_batch else self.layout.spec


def _side(name: str, given: Any, seq_len: int, group: ProcessGroup) -> _Side:
    """Convert the argument `name` to a layout for the op.

    Raises:
        TypeError: if it is not a layout.
        ValueError: if it is unknown, or belongs to another batch.
    """
    try:
        layout = as_layout(given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} must be a layout: {error}") from None
    if not layout.per_batch:
        return _Side(layout, None)
    if isinstance(layout, RunTable):
        return _Side(layout, torch.from_numpy(layout.numbers.astype("int32")))
    if not isinstance(layout, Balanced):
        raise ValueError(
            f"{name} belongs to a batch, so it must be the Balanced layout of this one, got {given}"
        )
    if (layout.seq_len, layout.world_size) != (seq_len, group.size()):
        raise ValueError(
            f"{name} must shard the {seq_len} tokens over {group.size()} ranks, but this Balanced "
            f"one shards {layout.seq_len} over {layout.world_size}"
        )
    return _Side(layout, sequence_runs(layout))


def _check_placed(tensor: DTensor, dim: int, group: ProcessGroup, seq_len: int | None) -> None:
    """Refuse a DTensor that is not sharded in `dim` over the axis, and nowhere else."""
    if seq_len is not None:
        raise ValueError("seq_len is for local shards, and tensor is a DTensor, which has its own")
    mesh = tensor.device_mesh
    axes = [axis for axis, where in enumerate(tensor.placements) if where == Shard(dim)]
    # Meshes over the same ranks are one axis, even with different groups.
    if len(axes) != 1 or annotation_of(group_of(mesh, axes[0])) is not annotation_of(group):
        raise ValueError(
            f"tensor must be Shard({dim}) over the axis of mesh and no other, got "
            f"{tuple(tensor.placements)} on {mesh}"
        )
