"""Drops weights of attention by the positions of their query and key in the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtensor_ring.compute.lags import resident_positions
from dtensor_ring.compute.memory import Region, part_of, positions_of
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.layout import Run

# Constants of SplitMix64, as signed numbers.
STEP = 0x9E3779B97F4A7C15 - 2**64
FIRST, SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def draw_seed(device: torch.device) -> Tensor:
    """Return a seed from the random state of a device, int64, `()`; the host does not wait.

    Ranks that share a sequence get the same seed if their random states are the same.
    """
    return torch.randint(2**62, (), device=device)


def mixed(x: Tensor) -> Tensor:
    """Return a hash of each number: any 64 bits to any 64 bits, one to one.

    Args:
        x: int64, of any shape.
    """
    # A shift of a signed number copies its sign, which the masks remove.
    x = (x ^ ((x >> 30) & (2**34 - 1))) * FIRST
    x = (x ^ ((x >> 27) & (2**37 - 1))) * SECOND
    return x ^ ((x >> 31) & (2**33 - 1))


# Note [Counters]: a weight is dropped or kept by a hash of a seed and of the numbers of its batch
# row, head, query and key, each counted in the whole batch. So forward, backward and recomputation
# drop the same weights, with any layout and any number of ranks, and no mask is stored or sent. The
# hash is that of SplitMix64 (Steele et al., 2014, OOPSLA): `mixed(start + STEP * i)` is the number
# i of a sequence. A row of the batch is a number of a sequence, from which the sequence of its
# heads starts, and so on to queries. So each query starts another sequence, which numbers its keys.
def numbered(start: Tensor, index: Tensor) -> Tensor:
    """Return the number `index` of the sequence that begins at `start`, see Note [Counters]."""
    return mixed(start + STEP * index)


def dropout_factors(seed: Tensor, index: Tensor, rate: float, dtype: torch.dtype) -> Tensor:
    """Return the factors of tensor elements under dropout, 0 or `1 / (1 - rate)`.

    Args:
        seed: int64, `()`.
        index: a number for each element, int64, of any shape.
        rate: the probability of 0, less than 1.
        dtype: dtype of the result.
    """
    return _factors(numbered(seed, index), rate, dtype)


def _factors(hashes: Tensor, rate: float, dtype: torch.dtype) -> Tensor:
    # A hash is uniform over all signed numbers of 64 bits.
    kept = hashes >= int(rate * 2**64) - 2**63
    return kept.to(dtype) / (1 - rate)


def row_counters(seed: Tensor, shape: tuple[int, int], first: Sequence[int], at: Tensor) -> Tensor:
    """Return the starts of the sequences of queries, int64, `(B, N, L)`.

    Args:
        seed: int64, `()`.
        shape: numbers of batch rows and of heads.
        first: numbers of the first batch row and of the first head in the whole batch.
        at: positions of the queries, `(L,)`.
    """
    rows, heads = (
        torch.arange(begin, begin + size, device=at.device)
        for begin, size in zip(first, shape, strict=True)
    )
    of_heads = numbered(numbered(seed, rows).unsqueeze(1), heads)
    return numbered(of_heads.unsqueeze(2), at)


@dataclass(frozen=True, eq=False)
class Dropout:
    """The weights that a launch drops, before they are multiplied by values.

    Attributes:
        rate: the probability that a weight is dropped; the others are divided by `1 - rate`.
        rows: starts of the queries, int64: `(B, N, R)` of a tile, `(N, T)` of segments.
        cols: offsets of the keys, int64: `(C,)` of a tile, `(U,)` of segments.
    """

    rate: float
    rows: Tensor
    cols: Tensor

    def part(self, rows: slice, cols: slice) -> Dropout:
        """Return the dropout between some queries and some keys."""
        return Dropout(self.rate, self.rows[..., rows], self.cols[cols])

    def of_regions(self, rows: Region, cols: Region) -> Dropout:
        """Return the dropout between regions of queries and keys of the batch."""
        return Dropout(self.rate, part_of(self.rows, rows), self.cols[cols[2]])

    def flat(self) -> Dropout:
        """Return this for segments, which count tokens across the rows of the batch."""
        rows = self.rows.transpose(0, 1).flatten(1)
        return Dropout(self.rate, rows, self.cols.repeat(len(self.rows)))

    def factors(self, dtype: torch.dtype) -> Tensor:
        """Return the factor of each weight, 0 or `1 / (1 - rate)`.

        Args:
            dtype: dtype of the result, `(B, N, R, C)` of a tile, `(N, T, U)` of segments.
        """
        return _factors(mixed(self.rows.unsqueeze(-1) + self.cols), self.rate, dtype)


class ShardDropout:
    """The weights that this rank drops in one call, for all its queries.

    Args:
        rate: the probability that a weight is dropped.
        seed: int64, `()`, on the device of the queries.
        first: numbers of the first batch row and of the first head in the whole batch.
        query: local queries `(B, N, L, H)`.
        runs: the runs of these queries, see `Layout.runs`.
    """

    def __init__(
        self, rate: float, seed: Tensor, first: Sequence[int], query: Tensor, runs: Sequence[Run]
    ) -> None:
        batch, heads = query.shape[:2]
        at = positions_of(runs, query.device)
        self._rate, self._rows = rate, row_counters(seed, (batch, heads), first, at)

    def of_keys(self, runs: Sequence[Run], cols: Cols) -> Dropout:
        """Return the dropout between all queries and the resident columns of a shard.

        Args:
            runs: the runs of the whole shard.
            cols: its columns that are resident.
        """
        at = resident_positions(runs, cols, self._rows.device)
        return Dropout(self._rate, self._rows, STEP * at)
