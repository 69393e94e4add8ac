"""Positions of queries and keys, and the bias that a query has for keys by their distance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dtensor_ring.compute.memory import Region, positions_of
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.layout import Run


def resident_positions(runs: Sequence[Run], cols: Cols, device: torch.device) -> Tensor:
    """Return the positions of the resident columns of a shard, int64, `(C,)`.

    Args:
        runs: the runs of the whole shard.
        cols: its columns that are resident.
        device: the device of the result.
    """
    at = positions_of(runs, device)
    resident = [at[begin:end] for begin, end in cols.spans]
    return torch.cat(resident or [at[:0]])


def is_biased(query: Tensor, key: Tensor) -> bool:
    """Return whether queries have a bias by distance beside the head dim of keys."""
    return query.shape[3] > key.shape[3]


# Note [A bias by distance]: it is a table of the queries, `(B, N, L, E)`: number d of a query is
# added to its score of the key d positions before. A table may depend on the content of the query
# (Shaw et al., 2018, arXiv 1803.02155), or be the same for all. It is sharded with the queries, so
# nothing travels for it: it is carried as E further columns of the query, and gets its gradient
# with that of the query.
class Lags(NamedTuple):
    """Positions of some queries and of some keys, int64.

    Attributes:
        rows: those of the queries, `(R,)`.
        cols: those of the keys, `(C,)`.
    """

    rows: Tensor
    cols: Tensor

    def part(self, rows: slice, cols: slice) -> Lags:
        """Return the positions of some queries and some keys of these."""
        return Lags(self.rows[rows], self.cols[cols])

    def of_regions(self, rows: Region, cols: Region) -> Lags:
        """Return the positions in regions of queries and keys `(B, N, L)`."""
        return self.part(rows[2], cols[2])

    def bias(self, table: Tensor) -> Tensor:
        """Return the bias of each score, `(..., R, C)`.

        Args:
            table: a bias for each distance, `(..., R, E)`.

        Example:
            >>> lags = Lags(torch.tensor([3]), torch.arange(5))
            >>> lags.bias(torch.tensor([[1.0, 2.0]]))
            tensor([[0., 0., 2., 1., 0.]])
        """
        index, outside = self._places(table.shape[-1])
        index = index.expand((*table.shape[:-1], -1))
        return table.gather(-1, index).masked_fill(outside, 0.0)

    def gradient(self, grad_scores: Tensor, extent: int) -> Tensor:
        """Return the gradient of the table, `(..., R, E)`, from that of the scores, `(..., R, C)`.

        Args:
            grad_scores: the gradient of each score.
            extent: the number of distances, E.
        """
        index, outside = self._places(extent)
        # No two keys of a query are at one distance: only those outside share a place, the last.
        index = index.masked_fill(outside, extent).expand_as(grad_scores)
        table = grad_scores.new_zeros((*grad_scores.shape[:-1], extent + 1))
        return table.scatter_(-1, index, grad_scores)[..., :extent]

    def _places(self, extent: int) -> tuple[Tensor, Tensor]:
        """Return each pair's place in a table, `(R, C)`, and where it has none."""
        lag = self.rows.unsqueeze(-1) - self.cols
        return lag.clamp(0, extent - 1), (lag < 0) | (lag >= extent)
