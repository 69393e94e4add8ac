"""The all-to-all op: options, schema, implementation, fake kernel, gradient and call record."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from dtensor_ring.agreement.call_record import MAX_BYTES, CallRecord
from dtensor_ring.agreement.checked_transport import TransportContext, checked_transport
from dtensor_ring.agreement.group_state import group_state_of
from dtensor_ring.all_to_all.plan import AllToAllPlan, all_to_all_plan, head_shard_of
from dtensor_ring.all_to_all.rounded_keys import empty_rounded, exchanged
from dtensor_ring.compute.memory import TOKEN_MAJOR, empty
from dtensor_ring.compute.trace import Label
from dtensor_ring.ops import nodes
from dtensor_ring.ops.attention_record import boundaries_text, layout_text, runs_text, slices_text
from dtensor_ring.ops.boundaries import documents_of_both, run_table, slices_of_table
from dtensor_ring.ops.checks import CALLER, check_all_to_all
from dtensor_ring.ops.options import Arguments, Length, group_named
from dtensor_ring.ops.ring_op import check_batch
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.lru import cached_bytes
from dtensor_ring.planning.mask import Documents, Mask
from dtensor_ring.planning.plan import KeyOwners, checked_slices
from dtensor_ring.planning.ranges import length
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.tile import FULL
from dtensor_ring.transport.transport import Transport, is_plain, transport_of


class BatchRuns(NamedTuple):
    """The runs before and after the exchange, for layouts that belong to a batch."""

    runs: Tensor | None = None
    to_runs: Tensor | None = None


class MaskTensors(NamedTuple):
    """What queries see in the attention that the exchange is part of, besides the mask."""

    cu_seqlens: Tensor | None = None
    key_cu_seqlens: Tensor | None = None
    slices: Tensor | None = None


class AllToAllArgs(NamedTuple):
    """The options of an exchange: all arguments but the tensors.

    `layout` and `runs` say which tokens a rank has before, `to` and `to_runs` which tokens the
    ranks of its group have afterwards. Backward goes from after to before, and sums the copies of a
    key head.

    Attributes:
        batch_runs: the runs of a batch.
        layout: the spec of the layout before.
        to: the spec of the layout afterwards.
        heads: the number of consecutive ranks that share the heads.
        num_heads: heads of each tensor before the exchange, and after the reverse exchange.
        num_key_heads: the number of key heads.
        seq_len: the global length in tokens.
        num_tokens: tokens of this rank afterwards; `None` derives them from the layout.
        group_name: the process group of the axis.
        mask: the mask of the attention.
        is_back: whether this is the reverse exchange.
        forward_call: the number of the forward call that this is the backward of; 0 if unknown.
        is_compiled: whether a compiler relies on `tokens_after`.
        mask_tensors: the boundaries or slices of the attention.
        key_seq_len: the attention's global key length in tokens. `None` if the exchange is not
            part of an attention; then `mask` is ignored.
        kv_dtype: the dtype of 8 bits in which the last two tensors, keys and values, travel; see
            Note [Rounded once]. `None` if they travel as they are. If there are several groups,
            the last of the results is what travels on between them, `Call.rounded`.
    """

    batch_runs: BatchRuns
    layout: str | None
    to: str | None
    heads: int
    num_heads: tuple[int, ...]
    num_key_heads: int
    seq_len: Length | None
    num_tokens: Length | None
    group_name: str | None
    mask: Mask  # without a default: torch 2.11 does not trace one that is an object
    is_back: bool = False
    forward_call: int = 0
    is_compiled: bool = False
    mask_tensors: MaskTensors = MaskTensors()
    key_seq_len: Length | None = None
    kv_dtype: torch.dtype | None = None

    @classmethod
    def of_tokens(
        cls,
        batch_runs: BatchRuns,
        layout: str | None,
        to: str | None,
        heads: int,
        seq_len: Length,
        group: dist.ProcessGroup,
    ) -> AllToAllArgs:
        """Return the exchange of whole tokens: each is one head, with all that belongs to it."""
        return cls(
            batch_runs=batch_runs,
            layout=layout,
            to=to,
            heads=heads,
            num_heads=(1,),
            num_key_heads=1,
            seq_len=seq_len,
            num_tokens=None,
            group_name=group.group_name,
            mask=FULL,
            is_compiled=torch.compiler.is_compiling(),
        )

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the axis."""
        return group_named(self.group_name)

    def layouts(self) -> tuple[Layout, Layout]:
        """Return the layouts before and after the exchange."""
        named = zip(self.batch_runs._fields, self.batch_runs, (self.layout, self.to), strict=True)
        before, after = (
            as_layout(spec) if runs is None else run_table(runs, name)  # type: ignore[arg-type]
            for name, runs, spec in named
        )
        return before, after

    def documents(self, batch: int) -> tuple[Documents | None, Documents | None]:
        """Return the boundaries of the attention's queries and keys."""
        return documents_of_both(
            self.mask_tensors.cu_seqlens, self.mask_tensors.key_cu_seqlens, batch
        )

    def slices(self, batch: int) -> Slices | None:
        """Return the attention's slices, `None` if it has none."""
        given = self.mask_tensors.slices
        return None if given is None else slices_of_table(given, batch)

    def check_attention(self, batch: int) -> None:
        """Refuse now what the attention's planner would refuse after the exchange.

        Raises:
            ValueError: if boundaries or slices do not fit the sequences, or one another.
        """
        if self.key_seq_len is not None and self.seq_len is not None:
            lengths = self.seq_len, self.key_seq_len
            documents, key_documents = self.documents(batch)
            size, slices = self.group.size(), self.slices(batch)
            checked_slices(self.mask, size, lengths, documents, key_documents, slices)

    def plan(self, tensors: Sequence[Tensor], layouts: tuple[Layout, Layout]) -> AllToAllPlan:
        """Plan this rank's messages.

        Raises:
            ValueError: if the layouts do not allow it, or a tensor does not have their shape.
        """
        group = self.group
        if self.is_compiled:
            self._check_promise(layouts)
        seq_len: Any = self.seq_len
        layout, to = layouts
        plan = all_to_all_plan(layout, to, self.heads, group.rank(), group.size(), seq_len)
        expected = plan.num_tokens[self.is_back]
        for x, num_heads in zip(tensors, self._heads_before(group.rank()), strict=True):
            if (x.shape[1], x.shape[2]) != (num_heads, expected):
                raise ValueError(
                    f"tensors of rank {group.rank()} of {group.size()} must have {num_heads} heads "
                    f"(num_heads) of {expected} tokens (seq_len {seq_len}), got a tensor of shape "
                    f"{tuple(x.shape)}"
                )
        return plan

    def _heads_before(self, rank: int) -> Sequence[int]:
        """Return the heads of each tensor of a rank before the exchange."""
        return self.local_heads(rank) if self.is_back else self.num_heads

    def heads_after(self, rank: int) -> Sequence[int]:
        """Return the heads of each tensor of a rank after the exchange."""
        return self.num_heads if self.is_back else self.local_heads(rank)

    def local_heads(self, rank: int) -> list[int]:
        """Return the heads of each tensor of a rank while heads are sharded."""
        shard = head_shard_of(rank % self.heads, self.heads, self.num_key_heads)
        return [length(shard.span(count, self.num_key_heads)) for count in self.num_heads]

    def tokens_after(self, rank: int, world_size: int) -> Any:
        """Return the tokens of a rank after the exchange, from lengths alone, for compilers."""
        if self.num_tokens is not None:
            return self.num_tokens
        seq_len: Any = self.seq_len
        if self.heads == world_size and not self.is_back:
            return seq_len  # it may be a symbol, so do not read it
        # With explicit runs, the named layout gives the usual lengths.
        spec: Any = self.layout if self.is_back else self.to
        ranks = self._sharing(rank)
        return sum(as_layout(spec).num_tokens(x, world_size, seq_len) for x in ranks)

    def _sharing(self, rank: int) -> range:
        """Return the ranks whose tokens a rank has after the exchange."""
        if self.is_back:
            return range(rank, rank + 1)
        # Ranks 0 to heads - 1 share the heads, then the next `heads` ranks, and so on.
        first = rank // self.heads * self.heads
        return range(first, first + self.heads)

    def _check_promise(self, layouts: tuple[Layout, Layout]) -> None:
        """Refuse runs whose lengths differ from `tokens_after`, which a compiler relies on.

        Raises:
            ValueError: on every rank, if the length of any rank differs.
        """
        runs, size = (
            self.batch_runs.runs if self.is_back else self.batch_runs.to_runs,
            self.group.size(),
        )
        if runs is None or self.num_tokens is not None:
            return
        layout, seq_len = layouts[0] if self.is_back else layouts[1], self.seq_len
        assert seq_len is not None, "it is known by now"
        # One rank of each group stands for all of it, as its ranks hold the same tokens afterwards.
        for rank in range(0, size, len(self._sharing(0))):
            ranks, expected = self._sharing(rank), self.tokens_after(rank, size)
            found = sum(layout.num_tokens(x, size, seq_len) for x in ranks)
            if found != expected:
                raise ValueError(
                    f"runs give ranks {list(ranks)} {found} tokens together, but in compiled code "
                    f"each rank has as many as without runs, which is {expected}: make runs of "
                    "equal lengths, exchange tokens for heads over all ranks or none, or leave "
                    "this uncompiled"
                )


_ARGUMENTS = Arguments(AllToAllArgs, BatchRuns, MaskTensors, Mask)


def flatten_all_to_all(args: AllToAllArgs) -> tuple[Any, ...]:
    """Return the arguments of the exchange op after its tensors."""
    return _ARGUMENTS.flatten(args)


def unflatten_all_to_all(arguments: tuple[Any, ...]) -> AllToAllArgs:
    """Return the exchange from which `flatten_all_to_all` made these arguments."""
    return _ARGUMENTS.unflatten(arguments)


def forward(tensors: list[Tensor], *options: Any) -> list[Tensor]:
    """Run the exchange op on plain tensors."""
    args = unflatten_all_to_all(options)
    check_all_to_all(tensors)
    layouts = args.layouts()
    with checked_all_to_all(args, layouts, tensors) as transport:
        # Within the context: an error of this rank is reported to the others.
        args.check_attention(len(tensors[0]))
        return run_exchange(tensors, args, layouts, transport)


def run_exchange(
    tensors: list[Tensor],
    args: AllToAllArgs,
    layouts: tuple[Layout, Layout],
    transport: Transport,
) -> list[Tensor]:
    """Return the tensors after an exchange.

    Raises:
        ValueError: if the layouts do not allow it, or a tensor does not have their shape.
    """
    plan, rank = args.plan(tensors, layouts), args.group.rank()
    heads, label = (tuple(args.num_heads), args.num_key_heads), Label("exchange", 0, rank)
    owners = None
    if args.kv_dtype is not None:
        seq_len: Any = args.seq_len  # the plan was made with it
        owners = KeyOwners(layouts[1], args.heads, args.group.size(), seq_len)
    return exchanged(
        tensors,
        plan,
        owners,
        heads=heads,
        is_back=args.is_back,
        kv_dtype=args.kv_dtype,
        transport=transport,
        label=label,
    )


def _fake(tensors: list[Tensor], *options: Any) -> list[Tensor]:
    args: AllToAllArgs = unflatten_all_to_all(options)
    check_all_to_all(tensors)
    check_batch(tensors[0], args.batch_runs)
    check_batch(tensors[0], args.mask_tensors)
    group = args.group
    num_tokens = args.tokens_after(group.rank(), group.size())
    # Compilers rely on the strides, so they must be those of `run_all_to_all`.
    results = [
        empty(x, (x.shape[0], heads, num_tokens, x.shape[3]), TOKEN_MAJOR)
        for x, heads in zip(tensors, args.heads_after(group.rank()), strict=True)
    ]
    if args.kv_dtype is not None and args.heads < group.size():
        results.append(empty_rounded(results[-2:], args.kv_dtype, args.heads))
    return results


def checked_all_to_all(
    args: AllToAllArgs, layouts: tuple[Layout, Layout], tensors: Sequence[Tensor]
) -> TransportContext:
    """Return the context of an exchange, which gives its transport."""
    group, first = args.group, tensors[0]
    if group.size() == 1:
        return nullcontext(transport_of(group))  # nobody to agree with
    batch, dims = len(first), tuple((x.shape[3], x.dtype) for x in tensors)
    # What is left of the options is equal on all ranks, and in all calls of a layer.
    same = args._replace(
        batch_runs=BatchRuns(),
        mask_tensors=MaskTensors(),
        num_heads=tuple(args.num_heads),
        num_tokens=None,
        forward_call=0,
    )
    way = is_plain(transport_of(group), first.device), first.device.type
    (before, after), (documents, key_documents) = layouts, args.documents(batch)
    record = _all_to_all_record(
        way, batch, dims, same, before, after, documents, key_documents, args.slices(batch)
    )
    direction = _direction(args.is_back)
    return checked_transport(group, record, direction, first.device, args.forward_call, CALLER.site)


def _direction(is_back: bool) -> str:
    return "exchange back" if is_back else "exchange"


@cached_bytes(max_bytes=8 << 20, num_bytes=lambda record: 4 * MAX_BYTES)
def _all_to_all_record(
    way: tuple[bool, str],
    batch: int,
    dims: tuple[tuple[int, torch.dtype], ...],
    args: AllToAllArgs,
    before: Layout,
    after: Layout,
    documents: Documents | None,
    key_documents: Documents | None,
    slices: Slices | None,
) -> CallRecord:
    """Return the record of an exchange.

    Args:
        way: whether the transport is that of the group, and the type of the device.
        batch: rows of the batch.
        dims: head dim and dtype of each tensor.
        args: the options, without tensors.
        before: the layout before the exchange.
        after: the layout after it.
        documents: boundaries of the attention's queries.
        key_documents: boundaries of its keys.
        slices: its slices.
    """
    is_plain, device = way
    fields: dict[str, object] = {
        "direction": _direction(args.is_back),
        "transport": "that of the group" if is_plain else "another one",
        "device": device,
        "batch": batch,
        "dtypes": ", ".join(str(dtype) for _, dtype in dims),
        "kv_dtype": args.kv_dtype,
        "head dims": [head_dim for head_dim, _ in dims],
        "heads": list(args.num_heads),
        "key heads": args.num_key_heads,
        "ranks that share the heads": args.heads,
        "tokens": args.seq_len,
        "layout": layout_text(before),
        "layout after": layout_text(after),
        "runs": runs_text(before),
        "runs after": runs_text(after),
        "tokens of keys": args.key_seq_len,
        "mask": args.mask,
        "cu_seqlens": boundaries_text(documents),
        "key_cu_seqlens": boundaries_text(key_documents),
        "slices": slices_text(slices),
    }
    return CallRecord({name: str(value) for name, value in fields.items()})


class _AllToAllFunction(nodes.Node):
    """The autograd node of an exchange. It is linear: its backward is the reverse exchange.

    Gradients pass straight through the rounding to eight bits.
    """

    @staticmethod
    def forward(ctx: Any, keyset: Any, options: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = [*tensors], *options
        outputs = nodes.below_autograd(all_to_all_op, forward, keyset, *inputs, of_node=True)
        args = unflatten_all_to_all(options)
        ctx.save_for_backward(*args.batch_runs)
        # While a compiler traces, no call is made, so there is no call number.
        forward_call = group_state_of(args.group).number if nodes.is_plain_call(keyset) else 0
        ctx.args = args._replace(
            batch_runs=BatchRuns(),
            mask_tensors=MaskTensors(),  # the forward call has checked it
            key_seq_len=None,
            kv_dtype=None,
            is_back=not args.is_back,
            num_tokens=tensors[0].shape[2],
            # The backward of a backward is a forward again, and belongs to no earlier call.
            forward_call=0 if args.forward_call else forward_call,
        )
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        # Results that no loss reads have no gradient, so nothing is sent back for them.
        given = [i for i, grad in enumerate(grads) if grad is not None]
        results: list[Any] = [None] * len(ctx.args.num_heads)
        if given:
            args = ctx.args._replace(
                batch_runs=BatchRuns._make(ctx.saved_tensors),
                num_heads=tuple(ctx.args.num_heads[i] for i in given),
            )
            found = all_to_all_op([grads[i] for i in given], *flatten_all_to_all(args))
            for i, grad in zip(given, found, strict=True):
                results[i] = grad
        return None, None, *results


def _recorded_all_to_all(keyset: Any, tensors: list[Tensor], *options: Any) -> Any:
    if forward_ad._current_level >= 0:
        nodes.refuse_tangents(tuple(tensors))
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
        return list(nodes.recorded(_AllToAllFunction, keyset, options, *tensors))
    return nodes.below_autograd(all_to_all_op, forward, keyset, tensors, *options)


all_to_all_op = nodes.register_op(
    "exchange",
    f"(Tensor[] tensors, {_ARGUMENTS.schema}) -> Tensor[]",
    forward,
    _fake,
    autograd=_recorded_all_to_all,
)
