"""The options of the exchange op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from dtensor_ring.ops.arguments import Arguments
from dtensor_ring.ops.boundaries import documents_of_both, run_table, slices_of_table
from dtensor_ring.ops.options import Length, group_named
from dtensor_ring.planning.all_to_all import Exchange, exchange_of, head_shard_of
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.mask import Documents, Mask
from dtensor_ring.planning.plan import checked_slices
from dtensor_ring.planning.ranges import length
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.tile import FULL


class Dealt(NamedTuple):
    """Runs of a batch, whose layouts belong to it: before the exchange, and after it."""

    runs: Tensor | None = None
    to_runs: Tensor | None = None


class Seen(NamedTuple):
    """What queries see in an attention that the exchange is for, beside the mask."""

    cu_seqlens: Tensor | None = None
    key_cu_seqlens: Tensor | None = None
    slices: Tensor | None = None


class Trade(NamedTuple):
    """What is exchanged for what: everything but the tensors.

    `layout` and `runs` say which tokens a rank has before, `to` and `to_runs` which tokens the
    ranks of its group have after. Back, it is the other way round, and copies of a key head are
    summed: what backward does.
    """

    dealt: Dealt
    layout: str | None
    to: str | None
    heads: int
    """Consecutive ranks that share the heads."""
    num_heads: tuple[int, ...]
    """Of each tensor, before; and after it came back."""
    num_key_heads: int
    seq_len: Length | None
    """Global length."""
    num_tokens: Length | None
    """Of this rank afterwards; `None` if the layout says it."""
    group_name: str | None
    is_back: bool = False
    origin: int = 0
    """Number of the forward call that this is the backward call of; 0 if not known."""
    is_compiled: bool = False
    """Whether a compiler was told how many tokens result, see `tokens_after`."""
    seen: Seen = Seen()
    mask: Mask = FULL
    key_seq_len: Length | None = None
    """Of the attention's keys, `None` if it is for no attention: then nobody looks at the mask."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the axis."""
        return group_named(self.group_name)

    def layouts(self) -> tuple[Layout, Layout]:
        """How tokens are dealt before, and after."""
        named = zip(self.dealt._fields, self.dealt, (self.layout, self.to), strict=True)
        before, after = (
            as_layout(spelling) if runs is None else run_table(runs, name)  # type: ignore[arg-type]
            for name, runs, spelling in named
        )
        return before, after

    def documents(self, batch: int) -> tuple[Documents | None, Documents | None]:
        """Boundaries of the attention's queries and keys."""
        return documents_of_both(self.seen.cu_seqlens, self.seen.key_cu_seqlens, batch)

    def slices(self, batch: int) -> Slices | None:
        """What the attention's queries see, if slices say it."""
        given = self.seen.slices
        return None if given is None else slices_of_table(given, batch)

    def check_attention(self, batch: int) -> None:
        """Refuse what the planner of the attention would, after all has been sent.

        Raises:
            ValueError: if boundaries or slices do not fit the sequences, or one another.
        """
        if self.key_seq_len is not None and self.seq_len is not None:
            lengths = self.seq_len, self.key_seq_len
            asked = self.mask, self.group.size(), lengths, *self.documents(batch)
            checked_slices(*asked, self.slices(batch))

    def plan(self, tensors: Sequence[Tensor], layouts: tuple[Layout, Layout]) -> Exchange:
        """This rank's messages.

        Raises:
            ValueError: if the layouts do not allow it, or a tensor is not as they say.
        """
        group = self.group
        if self.is_compiled:
            self._check_promise(layouts)
        seq_len: Any = self.seq_len
        plan = exchange_of(*layouts, self.heads, group.rank(), group.size(), seq_len)
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
        """Heads that the tensors of this rank have before."""
        return self.local_heads(rank) if self.is_back else self.num_heads

    def heads_after(self, rank: int) -> Sequence[int]:
        """Heads that the tensors of this rank have in the end."""
        return self.num_heads if self.is_back else self.local_heads(rank)

    def local_heads(self, rank: int) -> list[int]:
        """Heads of a rank where heads are dealt."""
        shard = head_shard_of(rank % self.heads, self.heads, self.num_key_heads)
        return [length(shard.span(count, self.num_key_heads)) for count in self.num_heads]

    def tokens_after(self, rank: int, world_size: int) -> Any:
        """Tokens of this rank in the end, as a compiler may know them: from lengths alone."""
        if self.num_tokens is not None:
            return self.num_tokens
        seq_len: Any = self.seq_len
        if self.heads == world_size and not self.is_back:
            return seq_len  # without a look at it, which may be a symbol
        # Of runs that are written out, a layout of their name knows the usual lengths.
        spelled: Any = self.layout if self.is_back else self.to
        ranks = self._sharing(rank)
        return sum(as_layout(spelled).num_tokens(x, world_size, seq_len) for x in ranks)

    def _sharing(self, rank: int) -> range:
        """The ranks whose tokens a rank has in the end."""
        if self.is_back:
            return range(rank, rank + 1)
        first = rank // self.heads * self.heads
        return range(first, first + self.heads)

    def _check_promise(self, layouts: tuple[Layout, Layout]) -> None:
        """Refuse runs of other lengths than a compiler was told, which cannot look at them.

        Raises:
            ValueError: on every rank, whichever it is that has another length.
        """
        runs, size = self.dealt.runs if self.is_back else self.dealt.to_runs, self.group.size()
        if runs is None or self.num_tokens is not None:
            return
        layout, seq_len = layouts[0] if self.is_back else layouts[1], self.seq_len
        assert seq_len is not None, "it is known by now"
        for rank in range(0, size, len(self._sharing(0))):
            ranks, told = self._sharing(rank), self.tokens_after(rank, size)
            found = sum(layout.num_tokens(x, size, seq_len) for x in ranks)
            if found != told:
                raise ValueError(
                    f"runs give ranks {list(ranks)} {found} tokens together, but in compiled code "
                    f"each rank has as many as without runs, which is {told}: make runs of equal "
                    "lengths, trade tokens for heads over all ranks or over none, or leave this "
                    "uncompiled"
                )


_ARGUMENTS = Arguments(Trade, Dealt, Seen, Mask)
TRADE_SCHEMA = _ARGUMENTS.schema
"""Of the exchange op, after its tensors, in the order of `flatten_trade`."""


def flatten_trade(trade: Trade) -> tuple[Any, ...]:
    """The arguments of the exchange op after its tensors."""
    return _ARGUMENTS.flatten(trade)


def unflatten_trade(arguments: tuple[Any, ...]) -> Trade:
    """The exchange that `flatten_trade` made the arguments of."""
    return _ARGUMENTS.unflatten(arguments)
