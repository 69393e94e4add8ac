"""Which queries of a batch read together, and where their results go."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from dtensor_ring.compute.accumulate import RunningOutput
from dtensor_ring.compute.memory import Numbers, columns, region
from dtensor_ring.planning.ranges import Span


class QueryRows(ABC):
    """The queries of one launch among all queries `(B, N, M, H)`."""

    @abstractmethod
    def select(self, query: Tensor) -> Tensor:
        """Return these queries, `(E, N, R, H)`."""

    @abstractmethod
    def add_to(self, running: RunningOutput, out: Tensor, lse: Tensor) -> None:
        """Merge results `(E, N, R, Hv)` and `(E, N, R)` of these queries into those of all."""


class BatchRows(QueryRows):
    """Some rows of a batch, and a range of queries that is the same in each of them.

    Args:
        rows: the batch rows, ascending.
        queries: the range of queries.
        batch: the number of all batch rows.
    """

    def __init__(self, rows: np.ndarray, queries: Span, batch: int) -> None:
        self._queries, self._batch = queries, batch
        # `rows` has no duplicates: with the length of the batch, it selects every row.
        self._index = None if len(rows) == batch else Numbers(torch.int64, torch.from_numpy(rows))

    def select(self, query: Tensor) -> Tensor:
        query = columns(query, self._queries)
        return query if self._index is None else query[self._index.on(query.device)[0]]

    def add_to(self, running: RunningOutput, out: Tensor, lse: Tensor) -> None:
        if self._index is not None:
            (index,) = self._index.on(out.device)
            shape = self._batch, *lse.shape[1:]
            # One copy to all rows: a merge for each row would be a launch for each.
            out = out.new_zeros((*shape, out.shape[3])).index_copy_(0, index, out)
            lse = lse.new_full(shape, -torch.inf).index_copy_(0, index, lse)
        running.make_room()
        running.add(region(None, self._queries), out, lse)


class TokenRows(QueryRows):
    """The last tokens of some sequences, of a batch in which each token is a row `(T, N, 1, H)`.

    Queries of a sequence read its keys together. Sequences with fewer tokens than others are padded
    with their last query, whose results nobody gets.

    Args:
        sequences: the numbers of the sequences, ascending, `(E,)`.
        counts: the number of last tokens of all sequences, `(B,)`, whose sum is T.
    """

    def __init__(self, sequences: np.ndarray, counts: np.ndarray) -> None:
        self._total, most = int(counts.sum()), int(counts.max())
        firsts, counts = (np.cumsum(counts) - counts)[sequences], counts[sequences]
        numbers = np.arange(most)
        # Rows of fewer tokens repeat their last one; `kept` leaves these out of the result.
        tokens = firsts[:, None] + np.minimum(numbers, counts[:, None] - 1)
        (kept,) = (numbers < counts[:, None]).ravel().nonzero()
        self._index = Numbers(
            torch.int64,
            torch.from_numpy(tokens),
            torch.from_numpy(kept),
            torch.from_numpy(tokens.ravel()[kept]),
        )
        self._is_all = len(kept) == self._total

    def select(self, query: Tensor) -> Tensor:
        tokens, _, _ = self._index.on(query.device)
        return query.squeeze(2)[tokens].transpose(1, 2)

    def add_to(self, running: RunningOutput, out: Tensor, lse: Tensor) -> None:
        _, kept, rows = self._index.on(out.device)
        out, lse = (x.transpose(1, 2).flatten(0, 1)[kept].unsqueeze(2) for x in (out, lse))
        if not self._is_all:
            # Tokens without a row here add nothing: zeros with an lse of minus infinity.
            shape = self._total, *lse.shape[1:]
            out = out.new_zeros((*shape, out.shape[3])).index_copy_(0, rows, out)
            lse = lse.new_full(shape, -torch.inf).index_copy_(0, rows, lse)
        running.make_room()
        running.add(region(None, (0, 1)), out, lse)
