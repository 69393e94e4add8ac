"""Where a chain of segments is cut, so that one long one does not make work for many short ones.

Flash attention 2, and the backward of 3, start as many blocks for each segment as the longest one
needs. A block without rows ends at once, but thousands of them take longer than another launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtensor_ring.planning.values.span import Span

BLOCK = 128
"""Tokens of a block."""

LAUNCH = 512
"""Blocks of one head that take as long as a launch: with 32 heads about 10 us, an estimate."""


@dataclass(frozen=True, slots=True)
class Group:
    """Segments of one launch: which links they come from, how many they are, and the longest.

    Attributes:
        span: of the links.
        num_segments: those of links and of gaps between them.
        longest: blocks of the longest segment.
    """

    span: Span
    num_segments: int
    longest: int

    @property
    def cost(self) -> int:
        """In blocks of one head."""
        return LAUNCH + self.num_segments * self.longest

    def joined(self, other: Group, gap: tuple[int, int]) -> Group:
        """With the group after it, and the gap between them: its segments, and its blocks."""
        return Group(
            (self.span[0], other.span[1]),
            self.num_segments + gap[0] + other.num_segments,
            max(self.longest, gap[1], other.longest),
        )


def num_blocks(num_tokens: int) -> int:
    """Blocks of so many tokens."""
    return -(-num_tokens // BLOCK)


def cut(links: Sequence[int], gaps: Sequence[tuple[int, int]]) -> list[Span]:
    """Ranges of links that are a launch each.

    Args:
        links: blocks of each segment.
        gaps: after each link but the last, the segments that lie in between, and blocks of the
            longest of them.

    >>> cut([32] + [1] * 100 + [40], [(0, 0)] * 101)
    [(0, 1), (1, 101), (101, 102)]
    """
    groups = [Group((i, i + 1), 1, longest) for i, longest in enumerate(links)]
    level, most = 1, max((*links, *(longest for _, longest in gaps)), default=0)
    # Short ones first: each of them alone would rather join a long one than be a launch.
    while level < 2 * most:
        groups = _joined(groups, gaps, level)
        level *= 2
    return [group.span for group in groups]


def _joined(groups: list[Group], gaps: Sequence[tuple[int, int]], level: int) -> list[Group]:
    """Neighbours are joined where that takes fewer blocks, and none has more than `level`."""
    found: list[Group] = []
    for group in groups:
        while found:
            candidate = found[-1].joined(group, gaps[group.span[0] - 1])
            if candidate.longest > level or candidate.cost > found[-1].cost + group.cost:
                break
            found.pop()
            group = candidate
        found.append(group)
    return found
