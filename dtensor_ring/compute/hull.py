"""The part of a tensor that a launch of segments reads or writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dtensor_ring.compute.memory import Region
from dtensor_ring.planning.values.span import Span, length


@dataclass(frozen=True)
class Hull:
    """Batch rows, and tokens of each of them, which are one dimension to a kernel.

    Attributes:
        batches: first batch row, and the one after the last.
        tokens: first token, and the one after the last.
        batch_size: batch rows of the tensor.
    """

    batches: Span
    tokens: Span
    batch_size: int

    @property
    def region(self) -> Region:
        """As an index of `(B, N, L)`."""
        is_all = self.batches == (0, self.batch_size)
        rows = slice(None) if is_all else slice(*self.batches)
        return rows, slice(None), slice(*self.tokens)

    @property
    def num_tokens(self) -> int:
        """Of all its batch rows."""
        return length(self.batches) * length(self.tokens)

    def at(self, batch: int, token: int) -> int:
        """The place of a token among all of them."""
        return (batch - self.batches[0]) * length(self.tokens) + token - self.tokens[0]


def hull_of(spans: Sequence[tuple[int, Span]], batch_size: int, num_tokens: int) -> Hull:
    """From the first to the last of spans, which come with their batch rows, in their order.

    >>> hull_of([(1, (3, 4)), (1, (6, 9))], 2, 10).tokens
    (3, 9)
    >>> hull_of([(0, (3, 4)), (1, (6, 9))], 2, 10).tokens
    (0, 10)
    """
    (first, (start, _)), (last, (_, end)) = spans[0], spans[-1]
    # Tokens of several batch rows are one dimension without a copy only if they are all tokens.
    tokens = (start, end) if first == last else (0, num_tokens)
    return Hull((first, last + 1), tokens, batch_size)
