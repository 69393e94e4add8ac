"""Ranges of indices or positions."""

from __future__ import annotations

Span = tuple[int, int]
"""A half-open range of indices."""

NOTHING: Span = (0, 0)


def length(span: Span) -> int:
    """Indices in a span."""
    return span[1] - span[0]


def moved(span: Span, by: int) -> Span:
    """The span, moved by that many indices."""
    return span[0] + by, span[1] + by
