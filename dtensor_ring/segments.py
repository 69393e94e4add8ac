"""Many tiles of a step in one launch, for kernels that take segments of different lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from dtensor_ring.mask import Mask
from dtensor_ring.plan import Step
from dtensor_ring.tile import CAUSAL, FULL, Tile, length

FEWEST = 3
"""Tiles worth one launch of segments, whose results are merged as a whole."""


@dataclass(frozen=True, eq=False)
class Segments:
    """Tiles of one mask, one behind the other on both sides.

    `rows` and `cols` are boundaries, as many of each: of the queries, and of the keys that they
    see. They cover all tokens of all batch rows: queries that see nothing are a segment without
    keys, keys that nobody sees one without queries. The mask is that of every tile; where it is
    neither full nor causal, all are square.
    """

    rows: tuple[int, ...]
    cols: tuple[int, ...]
    mask: Mask

    @cached_property
    def max_rows(self) -> int:
        """Queries of the longest segment."""
        return max(end - start for start, end in pairwise(self.rows))

    @cached_property
    def max_cols(self) -> int:
        """Keys of the longest segment."""
        return max(end - start for start, end in pairwise(self.cols))

    @cached_property
    def has_blind_rows(self) -> bool:
        """Whether there are queries that see nothing."""
        pairs = zip(pairwise(self.rows), pairwise(self.cols), strict=True)
        return any(length(rows) and not length(cols) for rows, cols in pairs)

    def boundaries(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`rows` and `cols`, int32 on the device; copied once, and there when this returns.

        They live as long as this object, which `launches` keeps for a while: a CUDA graph that
        captured them may outlive them.
        """
        if device not in self._copies:
            self._copies[device] = _copied((self.rows, self.cols), device)
        copies = self._copies[device]
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            for ends in copies:  # their memory is of another stream, and may not go back too early
                ends.record_stream(torch.cuda.current_stream(device))
        return copies

    @cached_property
    def _copies(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}

    def tiles(self) -> Iterator[tuple[slice, slice]]:
        """The queries and the keys of each segment that has both."""
        for rows, cols in zip(pairwise(self.rows), pairwise(self.cols), strict=True):
            if length(rows) and length(cols):
                yield slice(*rows), slice(*cols)


@lru_cache(maxsize=512)
def launches(
    step: Step, batch_size: int, num_rows: int, num_cols: int
) -> tuple[Tile | Segments, ...]:
    """The tiles of a step, as many of them as possible in one launch.

    Tiles of one mask go together that lie one behind the other in queries and in keys, as those of
    packed documents do.
    """
    chains: list[_Chain] = []
    for tile, batch in _by_batch(step.tiles, batch_size):
        chain = next((x for x in chains if x.takes(tile, batch)), None)
        if chain is None:
            chain = _Chain(tile.mask)
            chains.append(chain)
        chain.links.append((batch, tile))
    result: list[Tile | Segments] = []
    for chain in chains:
        tiles = chain.tiles(batch_size)
        joined = len(tiles) >= FEWEST
        result += [chain.segments(batch_size, num_rows, num_cols)] if joined else tiles
    return tuple(result)


@dataclass
class _Chain:
    """Tiles of one mask, by batch row, each behind the one before."""

    mask: Mask
    links: list[tuple[int, Tile]] = field(default_factory=list)

    def takes(self, tile: Tile, batch: int) -> bool:
        """Whether the tile may be the next."""
        last_batch, last = self.links[-1]
        are_square = all(length(x.rows) == length(x.cols) for x in (last, tile))
        if tile.mask != self.mask or not (are_square or self.mask in (FULL, CAUSAL)):
            return False
        is_behind = tile.rows[0] >= last.rows[1] and tile.cols[0] >= last.cols[1]
        return batch > last_batch or (batch == last_batch and is_behind)

    def tiles(self, batch_size: int) -> list[Tile]:
        """Each by itself; those of all batch rows once."""
        counts = Counter(tile for _, tile in self.links)
        links = [(None if counts[x] == batch_size else batch, x) for batch, x in self.links]
        return list(dict.fromkeys(replace(tile, batch=batch) for batch, tile in links))

    def segments(self, batch_size: int, num_rows: int, num_cols: int) -> Segments:
        """All of them, and what lies between them."""
        rows, cols = [0], [0]
        for batch, tile in self.links:
            _skip(rows, cols, batch * num_rows + tile.rows[0], batch * num_cols + tile.cols[0])
            rows.append(batch * num_rows + tile.rows[1])
            cols.append(batch * num_cols + tile.cols[1])
        _skip(rows, cols, batch_size * num_rows, batch_size * num_cols)
        return Segments(tuple(rows), tuple(cols), self.mask)


def _skip(rows: list[int], cols: list[int], row: int, col: int) -> None:
    """Segments without keys, and without queries, up to there."""
    for ends, end, others in ((rows, row, cols), (cols, col, rows)):
        if ends[-1] < end:
            ends.append(end)
            others.append(others[-1])


def _by_batch(tiles: tuple[Tile, ...], batch_size: int) -> Iterator[tuple[Tile, int]]:
    """The tiles of each batch row, in its order."""
    for batch in range(batch_size):
        yield from ((tile, batch) for tile in tiles if tile.batch in (None, batch))


def _copied(
    boundaries: tuple[tuple[int, ...], tuple[int, ...]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """On a stream of their own, so that waiting for them is not waiting for what is computed."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.inference_mode(False), torch.cuda.stream(stream):
        on_host = [torch.tensor(ends, dtype=torch.int32, device="cpu") for ends in boundaries]
        rows, cols = (ends.to(device) for ends in on_host)
    return rows, cols
