"""What users call: the states before each rank's tokens, by a scan over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtensor_ring.dtensor.annotation import axis_group
from dtensor_ring.dtensor.axis import SequenceAxis
from dtensor_ring.ops.checks import check_strided
from dtensor_ring.planning.layout import Contiguous, Layout
from dtensor_ring.states.op import scan_op
from dtensor_ring.states.plan import owners_of
from dtensor_ring.states.run import Maps

# What a map has, in the order of the op's arguments.
FIELDS = ("state", "decay", "matrix")


@dataclass(frozen=True, eq=False)
class StateMap:
    """What some tokens make of the state of a layer: `after = A * before + state`.

    Linear attention, gated delta rules and Mamba are of this form: `state` is what their tokens
    leave if the state before them is zero, and `A` what is left of the state before them.

    Args:
        state: the state after the tokens if there was none before, `(..., K, V)`, or of any shape
            without a matrix.
        decay: the natural logarithm of `A`, where `A` is a factor for each number of a state, or
            for all that share leading indices: `(B, heads)` for one factor per head. -inf forgets.
        matrix: `A` of shape `(..., K, K)`, multiplied from the left. Zeros forget.

    Without decay and matrix, nothing is left of the state before the tokens, as in convolutions:
    the state is that of the last tokens.

    Raises:
        TypeError: if an argument is not a plain floating tensor.
        ValueError: if both a decay and a matrix are given, or shapes do not fit.

    Example:
        >>> one = StateMap(torch.ones(2, 3, 4), decay=torch.zeros(2))
        >>> one.after(torch.ones(2, 3, 4)).unique()
        tensor([2.])
    """

    state: Tensor
    decay: Tensor | None = None
    matrix: Tensor | None = None

    def __post_init__(self) -> None:
        for name in FIELDS:
            _check_tensor(name, getattr(self, name), is_optional=name != "state")
        if self.decay is not None and self.matrix is not None:
            raise ValueError("a map has a decay or a matrix, got both; leave one out")
        shape, decay, matrix = self.state.shape, self.decay, self.matrix
        if decay is not None and decay.shape != shape[: decay.dim()]:
            raise ValueError(
                f"decay must have the leading dims of state, {tuple(shape)}, got "
                f"{tuple(decay.shape)}"
            )
        if matrix is not None and (len(shape) < 2 or matrix.shape != (*shape[:-1], shape[-2])):
            raise ValueError(
                f"matrix must be (..., K, K) for a state (..., K, V), {tuple(shape)}, got "
                f"{tuple(matrix.shape)}"
            )

    def after(self, before: Tensor) -> Tensor:
        """Return the state after the tokens, given that before them, of the shape of `state`."""
        return Maps(self.state, self.decay, self.matrix).after(before)

    def forgetting(self, state: Tensor | None = None) -> StateMap:
        """Return a map of the same kind that keeps nothing of the state before its tokens.

        This is the map of tokens among which a document begins; `state` is what they leave, by
        default that of this map.
        """
        decay, matrix = self.decay, self.matrix
        return StateMap(
            self.state if state is None else state,
            None if decay is None else torch.full_like(decay, -torch.inf),
            None if matrix is None else torch.zeros_like(matrix),
        )


def exclusive_scan(maps: Sequence[StateMap], axis: SequenceAxis | DeviceMesh) -> list[Tensor]:
    """Return the state before each run of this rank's tokens, from the maps of all ranks' runs.

    Each rank computes what its tokens make of a state of zero, and how much of an earlier state is
    left after them. All ranks do so at once. This call gives them the states before their tokens,
    and a layer adds what these add to its outputs.

    Up to 8 ranks each sends its maps to the ranks with later tokens in one round of messages; more
    ranks send in 1 + log2(W) rounds. Maps without decay and matrix go to the next run only. The
    gradient is a scan in the other direction, with as many messages.

    Args:
        maps: a map for each run of this rank's tokens, in their order: one where shards are
            contiguous, two in the layout "zigzag". All are of one kind and shape, on all ranks.
        axis: the axis, or its mesh if ranks hold contiguous shards whatever its layout.

    Returns:
        A state for each map, float32, or float64 if the maps are. The first of the sequence is
        zero. Each rank must use them for its outputs if these have gradients: the backward of the
        other ranks waits for its backward.

    Raises:
        TypeError: if `maps` holds anything but maps, or `axis` is neither a SequenceAxis nor
            a DeviceMesh.
        ValueError: if `maps` is empty, if maps differ in kind or shape, or if the layout has
            another number of runs.
        RingError: on every rank, if calls of ranks differ, or a rank ended or raised.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> runs = [StateMap(torch.ones(2, 3), decay=torch.zeros(2)) for _ in range(2)]
        >>> [x.unique().item() for x in exclusive_scan(runs, mesh)]
        [0.0, 1.0]
    """
    _check_maps(maps)
    if not isinstance(axis, (SequenceAxis, DeviceMesh)):
        raise TypeError(f"axis must be a SequenceAxis or a DeviceMesh, got {type(axis).__name__}")
    layout: Layout | None = axis.layout if isinstance(axis, SequenceAxis) else None
    group = axis_group(axis.mesh if isinstance(axis, SequenceAxis) else axis)
    owners = owners_of(layout or Contiguous(), group.size(), len(maps))
    parts = [[getattr(x, name) for x in maps] for name in FIELDS]
    dtype = torch.float32  # or wider: states are sums of many tokens
    for x in (tensors[0] for tensors in parts if tensors[0] is not None):
        dtype = torch.promote_types(dtype, x.dtype)
    state, decay, matrix = (None if x[0] is None else torch.stack(x).to(dtype) for x in parts)
    return [*scan_op(state, decay, matrix, owners, False, group.group_name).unbind()]


def _check_tensor(name: str, x: Tensor | None, is_optional: bool) -> None:
    if x is None and is_optional:
        return
    if not isinstance(x, Tensor) or isinstance(x, DTensor) or not x.is_floating_point():
        what = x.dtype if isinstance(x, Tensor) else type(x).__name__
        what = "a DTensor" if isinstance(x, DTensor) else what
        raise TypeError(f"{name} of a map must be a plain floating tensor, got {what}")
    check_strided(name, x)


def _check_maps(maps: Sequence[StateMap]) -> None:
    """Refuse what are no maps, and maps of different kinds or shapes."""
    if not isinstance(maps, Sequence) or not all(isinstance(x, StateMap) for x in maps):
        raise TypeError(f"maps must be a list of StateMap, got {maps!r}; write [map] for one")
    if not maps:
        raise ValueError("maps must hold a map for each run of this rank's tokens, got none")
    kinds = [[_kind(getattr(x, name)) for name in FIELDS] for x in maps]
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError(f"maps must have one kind, shape and dtype, got {kinds}")


def _kind(x: Tensor | None) -> str:
    return "none" if x is None else f"{x.dtype} {tuple(x.shape)}"
