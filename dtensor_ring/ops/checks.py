"""Checks of the ops' tensors before anything is sent, and the user's line of each call."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from threading import local
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dtensor_ring.agreement.call_record import CallSite
from dtensor_ring.agreement.group_state import group_state_of
from dtensor_ring.compute.memory import empty, order_of
from dtensor_ring.ops.options import Call, PlanRequest
from dtensor_ring.planning.plan import Plan
from dtensor_ring.planning.ranges import as_int

T = TypeVar("T")


def check_strided(name: str, x: Tensor) -> None:
    """Refuse a tensor whose memory is not described by strides.

    Raises:
        ValueError: if it is nested, sparse or in another library's layout.
    """
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else x.layout
        dense = "torch.nested.to_padded_tensor" if x.is_nested else ".to_dense()"
        raise ValueError(f"{name} must be a dense, strided tensor, got a {kind} one; use {dense}")


class _Caller(local):
    # Of the call in the library. Few calls read its line, which takes longer than to keep it.
    frame: FrameType | None = None
    layer = ""
    placements = ""

    @property
    def line(self) -> str:
        """The user's line that made the call, empty without a call."""
        return line_of(self.frame)

    @property
    def site(self) -> CallSite:
        """Where the call is made, as ranks compare it."""
        return self.site_at(self.frame)

    def site_at(self, frame: FrameType | None) -> CallSite:
        """Where a frame's call is made, within the layer that is known."""
        return CallSite(line_of(frame), self.layer, self.placements)


# What is known of this thread's call. Empty if unknown, as in a compiled graph.
CALLER = _Caller()

_WITHIN = "torch.", "dtensor_ring."
# The attribute of a module that holds its name. Copies of a model keep it.
_NAME = "dtensor_ring_layer"


class NotPickled:
    """The first attribute of an object that can be copied, but not pickled.

    Args:
        why: what the error says, and what to do instead.
    """

    def __init__(self, why: str) -> None:
        self._why = why

    def __deepcopy__(self, memo: dict[int, Any]) -> NotPickled:
        """Return itself: it does not change."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse pickling."""
        raise TypeError(self._why)


def line_of(frame: FrameType | None) -> str:
    """Return the user's line that called a frame, without folders, which differ by host."""
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_WITHIN):
        frame = frame.f_back
    # Generated code has no file, and its number differs by process.
    if frame is None or frame.f_code.co_filename.startswith("<"):
        return ""
    file = frame.f_code.co_filename.rpartition("/")[2]
    return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"


def called_from(frame: FrameType, run: Callable[..., T], *arguments: Any) -> T:
    """Call `run` while `CALLER` holds the place that called the frame."""
    CALLER.frame = frame
    try:
        return run(*arguments)
    except BaseException:
        CALLER.layer = ""  # after an error, no forward hook of the layer resets it
        raise
    finally:
        CALLER.frame, CALLER.placements = None, ""


def called_by_user(run: Callable[..., T], *arguments: Any) -> T:
    """Call `run`; outside of a compiler, while `CALLER` holds the user's line."""
    if torch.compiler.is_compiling():
        return run(*arguments)
    return called_from(sys._getframe(), run, *arguments)


def name_layer(module: nn.Module, name: str) -> None:
    """Name a module that attends. The name must be the same on all ranks."""
    setattr(module, _NAME, name)


def layer_of(module: nn.Module) -> str:
    """Return the name of a module, empty if it has none."""
    return getattr(module, _NAME, "")


def within_layer(module: nn.Module) -> AbstractContextManager[object]:
    """Return a context in which `CALLER` holds the name of a module.

    Compiled code has none: a name in the graph would compile each layer separately.
    """
    return nullcontext() if torch.compiler.is_compiling() else _WithinLayer(layer_of(module))


class _WithinLayer:
    """The context of `within_layer`; a class is faster than a generator."""

    __slots__ = "_before", "_layer"  # one for each layer of each token

    def __init__(self, layer: str) -> None:
        self._layer = layer

    def __enter__(self) -> None:
        self._before, CALLER.layer = CALLER.layer, self._layer

    def __exit__(self, *error: object) -> None:
        CALLER.layer = self._before


# GPU kernels load this many bytes at once. If a row is not aligned, some fail or read wrong values;
# flash attention 2 and 3, including PyTorch's own, do not check it.
ALIGNMENT = 16


def unit_stride(*tensors: Tensor) -> list[Tensor]:
    """Return tensors with a last stride of 1, which kernels rely on and not all check."""
    # To ask for one stride takes longer than for all.
    return [x if x.stride()[-1] == 1 else x.contiguous() for x in tensors]


def loadable(*tensors: Tensor) -> Sequence[Tensor]:
    """Return tensors with a last stride of 1 and, on a GPU, aligned rows; copy if necessary."""
    is_cuda = tensors[0].is_cuda
    # A loop, as a comprehension is a call: most tensors are right.
    for x in tensors:
        if x.stride()[-1] != 1 or (is_cuda and not is_aligned(x)):
            dense = unit_stride(*tensors)
            return [x if not is_cuda or is_aligned(x) else _moved(x) for x in dense]
    return tensors


def is_aligned(x: Tensor) -> bool:
    """Return whether rows are aligned, or have a length that no dense copy could align."""
    found = _rows_aligned(x.shape, x.stride(), x.itemsize)
    return not x.data_ptr() % ALIGNMENT if found is None else found


@lru_cache(maxsize=1024)
def _rows_aligned(shape: torch.Size, stride: tuple[int, ...], size: int) -> bool | None:
    """Return whether rows of numbers of `size` bytes are aligned; `None` if the first row says."""
    if shape[-1] * size % ALIGNMENT:
        return True
    # The stride of a dim of length 1 is never used.
    steps = zip(shape[:-1], stride[:-1], strict=True)
    misses = any(length > 1 and step * size % ALIGNMENT for length, step in steps)
    return False if misses else None


def _moved(x: Tensor) -> Tensor:
    """Return a dense copy in the same memory order, which decides the order of the output."""
    return empty(x, x.shape, order_of(x)).copy_(x)


# The largest number of tiles of a rank without a warning: they are planned in about 0.03 s.
MANY = 1000


def warn_of_tiles(plan: Plan, request: PlanRequest) -> None:
    """Warn if the layout makes many tiles, and more than there are documents.

    The number is rounded down to a power of two. Python shows each text once, so a line of the user
    is reported again only if a batch takes twice the number.
    """
    if request.key_layout is not None:
        return  # a cache says where tokens are
    num_tiles = plan.num_tiles
    if num_tiles <= MANY or num_tiles <= _num_slices(request):
        return
    line = CALLER.line
    place = f"{line}: " if line else ""
    warnings.warn(
        f"{place}the layout {request.layout.spec!r} cuts this attention into over "
        f"{1 << (num_tiles.bit_length() - 1):,} tiles for each rank, about one for each document "
        "and rank; planning a batch takes some 30 us for each, and so does launching, with kernels "
        "that take one document at a time; 'balanced', made for the documents of a batch, has few",
        stacklevel=2,
    )


def warn_of_boundaries(request: PlanRequest) -> None:
    """Warn if the boundaries of a call end where a rank's shard does, as local ones would.

    Layers of a model get theirs from its plan, and rows with so much padding are nothing unusual.
    """
    documents, seq_len = request.documents, request.seq_len
    if CALLER.layer or request.key_layout is not None or request.world_size == 1:
        return
    if documents is None or len(documents.arrays) != 1 or not documents.arrays[0].size:
        return
    last = int(documents.arrays[0][-1])
    # A sequence of one or two tokens, which is padded so that each rank has as many, ends so, too.
    if last > 2 and last * request.world_size == seq_len:
        warnings.warn(
            f"the last boundary of cu_seqlens is {last}, the length of a rank's shard: boundaries "
            f"count the {seq_len} tokens of all {request.world_size} ranks, and tokens after the "
            "last one see nothing",
            stacklevel=2,
        )


def _num_slices(request: PlanRequest) -> int:
    """Return the number of documents or slices in all batch rows."""
    if request.slices is not None:
        return sum(map(len, request.slices.tables))
    documents = request.documents
    return sum(row.size - 1 for row in documents.arrays) if documents else 1


LOG = logging.getLogger("dtensor_ring")


def announce(
    call: Call, request: PlanRequest, plan: Plan, kernel: str, key: Tensor, value: Tensor
) -> None:
    """Log the first attention of a group at level INFO, and all of them at DEBUG.

    Args:
        call: the call's options.
        request: the planner's arguments.
        plan: this rank's plan.
        kernel: name of the kernel that was chosen.
        key: `(B, Nkv, L, H)`.
        value: `(B, Nkv, L, Hv)`.
    """
    state = group_state_of(call.group)
    # Once for each group: a line for each layer and step would hide all else.
    level = logging.DEBUG if state.is_announced else logging.INFO
    state.is_announced = True
    if not LOG.isEnabledFor(level):
        return
    per_token = sum(x.shape[0] * x.shape[1] * x.shape[3] * x.itemsize for x in (key, value))
    ranks = list(state.ranks)
    rank = ranks[request.rank]
    LOG.log(
        level,
        "ring attention on rank %d of %s: kernel %s, layout %s, strategy %s, %s tokens, "
        "%d steps, receives %s tokens (%.1f MiB) forward",
        rank,
        ranks,
        kernel,
        request.layout.name,
        request.strategy.spec,
        f"{request.seq_len:,}",
        plan.num_steps,
        f"{plan.num_received:,}",
        plan.num_received * per_token / 2**20,
    )


# Query, key and value.
Tensors = tuple[Tensor, Tensor, Tensor]
STRIDED = torch.strided


def check_head_dims(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse queries with more than the head dim of keys, which the op would take for a bias.

    Raises:
        ValueError: says what was given.
    """
    if query.shape[-1] > key.shape[-1]:
        given = _shapes((query, key, value))
        raise ValueError(f"query and key must have one head dim, got {given}")


def check_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    *,
    may_be_narrow: bool = False,
    may_be_biased: bool = False,
) -> None:
    """Refuse inputs that ring attention does not support.

    Args:
        query: `(B, N, L, H)`.
        key: `(B, Nkv, L, H)`.
        value: `(B, Nkv, L, Hv)`.
        sinks: `(N,)`, or `None`.
        may_be_narrow: whether keys and values may have a narrower dtype than queries.
        may_be_biased: whether queries may have a bias by distance beside their head dim.

    Raises:
        ValueError: says what was given and what is supported.
    """
    tensors = query, key, value
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(f"query, key and value must be (B, N, L, H), got {_shapes(tensors)}")
    dtype = query.dtype
    is_narrow = may_be_narrow and torch.promote_types(dtype, key.dtype) == dtype
    if not (dtype == key.dtype or is_narrow) or key.dtype != value.dtype:
        raise ValueError(_differ("dtype", tensors))
    if not query.device == key.device == value.device:
        raise ValueError(_differ("device", tensors))
    if not query.layout is key.layout is value.layout is STRIDED:
        for name, x in zip(_NAMES, tensors, strict=True):
            check_strided(name, x)
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ValueError(f"attention needs a floating dtype of 16 bits or more, got {dtype}")
    # Each access to `shape` builds a new tuple, so read it once.
    batch, num_heads, _, head_dim = query.shape
    key_batch, num_key_heads, _, key_head_dim = key.shape
    if batch != key_batch or key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"query, key and value disagree in batch, heads or length: {_shapes(tensors)}"
        )
    if head_dim != key_head_dim and not (may_be_biased and head_dim > key_head_dim):
        raise ValueError(f"query and key must have one head dim, got {_shapes(tensors)}")
    if not (num_heads and num_key_heads):
        raise ValueError(f"query, key and value need heads, got {_shapes(tensors)}")
    if num_heads % num_key_heads:
        raise ValueError(
            f"the query heads must be a multiple of the key heads, got {_shapes(tensors)}; "
            "grouped-query heads are shared in order and need not be repeated"
        )
    if sinks is not None:
        check_sinks(query, sinks)


def check_all_to_all(tensors: Sequence[Tensor]) -> None:
    """Refuse tensors that cannot be exchanged in one message.

    Raises:
        ValueError: says what was given and what is supported.
    """
    if not tensors or any(x.ndim != 4 for x in tensors):
        found = _listed(tensors) or "none"
        raise ValueError(f"tensors must be one or more (B, N, L, H), got {found}")
    first, *others = tensors
    # A compiler's sizes can be compared, but not collected in a set.
    if any(x.shape[0] != first.shape[0] or x.shape[2] != first.shape[2] for x in others):
        raise ValueError(f"tensors must have one batch size and one length, got {_listed(tensors)}")
    if any(x.device != first.device for x in others):
        devices = ", ".join(str(x.device) for x in tensors)
        raise ValueError(f"tensors must be on one device, got {devices}; use .to()")
    for x in tensors:
        check_strided("tensors", x)


def _listed(tensors: Sequence[Tensor]) -> str:
    return ", ".join(str(tuple(x.shape)) for x in tensors)


def check_num_queries(query: Tensor, largest: int) -> None:
    """Refuse no queries, and more than every rank should compute redundantly.

    Raises:
        ValueError: says the number.
    """
    if not 1 <= query.shape[2] <= largest:
        raise ValueError(
            f"query must have 1 to {largest} tokens to decode, got {query.shape[2]}; more are for "
            "ring_attention, which shards them over the ranks"
        )


def check_sinks(query: Tensor, sinks: Tensor) -> None:
    """Refuse sinks unless they are one logit for each query head."""
    if tuple(sinks.shape) != (query.shape[1],):
        raise ValueError(
            f"sinks must hold one logit per query head, shape ({query.shape[1]},), "
            f"got {tuple(sinks.shape)}; where heads are sharded, pass a DTensor or this rank's own"
        )
    if sinks.device != query.device:
        raise ValueError(f"sinks must be on {query.device}, got {sinks.device}; use .to()")
    if not sinks.is_floating_point() or sinks.dtype.itemsize < 2:
        raise ValueError(
            f"sinks must have a floating dtype of 16 bits or more, got {sinks.dtype}; use .float()"
        )


_NAMES = "query", "key", "value"


def _shapes(tensors: Tensors) -> str:
    return ", ".join(f"{name} {tuple(x.shape)}" for name, x in zip(_NAMES, tensors, strict=True))


def _differ(what: str, tensors: Tensors) -> str:
    # The error names all three, to show which one differs.
    found = zip(_NAMES, tensors, strict=True)
    listed = ", ".join(f"{name} {getattr(x, what)}" for name, x in found)
    return f"query, key and value must have one {what}, got {listed}; use .to()"


def canonical(dim: int, name: str, x: Tensor) -> int:
    """Return a dimension of a tensor, counted from the front.

    Raises:
        TypeError: if it is not an integer.
        IndexError: if the tensor has no such dimension.
    """
    dim, ndim = as_int("dim", dim), x.ndim
    if not -ndim <= dim < ndim:
        raise IndexError(
            f"dim must be from {-ndim} to {ndim - 1} for a {name} of shape {tuple(x.shape)}, got "
            f"{dim}"
        )
    return dim % ndim
