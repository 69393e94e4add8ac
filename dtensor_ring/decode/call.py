"""A call of the decode op: its options, what ranks compare of it, and what is kept of equal calls.

Note [Bound decode calls]: the layers of a model make the same call for a token: shapes, options and
the content of their integer tensors are equal. The first one is checked, and its planner's
arguments and call record are kept for the others, by all of that. Sinks differ from layer to layer,
but only scale its output: a kept call has none, and each call brings its own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from types import FrameType
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from dtensor_ring.agreement.call_record import MAX_BYTES, CallRecord
from dtensor_ring.agreement.checked_transport import (
    CheckedTransport,
    TransportContext,
    checked_transport,
)
from dtensor_ring.compute.kernels import Kernel, Scores, kernel_for
from dtensor_ring.compute.lags import is_biased
from dtensor_ring.compute.sole import Sole, sole_of
from dtensor_ring.decode.plan import DecodeRequest
from dtensor_ring.decode.run import MERGES, Combine, first_round
from dtensor_ring.ops import boundaries
from dtensor_ring.ops.attention_record import (
    AttentionFacts,
    attention_facts,
    fields_of,
    layout_text,
    numbers_text,
    runs_text,
)
from dtensor_ring.ops.checks import CALLER, check_inputs, check_num_queries
from dtensor_ring.ops.nodes import place_of_sinks
from dtensor_ring.ops.options import Arguments, Length, kernel_facts
from dtensor_ring.planning.layout import Contiguous, Layout
from dtensor_ring.planning.lru import ByteStore, cached_bytes
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.plan import Step
from dtensor_ring.planning.run_table import as_layout

# The largest number of query tokens. With more, a ring is as fast, and repeats no work.
MAX_QUERIES = 64


class DecodeBatch(NamedTuple):
    """Integer tensors that differ from call to call, see `decode_attention`."""

    cu_seqlens: Tensor | None = None
    slices: Tensor | None = None
    key_runs: Tensor | None = None
    query_starts: Tensor | None = None
    agree: Tensor | None = None


class DecodePlace(NamedTuple):
    """Where the keys are: sharded over the ranks of a group, or all on this rank.

    For DTensors, the placements and the axis decide, and only `merge` is given. `block` has the
    tokens of a block if sums have a fixed order.
    """

    layout: str | None = Contiguous.name
    seq_len: Length | None = None
    group_name: str | None = None
    merge: str | None = None
    block: int | None = None


class DecodeCall(NamedTuple):
    """The options of a decode call: all arguments but query, key and value."""

    batch: DecodeBatch
    scores: Scores
    place: DecodePlace

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of the axis, `None` if this rank has all keys."""
        name = self.place.group_name
        return None if name is None else _resolve_process_group(name)  # type: ignore[arg-type]

    def request(self, query: Tensor, key: Tensor) -> DecodeRequest:
        """Build the planner's arguments.

        Raises:
            ValueError: if an option has a wrong shape, or queries begin before position 0.
        """
        (batch_size, _, num_queries, _), group = query.shape, self.group
        rank, world_size = (0, 1) if group is None else (group.rank(), group.size())
        layout, end = self._keys(key, world_size)
        starts = self._starts(batch_size, end - num_queries)
        cu_seqlens, slices = self.batch.cu_seqlens, self.batch.slices
        return DecodeRequest(
            layout=layout,
            mask=self.scores.mask,
            rank=rank,
            world_size=world_size,
            seq_len=end,
            starts=starts,
            num_queries=num_queries,
            documents=None
            if cu_seqlens is None
            else boundaries.documents_of(cu_seqlens, "cu_seqlens", batch_size),
            slices=None if slices is None else boundaries.slices_of_table(slices, batch_size),
        )

    def _keys(self, key: Tensor, world_size: int) -> tuple[Layout, int]:
        """Return the layout of the keys, and the position after their last one."""
        key_runs, place = self.batch.key_runs, self.place
        if key_runs is not None:
            layout = boundaries.run_table(key_runs, "key_runs")
            return layout, layout.end
        spec: Any = place.layout
        # Shards have equal length unless a DTensor says otherwise.
        seq_len = key.shape[2] * world_size if place.seq_len is None else place.seq_len
        return as_layout(spec), seq_len

    def _starts(self, batch_size: int, default: int) -> tuple[int, ...]:
        given = self.batch.query_starts
        if given is not None:
            return boundaries.starts_of(given, batch_size)
        if default < 0:
            raise ValueError(
                f"query has {-default} tokens more than key has positions, the last of which are "
                "its own by default; pass query_starts"
            )
        return (default,)

    def facts(
        self, query: Tensor, key: Tensor, value: Tensor, request: DecodeRequest
    ) -> tuple[Any, ...]:
        """Return what decides the kernel, as arguments of `kernel_for`."""
        is_packed = (
            request.documents is not None
            or request.slices is not None
            or request.mask.chunk is not None
            or len(request.starts) > 1
        )
        by_block = self.place.block is not None
        how = {"by_block": by_block, "fleeting": True}
        return kernel_facts(self.scores, query, key, value, is_packed, request.slices, **how)


_ARGUMENTS = Arguments(DecodeCall, DecodeBatch, Scores, DecodePlace, Mask)
# The decode op's arguments after its tensors, in the order of `flatten_decode`.
DECODE_LEAVES, DECODE_SCHEMA = _ARGUMENTS.leaves, _ARGUMENTS.schema
# Places among the arguments of the op after its tensors.
_TENSORS = tuple(i for i, leaf in enumerate(DECODE_LEAVES) if leaf.schema_type == "Tensor?")
SINKS = place_of_sinks(DECODE_LEAVES)

# Between a call and the arguments of the decode op after its tensors.
flatten_decode, unflatten_decode = _ARGUMENTS.flatten, _ARGUMENTS.unflatten


class DecodeRound(NamedTuple):
    """The round of messages in which ranks merge what they have.

    Attributes:
        record: the call, as ranks compare it.
        merge: how partial results are merged.
        first_bytes: bytes of a message of the first hop; `None` if the records must agree first.
    """

    record: CallRecord
    merge: str
    first_bytes: int | None


class Ready(NamedTuple):
    """What runs a call on this rank.

    Attributes:
        step: the tiles that its queries see.
        kernel: the block kernel.
        sole: the launch, if it is one without merges.
    """

    step: Step
    kernel: Kernel
    sole: Sole | None


class BoundDecode:
    """A call whose inputs were checked.

    Args:
        call: its options.
        request: the planner's arguments.
        found: the messages of the ranks; `None` if this rank has all keys.

    Attributes:
        call: its options.
        request: the planner's arguments.
        round: the messages of the ranks; `None` if this rank has all keys.
        is_kept: whether equal calls find it, so that it may keep what follows from shapes.
    """

    def __init__(
        self, call: DecodeCall, request: DecodeRequest, found: DecodeRound | None, is_kept: bool
    ) -> None:
        self.call, self.request, self.round, self.is_kept = call, request, found, is_kept
        group = call.group
        self._group = None if group is None else ref(group)
        # `decode_step` bounds the bytes of its steps, so this keeps only a small one alive.
        self._small: Step | None = None
        self._step: ref[Step] | None = None
        self._facts: tuple[Any, ...] | None = None
        self._soles: dict[str, Sole | None] = {}

    @property
    def num_bytes(self) -> int:
        """The memory that it takes, without what other caches hold as well."""
        layout = self.request.layout
        return 6000 + 4 * MAX_BYTES + getattr(layout, "num_bytes", 0)

    @property
    def is_alive(self) -> bool:
        """Whether its group is still the one of its name."""
        return self._group is None or self._group() is self.call.group

    def step(self, num_columns: int) -> Step:
        """Return this rank's step, see `DecodeRequest.step`."""
        if self._small is not None:
            return self._small
        found = None if self._step is None else self._step()
        if found is None:
            found = self.request.step(num_columns)
            self._step = ref(found)
            self._small = found if len(found.tiles) <= 1 else None
        return found

    def kernel(self, query: Tensor, key: Tensor, value: Tensor) -> Kernel:
        """Return the named kernel, or the first one that supports the call."""
        if self._facts is None:
            self._facts = self.call.facts(query, key, value, self.request)
        return kernel_for(*self._facts)

    def sole(self, step: Step, query: Tensor, key: Tensor, kernel: Kernel) -> Sole | None:
        """Return the launch of this rank in a call that is kept, `None` if there are more."""
        if not self.is_kept or self.call.place.block is not None:
            return None
        if is_biased(query, key):
            return None
        if kernel.name not in self._soles:
            self._soles[kernel.name] = sole_of(step, query, key, kernel, "decode")
        return self._soles[kernel.name]

    def ready(self, query: Tensor, key: Tensor, value: Tensor) -> Ready:
        """Return what runs the call."""
        step, kernel = self.step(key.shape[2]), self.kernel(query, key, value)
        return Ready(step, kernel, self.sole(step, query, key, kernel))

    def checked(
        self, query: Tensor, frame: FrameType | None
    ) -> AbstractContextManager[Combine | None]:
        """Return the context of the call, which gives the merge of the partial results."""
        # That of the call's name, as `is_alive` has found.
        group = None if self._group is None else self._group()
        return _within_round(group, self.request, self.round, query, frame)


_BOUND: ByteStore[BoundDecode] = ByteStore(max_bytes=8 << 20, size_of=attrgetter("num_bytes"))


def bound_decode(
    options: tuple[Any, ...], query: Tensor, key: Tensor, value: Tensor
) -> BoundDecode:
    """Return the call of the op's arguments, see Note [Bound decode calls].

    Raises:
        ValueError: if the op does not take such inputs.
    """
    asked = _asked(options, query, key, value)
    if asked is None:
        call, request = _checked(options, query, key, value)
        found = _round_of(call, request, query, value)
        return BoundDecode(call, request, found, is_kept=False)
    known = _BOUND.get(asked)
    if known is not None and known.is_alive:
        return known
    kept = kept_decode(options, query, key, value)
    return _BOUND.put(asked, kept, key_bytes=sum([len(content) for *_, content in asked[0]]))


def kept_decode(options: tuple[Any, ...], query: Tensor, key: Tensor, value: Tensor) -> BoundDecode:
    """Return the call of the op's arguments for a caller that keeps it for equal calls.

    Raises:
        ValueError: if the op does not take such inputs.
    """
    call, request = _checked(options, query, key, value)
    # What is kept has its record, which need not be kept a second time.
    found = _round_of(call, request, query, value, _made_record)
    # The content of the tensors is known by now; they may be written to for the next token.
    scores = call.scores if call.scores.sinks is None else call.scores._replace(sinks=None)
    call = DecodeCall(DecodeBatch(), scores, call.place)
    return BoundDecode(call, request, found, is_kept=True)


def _checked(
    options: tuple[Any, ...], query: Tensor, key: Tensor, value: Tensor
) -> tuple[DecodeCall, DecodeRequest]:
    call = unflatten_decode(options)
    check_inputs(query, key, value, call.scores.sinks, may_be_biased=True)
    check_num_queries(query, MAX_QUERIES)
    return call, call.request(query, key)


def _asked(
    options: tuple[Any, ...], query: Tensor, key: Tensor, value: Tensor
) -> tuple[Any, ...] | None:
    """Return all that a call depends on; `None` if it has integers that are on a GPU."""
    # Tensors of a batch compare by content: the next token's may be written to the same memory.
    contents, others = [], [*options]
    for i in _TENSORS:
        x = options[i]
        if x is None:
            continue
        if i == SINKS:
            others[i] = x.shape, x.dtype, x.device, x.layout
            continue
        if not x.is_cpu or x.layout is not torch.strided:
            return None
        contents.append((i, x.shape, x.numpy().tobytes()))
        others[i] = x.dtype
    shapes = query.shape, key.shape, value.shape, query.device, key.device, value.device
    kinds = query.dtype, key.dtype, value.dtype, query.layout, key.layout, value.layout
    return tuple(contents), *others, *shapes, *kinds


def checked_decode(
    call: DecodeCall, request: DecodeRequest, query: Tensor, value: Tensor
) -> AbstractContextManager[Combine | None]:
    """Return the context of a decode call, which gives the merge of the partial results.

    Args:
        call: the call's options.
        request: the planner's arguments.
        query: the queries, equal on all ranks.
        value: this rank's values.
    """
    found = _round_of(call, request, query, value)
    return _within_round(call.group, request, found, query, CALLER.frame)


def _round_of(
    call: DecodeCall,
    request: DecodeRequest,
    query: Tensor,
    value: Tensor,
    record_of: Callable[..., CallRecord] | None = None,
) -> DecodeRound | None:
    """Return the round of messages of a call, `None` if there is nobody to agree with.

    `record_of` makes the record; by default a cache of records is asked first.
    """
    merge, block = call.place.merge, call.place.block
    if merge is not None and merge not in MERGES:
        raise ValueError(f"unknown merge {merge!r}; known merges: {', '.join(MERGES)}")
    if merge is not None and block is not None:
        raise ValueError(f"merge={merge!r} has no fixed order, and the axis has; leave merge out")
    agree = call.batch.agree
    if agree is not None:
        boundaries.check_integers(agree, "agree")
    if call.place.group_name is None or request.world_size == 1:
        return None
    agreed = "none"
    if agree is not None:
        agreed = numbers_text(boundaries.on_host(agree).numpy().reshape(-1))
    heads = query.shape[1], value.shape[1]
    attention = attention_facts("decode", query, value, call.scores, heads)
    size = None  # of nodes, which are known once the records agree
    if block is None:
        merge, size = first_round(query, value, merge, request.world_size)
    else:
        merge = f"by blocks of {block}"
    record = (record_of or _decode_record)(attention, merge, agreed, *request)
    return DecodeRound(record, merge, size)


_ALONE = nullcontext()


def _within_round(
    group: dist.ProcessGroup | None,
    request: DecodeRequest,
    found: DecodeRound | None,
    query: Tensor,
    frame: FrameType | None,
) -> AbstractContextManager[Combine | None]:
    if found is None or group is None:
        return _ALONE  # nobody compares the line of the frame, so nobody looks for it
    record, merge, size = found
    site = CALLER.site_at(frame)
    agreed = checked_transport(
        group, record, "decode", query.device, call_site=site, first_bytes=size
    )
    return Combining(agreed, request, merge)


class Combining:
    """The context of a call's messages. Equal calls of other layers may enter it again."""

    def __init__(self, agreed: TransportContext, request: DecodeRequest, merge: str) -> None:
        self._agreed, self._how = agreed, (request.rank, request.world_size, merge)
        self._combine: Combine | None = None

    def again(self, layer: str) -> None:
        """Prepare to be entered by the next call, which that layer makes."""
        if isinstance(self._agreed, CheckedTransport):
            self._agreed.again(layer)

    def __enter__(self) -> Combine:
        transport = self._agreed.__enter__()
        if self._combine is None:
            self._combine = Combine(transport, *self._how)
        else:
            self._combine.begin()
        return self._combine

    def __exit__(self, *error: Any) -> bool | None:
        return self._agreed.__exit__(*error)


# The field of a record with the integers that a caller gives as `agree`.
AGREE = "tokens given as agree"


@cached_bytes(max_bytes=8 << 20, num_bytes=lambda record: 4 * MAX_BYTES)
def _decode_record(attention: AttentionFacts, merge: str, agree: str, *asked: Any) -> CallRecord:
    return _made_record(attention, merge, agree, *asked)


def _made_record(attention: AttentionFacts, merge: str, agree: str, *asked: Any) -> CallRecord:
    request = DecodeRequest(*asked)
    # What differs from token to token; the other fields take longer.
    spec: Any = DecodePlace().layout
    fixed = request._replace(layout=as_layout(spec), rank=0, seq_len=0, starts=())
    fields = _fixed_fields(attention, merge, *fixed)
    own = {
        "tokens": str(request.seq_len),
        "layout": layout_text(request.layout),
        AGREE: agree,
        "query_starts": numbers_text(np.array(request.starts, dtype=np.int64)),
        "key_runs": runs_text(request.layout),
    }
    return CallRecord(fields | own)


@cached_bytes(max_bytes=8 << 20, num_bytes=lambda fields: 4 * MAX_BYTES)
def _fixed_fields(attention: AttentionFacts, merge: str, *asked: Any) -> dict[str, str]:
    """Return the fields of a record that all tokens of a sequence share; others are empty."""
    request = DecodeRequest(*asked)
    own: dict[str, object] = {
        "tokens of queries": request.num_queries,
        AGREE: "",
        "query_starts": "",
        "merge": merge,
        "key_runs": "",
    }
    return fields_of(attention, request, own)
