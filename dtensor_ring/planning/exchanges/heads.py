"""Heads dealt to the ranks of a group, each of which works on all tokens of the group."""

from __future__ import annotations

from typing import NamedTuple

from dtensor_ring.planning.values.span import Span


class HeadShard(NamedTuple):
    """The heads of one rank: whole key heads with their query heads, or a part of one key head.

    Query heads stay with the key head that they see. Where a key head goes to several ranks, each
    has a copy of it, and its own part of the query heads.
    """

    begin: int
    """First key head."""
    end: int
    part: int = 0
    """Which part of the query heads of its one key head."""
    num_parts: int = 1

    def span(self, num_heads: int, num_key_heads: int) -> Span:
        """The heads of this shard in a tensor, which has some for each key head.

        Raises:
            ValueError: if they cannot be dealt so.

        >>> HeadShard(1, 2, part=0, num_parts=2).span(14, 2), HeadShard(1, 2, 0, 2).span(2, 2)
        ((7, 10), (1, 2))
        """
        if num_heads % num_key_heads:
            raise ValueError(
                f"{num_heads} heads cannot be dealt with {num_key_heads} key heads, of which that "
                "must be a multiple"
            )
        per_key_head = num_heads // num_key_heads
        begin, end = self.begin * per_key_head, self.end * per_key_head
        if self.num_parts == 1 or per_key_head == 1:  # the key head itself is copied
            return begin, end
        if per_key_head < self.num_parts:
            raise ValueError(
                f"{num_heads} heads of {num_key_heads} key heads cannot be dealt to ranks of which "
                f"{self.num_parts} have the same key head: each has to get a head"
            )
        first, last = (part * per_key_head // self.num_parts for part in (self.part, self.part + 1))
        return begin + first, begin + last

    def is_copied(self, num_heads: int, num_key_heads: int) -> bool:
        """Whether other ranks of the group have the same heads of a tensor."""
        return self.num_parts > 1 and num_heads == num_key_heads


def head_shard_of(member: int, num_ranks: int, num_key_heads: int) -> HeadShard:
    """The heads of a rank of a group, as even as whole key heads allow.

    The chunks of `shard_length` would leave the last ranks without heads where the number does not
    divide, and the first ones would have no fewer.

    Args:
        member: index of the rank in its group.
        num_ranks: ranks of the group.
        num_key_heads: that are dealt; if they are fewer than ranks, a key head goes to several.

    >>> [head_shard_of(member, 3, 4)[:2] for member in range(3)]
    [(0, 1), (1, 2), (2, 4)]
    >>> head_shard_of(1, 3, 2), head_shard_of(2, 3, 2)
    (HeadShard(begin=0, end=1, part=1, num_parts=2), HeadShard(begin=1, end=2, part=0, num_parts=1))
    """
    if num_key_heads >= num_ranks:
        begin, end = (i * num_key_heads // num_ranks for i in (member, member + 1))
        return HeadShard(begin, end)
    head = member * num_key_heads // num_ranks
    # Rounded up: the first rank whose key head is this one, and the first of the next one.
    first, end = (-(-i * num_ranks // num_key_heads) for i in (head, head + 1))
    return HeadShard(head, head + 1, member - first, end - first)
