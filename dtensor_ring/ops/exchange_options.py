"""The options of the exchange op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from dtensor_ring.ops.arguments import Arguments
from dtensor_ring.ops.boundaries import run_table
from dtensor_ring.ops.options import Length, group_named
from dtensor_ring.planning.exchange import Exchange, exchange_of
from dtensor_ring.planning.heads import share_of
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.span import length
from dtensor_ring.planning.spelling import as_layout


class Dealt(NamedTuple):
    """Runs of a batch, whose layouts belong to it: before the exchange, and after it."""

    runs: Tensor | None = None
    to_runs: Tensor | None = None


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

    def plan(self, tensors: Sequence[Tensor], layouts: tuple[Layout, Layout]) -> Exchange:
        """This rank's messages.

        Raises:
            ValueError: if the layouts do not allow it, or a tensor is not as they say.
        """
        group = self.group
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
        share = share_of(rank % self.heads, self.heads, self.num_key_heads)
        return [length(share.span(count, self.num_key_heads)) for count in self.num_heads]

    def tokens_after(self, rank: int, world_size: int) -> Any:
        """Tokens of this rank in the end, as a compiler may know them: from lengths alone."""
        if self.num_tokens is not None:
            return self.num_tokens
        seq_len: Any = self.seq_len
        if self.heads == world_size and not self.is_back:
            return seq_len  # without a look at it, which may be a symbol
        # Of runs that are written out, a layout of their name knows the usual lengths.
        spelled: Any = self.layout if self.is_back else self.to
        first = rank if self.is_back else rank // self.heads * self.heads
        ranks = range(first, first + (1 if self.is_back else self.heads))
        return sum(as_layout(spelled).num_tokens(x, world_size, seq_len) for x in ranks)


_ARGUMENTS = Arguments(Trade, Dealt)
TRADE_SCHEMA = _ARGUMENTS.schema
"""Of the exchange op, after its tensors, in the order of `flatten_trade`."""


def flatten_trade(trade: Trade) -> tuple[Any, ...]:
    """The arguments of the exchange op after its tensors."""
    return _ARGUMENTS.flatten(trade)


def unflatten_trade(arguments: tuple[Any, ...]) -> Trade:
    """The exchange that `flatten_trade` made the arguments of."""
    return _ARGUMENTS.unflatten(arguments)
