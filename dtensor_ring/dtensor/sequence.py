"""Shards tokens in the order of a layout, and gathers them again; labels of the next tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from dtensor_ring.balanced.balanced import Balanced
from dtensor_ring.compute.memory import positions_of
from dtensor_ring.dtensor import varlen_attention as _varlen  # noqa: F401 - registers its rules
from dtensor_ring.dtensor.annotation import annotate, annotation_of, axis_group, group_of, tokens_of
from dtensor_ring.dtensor.axis_config import UNANNOTATED, AxisConfig
from dtensor_ring.dtensor.flex.flex_attention import install_flex
from dtensor_ring.dtensor.gather import check_balanced, whole_of, whole_sequence
from dtensor_ring.dtensor.sdpa import Handler, add_handlers, as_before, install_sdpa
from dtensor_ring.dtensor.sequence_order import local_tokens, refusal
from dtensor_ring.dtensor.sequence_tensor import from_local_tokens
from dtensor_ring.dtensor.token_mesh import token_mesh
from dtensor_ring.ops.checks import canonical, check_strided
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.ranges import as_count, as_int
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.planning.slice_tables import MAX_SLICES
from dtensor_ring.planning.slices import Slices


def shard_sequence(
    tensor: Tensor, mesh: DeviceMesh, dim: int, layout: Layout | str | None = None
) -> DTensor:
    """Shard a tensor that every rank holds whole, with its tokens in layout order.

    `distribute_tensor` would shard them contiguously, whatever the layout of the mesh.

    Args:
        tensor: the global tensor, the same on every rank of the mesh, with S tokens in `dim`.
        mesh: the 1-D mesh of the ring.
        dim: the dimension of the sequence.
        layout: annotates the mesh, see `SequenceAxis`. By default the mesh's own layout,
            contiguous if it has none. A `Balanced` layout is valid for this tensor only, so it must
            be given each time.

    Returns:
        A DTensor with `Shard(dim)` over the mesh. Backward gives each rank the gradient of its own
        tokens, and zero for the others.

    Raises:
        TypeError: if `tensor` is not a plain tensor.
        ValueError: if the mesh is not 1-D or has another layout, the layout cannot shard the
            length, or it belongs to a batch and is not given.
        IndexError: if the tensor has no such dimension.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> shard_sequence(torch.arange(4), mesh, 0, "zigzag").to_local()
        tensor([0, 1, 2, 3])
    """
    dim, group = check_whole(tensor, dim), axis_group(mesh)
    chosen = _chosen_layout(group, None) if layout is None else as_layout(layout)
    local = local_tokens(tensor, mesh, dim, chosen)
    if layout is not None:  # annotate only now, when the layout is known to fit the length
        annotate(mesh, chosen)
        install_handlers()
    if torch.compiler.is_dynamo_compiling():
        on = _mesh_in_graph(mesh, chosen.spec)
    else:
        on = token_mesh(mesh, annotation_of(group).config_or_default, chosen)
    return from_local_tokens(local, on, dim, tensor.shape[dim])


def _mesh_in_graph(mesh: DeviceMesh, spec: str) -> DeviceMesh:
    """Return the token mesh of a layout, which is a constant of a graph."""
    return token_mesh(mesh, annotation_of(axis_group(mesh)).config_or_default, as_layout(spec))


_mesh_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_whole(tensor: Any, dim: int) -> int:
    """Refuse what is no plain strided tensor; return the dimension, counted from the front."""
    if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor):
        raise TypeError(
            "tensor must be a plain tensor that every rank holds whole, got "
            f"{type(tensor).__name__}"
        )
    check_strided("tensor", tensor)
    return canonical(dim, "tensor", tensor)


def unshard_sequence(dtensor: DTensor, dim: int, layout: Balanced | None = None) -> Tensor:
    """Gather a DTensor whole, with its tokens in their original order.

    Args:
        dtensor: sharded in `dim` over one axis of its mesh, with any placements over the others.
        dim: the dimension of the sequence.
        layout: the layout of the batch, if the axis has a `Balanced` one and `dtensor` was made by
            other means than `shard_sequence`.

    Returns:
        The global tensor, on every rank. Backward sums the gradients of the ranks of the axis and
        keeps this rank's tokens of the sum: if all ranks compute the same loss of it, gradients of
        parameters *average* over the axis, as over data-parallel ranks. Over other axes of the
        mesh each rank keeps its own part, as `DTensor.full_tensor` does.

    Raises:
        TypeError: if the tensor is not a DTensor, or the given layout is not `Balanced`.
        ValueError: if `dim` is not sharded over exactly one axis, or its layout belongs to a batch
            and is not given, or does not belong to one and is given.
        RingError: if calls of ranks differ, or a rank ended, raised, or did not answer in time.
        IndexError: if the tensor has no such dimension.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> tokens = shard_sequence(torch.arange(6), mesh, 0, layout="zigzag")
        >>> unshard_sequence(tokens, 0)
        tensor([0, 1, 2, 3, 4, 5])
    """
    if not isinstance(dtensor, DTensor):
        raise TypeError(
            f"dtensor must be a DTensor, as shard_sequence returns, got {type(dtensor).__name__}: "
            "a plain tensor does not say how it is sharded"
        )
    if layout is not None:
        check_balanced(layout)
    dim = canonical(dim, "dtensor", dtensor)
    axes = [axis for axis, where in enumerate(dtensor.placements) if where == Shard(dim)]
    if len(axes) != 1:
        raise ValueError(
            f"dim {dim} of dtensor must be sharded over one mesh axis, got {dtensor.placements}; a "
            "tensor that was gathered by other means keeps the order of its layout"
        )
    group, tokens = group_of(dtensor.device_mesh, axes[0]), tokens_of(dtensor.device_mesh)
    if tokens is None:
        chosen = _chosen_layout(group, layout)
    else:
        chosen = tokens.layout
        _check_order(chosen, layout)
    local = whole_sequence(dtensor.to_local(), dim, group, dtensor.shape[dim], chosen)
    return whole_of(dtensor, axes[0], local)


def _check_order(order: Layout, given: Balanced | None) -> None:
    """Refuse another layout than the one that a tensor was sharded with."""
    if given is not None and given != order:
        raise ValueError(
            f"dtensor was sharded with the layout {order.spec}, which it knows, got another one, "
            f"{given.name}: leave the layout out"
        )


def local_positions(mesh: DeviceMesh, layout: Layout, seq_len: int) -> Tensor:
    """Return the global positions of this rank's tokens, int64, `(L,)`."""
    return positions_of(layout.runs(mesh.get_local_rank(), axis_group(mesh).size(), seq_len))


def sequence_slices(slices: Slices, num_slices: int | None = None) -> Tensor:
    """Convert slices to a tensor, as `ring_attention` takes them under `torch.compile`.

    A compiled function recompiles if the shape changes, so pad to the number of slices of the
    largest batch.

    Args:
        slices: what queries see.
        num_slices: the number of slices to which each batch row is padded with empty ones; by
            default that of the longest row.

    Returns:
        `(N, 6)`, or `(B, N, 6)` if batch rows differ, int32, on the CPU: begin and end of the
        queries and of the keys, left and right; `Slices.UNBOUNDED` is no bound.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if there are more than `num_slices`, or it is more than can be planned.

    Example:
        >>> sequence_slices(Slices.prefix([0, 5], 2), num_slices=3).tolist()
        [[0, 2, 0, 2, 2147483647, 2147483647], [2, 5, 0, 5, 2147483647, 0], [0, 0, 0, 0, 0, 0]]
    """
    if not isinstance(slices, Slices):
        raise TypeError(f"slices must be dtensor_ring.Slices, got {slices!r}")
    # Copy, because the user may write to the tensor.
    numbers = torch.tensor(slices.numbers, dtype=torch.int32, device="cpu")
    if num_slices is None:
        return numbers
    shortest = numbers.shape[-2]
    filling = as_count("num_slices", num_slices, shortest, max(shortest, MAX_SLICES)) - shortest
    return F.pad(numbers, (0, 0, 0, filling))


def _chosen_layout(group: ProcessGroup, given: Balanced | None) -> Layout:
    """Return the given layout of a batch, else that of the axis."""
    here = annotation_of(group)
    if here.config is None:
        return given or here.assumed(UNANNOTATED).layout
    return order_of(here.config, given, str(here))


def order_of(config: AxisConfig, given: Balanced | None, how: str) -> Layout:
    """Return the layout of a tensor: that of the axis, or the given one of a batch.

    Raises:
        ValueError: if the layout of the axis belongs to a batch and none is given, or vice versa;
            `how` says what the axis is.
    """
    if given is not None and not config.layout.per_batch:
        raise ValueError(
            f"the axis {how}, so its tokens are in that order: leave the layout out, or use a "
            "SequenceAxis with a Balanced one"
        )
    if given is None and config.layout.per_batch:
        raise ValueError(
            f"the axis {how}, so the order of its tokens belongs to a batch: pass the Balanced "
            "layout of this one, layout=..."
        )
    return given or config.layout


INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# The label of a token without a target, as in `torch.nn.functional.cross_entropy`.
IGNORE_INDEX = -100


def next_token_labels(
    tokens: Tensor, cu_seqlens: Tensor | None = None, ignore_index: int = IGNORE_INDEX
) -> Tensor:
    """Return the next token of each token within its document.

    Shift the whole sequence, then shard it: the next token may be on another rank.

    Args:
        tokens: `(B, S)` or `(S,)`, the whole sequence.
        cu_seqlens: boundaries of packed documents in tokens, `(D+1,)` or `(B, D+1)`, as in
            `ring_attention`; without them, each row is one document.
        ignore_index: the label of the last token of a document.

    Returns:
        The labels, of the same shape and dtype.

    Raises:
        TypeError: if `tokens` or `cu_seqlens` are not tensors of integers.
        ValueError: if they have a wrong shape, or a boundary is not in the sequence.

    Example:
        >>> next_token_labels(torch.tensor([5, 6, 7, 8]), torch.tensor([0, 2, 4]))
        tensor([   6, -100,    8, -100])
    """
    _check(tokens, cu_seqlens)
    _check_label(tokens, as_int("ignore_index", ignore_index))
    labels = torch.nn.functional.pad(tokens, (0, 1), value=ignore_index)[..., 1:]
    if cu_seqlens is None:
        return labels
    # The documents abc and de have the ends 3 and 5, and the labels b c . e .
    # The token before a boundary is the last of its document; empty documents repeat a boundary.
    ends = cu_seqlens[..., 1:].to(tokens.device, torch.int64)
    rows, seq_len = tokens.shape[:-1], tokens.shape[-1]
    is_last = tokens.new_zeros((*rows, seq_len + 1), dtype=torch.bool)
    is_last.scatter_(-1, ends.expand((*rows, -1)), True)
    return labels.masked_fill(is_last[..., 1:], ignore_index)


def _check_label(tokens: Tensor, ignore_index: int) -> None:
    """Refuse a label that the dtype of the tokens cannot hold: it would wrap around."""
    bounds = torch.iinfo(tokens.dtype)
    if not bounds.min <= ignore_index <= bounds.max:
        raise ValueError(
            f"ignore_index must be from {bounds.min} to {bounds.max} beside tokens of "
            f"{tokens.dtype}, got {ignore_index}"
        )


def _check(tokens: Tensor, cu_seqlens: Tensor | None) -> None:
    for name, x in (("tokens", tokens), ("cu_seqlens", cu_seqlens)):
        if x is None and name == "cu_seqlens":
            continue
        if not isinstance(x, Tensor) or x.dtype not in INTEGERS:
            given = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name} must be a tensor of integers, got {given}")
        check_strided(name, x)
    if tokens.ndim not in (1, 2):
        raise ValueError(f"tokens must be (B, S) or (S,), got {tuple(tokens.shape)}")
    if cu_seqlens is None:
        return
    if cu_seqlens.is_meta:
        raise ValueError("cu_seqlens must be a tensor with content, got one on meta")
    rows = tokens.shape[:-1]
    if cu_seqlens.ndim != 1 and cu_seqlens.shape[:-1] != rows:
        raise ValueError(
            f"cu_seqlens must be (D+1,) or {(*rows, 'D+1')} for tokens {tuple(tokens.shape)}, got "
            f"{tuple(cu_seqlens.shape)}"
        )
    if cu_seqlens.numel() and not 0 <= cu_seqlens.min() <= cu_seqlens.max() <= tokens.shape[-1]:
        raise ValueError(
            f"cu_seqlens must lie in a sequence of {tokens.shape[-1]} tokens, got "
            f"{cu_seqlens.min()} to {cu_seqlens.max()}"
        )


def install_handlers() -> None:
    """Let PyTorch ask us first about attention on DTensors; other calls continue as before."""
    install_sdpa()
    install_flex()
    add_handlers((torch.ops.aten._local_scalar_dense.default,), _value_handler)


def _value_handler(previous: Handler | None) -> Handler:
    """Refuse the value of a sum that was not made over ranks, as a graph may return."""

    def handle(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0]
        if tokens_of(x.device_mesh) is not None and not x.placements[0].is_replicate():
            raise refusal(x, "the value of this")
        return as_before(previous, op, args, kwargs)

    return handle
