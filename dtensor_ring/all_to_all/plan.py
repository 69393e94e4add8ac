"""Plans an all-to-all: the tokens and heads that each rank sends to each other rank.

Before it, each rank holds its tokens of a layout, with all heads. After it, `heads` consecutive
ranks form a group: each of them holds all tokens of the group, with a part of the heads. Tokens
are in the order of their positions on both sides. With groups of one rank only the layout changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.layout import Joined, Layout
from dtensor_ring.planning.lru import cached_bytes
from dtensor_ring.planning.ranges import Span
from dtensor_ring.planning.run_table import ShardTable, shard_table


class HeadShard(NamedTuple):
    """The heads of one rank: whole key heads with their query heads, or a part of one key head.

    Query heads stay with the key head that they see. Where a key head goes to several ranks, each
    has a copy of it, and its own part of the query heads.

    Attributes:
        begin, end: range of key heads.
        part: which part of the query heads this rank has, if it has one key head only.
        num_parts: number of ranks that share this key head.
    """

    begin: int
    end: int
    part: int = 0
    num_parts: int = 1

    def span(self, num_heads: int, num_key_heads: int) -> Span:
        """Return the heads of this shard in a tensor that has some for each key head.

        Raises:
            ValueError: if `num_heads` cannot be sharded this way.

        >>> HeadShard(1, 2, part=0, num_parts=2).span(14, 2), HeadShard(1, 2, 0, 2).span(2, 2)
        ((7, 10), (1, 2))
        """
        if num_heads % num_key_heads:
            raise ValueError(
                f"{num_heads} heads cannot be sharded with {num_key_heads} key heads, of which "
                "that must be a multiple"
            )
        per_key_head = num_heads // num_key_heads
        begin, end = self.begin * per_key_head, self.end * per_key_head
        if self.num_parts == 1 or per_key_head == 1:  # the key head itself is copied
            return begin, end
        if per_key_head < self.num_parts:
            raise ValueError(
                f"{num_heads} heads of {num_key_heads} key heads cannot be sharded over ranks of "
                f"which {self.num_parts} have the same key head: each has to get a head"
            )
        first, last = (part * per_key_head // self.num_parts for part in (self.part, self.part + 1))
        return begin + first, begin + last

    def is_copied(self, num_heads: int, num_key_heads: int) -> bool:
        """Return whether other ranks of the group have the same heads of a tensor."""
        return self.num_parts > 1 and num_heads == num_key_heads


def head_shard_of(member: int, num_ranks: int, num_key_heads: int) -> HeadShard:
    """Return the heads of a rank of a group, as even as whole key heads allow.

    The chunks of `shard_length` would leave the last ranks without heads where the number does not
    divide, while the first ranks would have no fewer.

    Args:
        member: index of the rank in its group.
        num_ranks: ranks of the group.
        num_key_heads: key heads of all ranks; if fewer than ranks, several ranks share one.

    >>> [head_shard_of(member, 3, 4)[:2] for member in range(3)]
    [(0, 1), (1, 2), (2, 4)]
    >>> head_shard_of(1, 3, 2), head_shard_of(2, 3, 2)
    (HeadShard(begin=0, end=1, part=1, num_parts=2), HeadShard(begin=1, end=2, part=0, num_parts=1))
    """
    if num_key_heads >= num_ranks:
        begin, end = (i * num_key_heads // num_ranks for i in (member, member + 1))
        return HeadShard(begin, end)
    # Two key heads and eight query heads over four ranks: a key head is copied to two ranks, each
    # with two of the four query heads that see it.
    #     rank         0     1     2     3
    #     key heads    0     0     1     1
    #     query heads  0 1   2 3   4 5   6 7
    head = member * num_key_heads // num_ranks
    # Rounded up: the first rank whose key head is this one, and the first of the next one.
    first, end = (-(-i * num_ranks // num_key_heads) for i in (head, head + 1))
    return HeadShard(head, head + 1, member - first, end - first)


class TokenSplit(NamedTuple):
    """Tokens sent to or received from a peer, as columns of this rank's tensor.

    It is like a split of `all_to_all_single`, but its tokens need not be contiguous.
    """

    peer: int
    cols: Cols


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class AllToAllPlan:
    """The messages of one rank; those to itself stay here.

    The k-th token that a rank sends is the k-th token that its peer receives. The reverse exchange
    swaps the two sides: it sends back what was received, and sums the copies of a key head that
    went to several ranks.

    Attributes:
        heads: number of ranks in a group.
        num_tokens: tokens of this rank before and after the exchange.
        sends, receives: tokens to each peer (with its heads), from each peer (with this rank's).
    """

    rank: int
    heads: int
    num_tokens: tuple[int, int]
    sends: tuple[TokenSplit, ...]
    receives: tuple[TokenSplit, ...]

    def head_shard(self, rank: int, num_key_heads: int) -> HeadShard:
        """Return the heads of any rank after the exchange."""
        return head_shard_of(rank % self.heads, self.heads, num_key_heads)

    @property
    def num_bytes(self) -> int:
        """Estimated memory of the messages and of the indices made from them, in bytes."""
        # Members of a group get the same tokens, and share one object: it counts once.
        cols = {id(x.cols): x.cols for x in self.sends + self.receives}.values()
        num_indices = sum(len(x) for x in cols if len(x.spans) > 1)
        return 1000 + 150 * sum(len(x.spans) for x in cols) + 16 * num_indices


@cached_bytes(2**26, lambda plan: plan.num_bytes)
def all_to_all_plan(
    layout: Layout, to: Layout, heads: int, rank: int, world_size: int, seq_len: int
) -> AllToAllPlan:
    """Return the exchange of one rank, from a cache of 64 MiB.

    The time grows with the number of runs of all ranks (of tokens, if runs have gaps).

    Args:
        layout: how tokens are sharded before the exchange.
        to: how tokens are sharded to the groups after the exchange.
        heads: number of consecutive ranks that form a group and share the heads.
        rank: this rank's index on the axis.
        world_size: ranks on the axis.
        seq_len: global length, in tokens.

    Raises:
        ValueError: if a layout cannot shard the length, or groups do not divide the axis.
    """
    if not 1 <= heads <= world_size or world_size % heads:
        fitting = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise ValueError(
            f"heads must be a number of ranks that divides the {world_size} of the axis, got "
            f"{heads}; these do: {fitting}"
        )
    # A group of `heads` ranks holds the tokens of all of them, and each rank some of the heads.
    joined = to if heads == 1 else Joined(to, heads)
    cells = _cells(
        shard_table(layout, world_size, seq_len),
        shard_table(joined, world_size // heads, seq_len),
        seq_len,
    )
    mine, ours = cells.owners == rank, cells.groups == rank // heads
    to_groups = _splits(cells.groups, cells.lengths, mine)
    # Every member of a group gets the same tokens, of other heads.
    sends = [
        split._replace(peer=split.peer * heads + member)
        for split in to_groups
        for member in range(heads)
    ]
    receives = _splits(cells.owners, cells.lengths, ours)
    num_tokens = int(cells.lengths[mine].sum()), int(cells.lengths[ours].sum())
    return AllToAllPlan(rank, heads, num_tokens, tuple(sends), tuple(receives))


class _Cells(NamedTuple):
    """Consecutive positions that stay together, with their rank before and their group after."""

    lengths: np.ndarray
    owners: np.ndarray
    groups: np.ndarray


def _cells(before: ShardTable, after: ShardTable, seq_len: int) -> _Cells:
    """Cut positions wherever a run of either side begins.

    Raises:
        ValueError: if the sides begin at different positions, which runs written out may do.
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


def _runs(sharding: ShardTable) -> tuple[np.ndarray, np.ndarray]:
    """Return first position and owner of each run; a run lasts until the next one begins."""
    if sharding.stride == 1:
        return sharding.starts, sharding.owners
    # Strided runs of several ranks interleave: here each token is a run by itself.
    counts = sharding.lengths
    steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    positions = np.repeat(sharding.starts, counts) + steps * sharding.stride
    order = np.argsort(positions)
    return positions[order], np.repeat(sharding.owners, counts)[order]


def _splits(peers: np.ndarray, lengths: np.ndarray, own: np.ndarray) -> list[TokenSplit]:
    """Split the tokens of this rank by peer; its cells lie side by side in its tensor.

    Args:
        peers: rank or group that holds each cell on the other side.
        lengths: tokens of each cell.
        own: mask of the cells that this rank holds.
    """
    peers, ends = peers[own], np.cumsum(lengths[own])
    firsts = ends - lengths[own]
    result = []
    for peer in np.unique(peers).tolist():
        at = peers == peer
        begins, stops = firsts[at], ends[at]
        # Cells that touch in the tensor are copied as one.
        touches = begins[1:] == stops[:-1]
        result.append(TokenSplit(peer, Cols(_joined(begins, stops, touches))))
    return result


def _joined(begins: np.ndarray, stops: np.ndarray, touches: np.ndarray) -> tuple[Span, ...]:
    """Return cells as spans; a cell that touches the next one shares its span."""
    is_new, is_last = np.append(True, ~touches), np.append(~touches, True)
    return tuple(zip(begins[is_new].tolist(), stops[is_last].tolist(), strict=True))
