"""Boundaries of many tiles, for kernels that take segments of different lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

import torch
from torch import Tensor

from dtensor_ring.planning.span import length


@dataclass(frozen=True, eq=False)
class Segments:
    """Boundaries of tiles, one after the other on both sides.

    They cover all tokens of all batch rows. Queries that see nothing are a segment without keys,
    and keys that nobody sees are one without queries.

    Attributes:
        rows: boundaries of the queries, ascending from 0 to their number.
        cols: boundaries of the keys that they see; both have one entry more than segments.
    """

    rows: tuple[int, ...]
    cols: tuple[int, ...]

    @cached_property
    def max_rows(self) -> int:
        """Queries of the longest segment."""
        return max(end - start for start, end in pairwise(self.rows))

    @cached_property
    def max_cols(self) -> int:
        """Keys of the longest segment."""
        return max(end - start for start, end in pairwise(self.cols))

    @cached_property
    def has_empty_rows(self) -> bool:
        """Whether there are rows without keys."""
        pairs = zip(pairwise(self.rows), pairwise(self.cols), strict=True)
        return any(length(rows) and not length(cols) for rows, cols in pairs)

    def boundaries(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """`rows` and `cols` as int32 tensors on the device, copied there once.

        They live as long as this object, which lives as long as its plan. A CUDA graph that
        captured them may outlive them.
        """
        # All layers ask, and a copy makes the host wait: one for each device.
        if device not in self._copies:
            self._copies[device] = _copied((self.rows, self.cols), device)
        copies = self._copies[device]
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            # Another stream allocated them: it must not reuse the memory while this one reads it.
            for ends in copies:
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


def _copied(
    boundaries: tuple[tuple[int, ...], tuple[int, ...]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """The boundaries on the device, complete when this returns."""
    # The host waits for these copies; on a side stream it does not wait for queued kernels as well.
    stream = _side_stream(device) if device.type == "cuda" else None
    with torch.inference_mode(False), torch.cuda.stream(stream):
        # Not in inference mode: tensors made there cannot be saved for a backward pass.
        on_host = [torch.tensor(ends, dtype=torch.int32, device="cpu") for ends in boundaries]
        rows, cols = (ends.to(device) for ends in on_host)
    return rows, cols


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of a device that boundaries are copied on."""
    return torch.cuda.Stream(device)
