"""Which tokens and heads each rank sends to which, so that tokens are dealt in another way.

On the one side each rank has the tokens that a layout deals to it, with all heads. On the other
side `heads` consecutive ranks are a group, which has the tokens that a layout deals to all of them:
each rank of it has all of these, with a part of the heads. Tokens are in the order of their
positions on both sides. A group of one rank has all heads: then only the layout changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dtensor_ring.planning.exchanges.heads import HeadShard, head_shard_of
from dtensor_ring.planning.layouts.dealing import Dealing, deal
from dtensor_ring.planning.layouts.joined import Joined
from dtensor_ring.planning.layouts.layout import Layout
from dtensor_ring.planning.routes.columns import Cols
from dtensor_ring.planning.values.cache import cached_bytes
from dtensor_ring.planning.values.span import Span, length


class TokenSplit(NamedTuple):
    """Tokens that go to a rank or come from it, as they are counted in the tensor of this rank.

    As the splits of `all_to_all_single`, but tokens of a rank need not lie side by side.
    """

    peer: int
    cols: Cols


class Amount(NamedTuple):
    """What a message has of a tensor."""

    tokens: int
    heads: int


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Exchange:
    """The messages of one rank; those to itself stay here.

    The k-th token that a rank sends is the k-th token that its peer receives.
    The way back swaps the two sides: what was received is sent to where it came from, and copies of
    a key head, which went to several ranks, are summed.
    """

    rank: int
    heads: int
    """Ranks of a group."""
    num_tokens: tuple[int, int]
    """Of this rank: before, and after."""
    sends: tuple[TokenSplit, ...]
    """With the heads of the peer."""
    receives: tuple[TokenSplit, ...]
    """With the heads of this rank."""

    def head_shard(self, rank: int, num_key_heads: int) -> HeadShard:
        """The heads of any rank, after the exchange."""
        return head_shard_of(rank % self.heads, self.heads, num_key_heads)

    def sent(self, num_heads: int, num_key_heads: int) -> dict[int, Amount]:
        """What leaves this rank of a tensor with so many heads, by peer.

        On the way back it comes.
        """
        return {
            x.peer: _amount(x, self.head_shard(x.peer, num_key_heads).span(*heads))
            for heads in [(num_heads, num_key_heads)]
            for x in self.sends
            if x.peer != self.rank
        }

    def received(self, num_heads: int, num_key_heads: int) -> dict[int, Amount]:
        """What comes to this rank of a tensor with so many heads, by peer.

        On the way back it leaves.
        """
        own = self.head_shard(self.rank, num_key_heads).span(num_heads, num_key_heads)
        return {x.peer: _amount(x, own) for x in self.receives if x.peer != self.rank}

    @property
    def num_bytes(self) -> int:
        """Memory of the messages and of the indices made of them, in bytes, an estimate."""
        cols = {id(x.cols): x.cols for x in self.sends + self.receives}.values()
        num_indices = sum(len(x) for x in cols if len(x.spans) > 1)
        return 1000 + 150 * sum(len(x.spans) for x in cols) + 16 * num_indices


def _amount(split: TokenSplit, heads: Span) -> Amount:
    return Amount(len(split.cols), length(heads))


@cached_bytes(2**26, lambda exchange: exchange.num_bytes)
def exchange_of(
    layout: Layout, to: Layout, heads: int, rank: int, world_size: int, seq_len: int
) -> Exchange:
    """The exchange of one rank; 64 MiB are kept.

    It takes time in proportion to the runs of all ranks (to the tokens, if runs have gaps).

    Args:
        layout: that deals the tokens before.
        to: that deals them to the groups after it.
        heads: consecutive ranks of a group, which share the heads.
        rank: this rank's index on the axis.
        world_size: ranks on the axis.
        seq_len: global length, in tokens.

    Raises:
        ValueError: if a layout cannot deal the length, or groups do not divide the axis.
    """
    if not 1 <= heads <= world_size or world_size % heads:
        fitting = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise ValueError(
            f"heads must be a number of ranks that divides the {world_size} of the axis, got "
            f"{heads}; these do: {fitting}"
        )
    joined = to if heads == 1 else Joined(to, heads)
    cells = _cells(
        deal(layout, world_size, seq_len), deal(joined, world_size // heads, seq_len), seq_len
    )
    mine, ours = cells.owners == rank, cells.groups == rank // heads
    to_groups = _splits(cells.groups, cells.lengths, mine)
    sends = [
        split._replace(peer=split.peer * heads + member)
        for split in to_groups
        for member in range(heads)
    ]
    receives = _splits(cells.owners, cells.lengths, ours)
    num_tokens = int(cells.lengths[mine].sum()), int(cells.lengths[ours].sum())
    return Exchange(rank, heads, num_tokens, tuple(sends), tuple(receives))


class _Cells(NamedTuple):
    """Neighbouring positions that stay together: arrays, in the order of positions."""

    lengths: np.ndarray
    owners: np.ndarray
    """The rank that has them before."""
    groups: np.ndarray
    """The group that has them after."""


def _cells(before: Dealing, after: Dealing, seq_len: int) -> _Cells:
    """Cut positions wherever a run of either side begins.

    Raises:
        ValueError: if the sides begin at different positions, as those of runs may.
    """
    (starts, owners), (other_starts, groups) = _runs(before), _runs(after)
    if starts[:1].tolist() != other_starts[:1].tolist():
        raise ValueError(
            "tokens can be exchanged for the same ones only, but the layouts begin at position "
            f"{starts[:1].tolist()} and {other_starts[:1].tolist()}: runs must hold all of them"
        )
    bounds = np.union1d(starts, other_starts)
    # The run of each side that a cell is in is the last one that begins no later.
    here, there = (np.searchsorted(x, bounds, "right") - 1 for x in (starts, other_starts))
    return _Cells(np.diff(bounds, append=seq_len), owners[here], groups[there])


def _runs(dealing: Dealing) -> tuple[np.ndarray, np.ndarray]:
    """First position and owner of all runs, where each lasts until the next; without gaps."""
    if dealing.stride == 1:
        return dealing.starts, dealing.owners
    counts = dealing.lengths
    steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    positions = np.repeat(dealing.starts, counts) + steps * dealing.stride
    order = np.argsort(positions)
    return positions[order], np.repeat(dealing.owners, counts)[order]


def _splits(peers: np.ndarray, lengths: np.ndarray, own: np.ndarray) -> list[TokenSplit]:
    """The tokens of each peer, of cells that lie side by side in a tensor.

    Args:
        peers: of each cell, the rank or the group that has it on the other side.
        lengths: of the cells, in tokens.
        own: which of them this rank has.
    """
    peers, ends = peers[own], np.cumsum(lengths[own])
    firsts = ends - lengths[own]
    result = []
    for peer in np.unique(peers).tolist():
        at = peers == peer
        begins, stops = firsts[at], ends[at]
        touches = begins[1:] == stops[:-1]
        result.append(TokenSplit(peer, Cols(_joined(begins, stops, touches))))
    return result


def _joined(begins: np.ndarray, stops: np.ndarray, touches: np.ndarray) -> tuple[Span, ...]:
    """Cells as spans, those that touch the next one with it."""
    is_new, is_last = np.append(True, ~touches), np.append(~touches, True)
    return tuple(zip(begins[is_new].tolist(), stops[is_last].tolist(), strict=True))
