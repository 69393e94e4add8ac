"""Launches whose documents change, see Note [Changing documents]: their boundaries are replaced."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from dtensor_ring.compute.capture import RUN_ONCE, keep_captured, refuse_capture
from dtensor_ring.compute.kernels.kernel import Launch, Segments
from dtensor_ring.compute.memory import region
from dtensor_ring.planning.changing import ChangingDocuments
from dtensor_ring.planning.plan import Step
from dtensor_ring.planning.ranges import length


class ChangingSegments(Segments):
    """Segments of a tile whose boundaries on a device are replaced when the documents are.

    What the host may ask during a capture is the same for all documents.

    Args:
        documents: the documents.
        queries: positions of the tile's queries.
        keys: positions of its keys.
        device: the device of the launches.
    """

    def __init__(
        self,
        documents: ChangingDocuments,
        queries: np.ndarray,
        keys: np.ndarray,
        device: torch.device,
    ) -> None:
        self.max_rows, self.max_cols = len(queries), len(keys)
        self.has_empty_rows = self.has_empty_cols = True
        self._documents, self._sides, self._device = documents, (queries, keys), device
        self._made: tuple[Tensor, Tensor] | None = None
        documents.watch(self._refill)

    @property
    def _now(self) -> tuple[np.ndarray, np.ndarray]:
        queries, keys = self._sides
        return self._documents.segments(queries, keys)

    def _host(self, side: int) -> tuple[int, ...]:
        refuse_capture(
            self._device,
            "the host reads documents that change",
            "take a kernel that reads boundaries on the GPU, such as kernel='cuda_flash'",
        )
        return tuple(self._now[side].tolist())

    @property
    def rows(self) -> tuple[int, ...]:  # type: ignore[override]
        """The present boundaries of the queries."""
        return self._host(0)

    @property
    def cols(self) -> tuple[int, ...]:  # type: ignore[override]
        """The present boundaries of the keys."""
        return self._host(1)

    def boundaries(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return both as int32 tensors, whose memory stays the same."""
        if self._made is None:
            refuse_capture(device, "documents that change are not on the GPU yet", RUN_ONCE)
            with torch.inference_mode(False):
                rows, cols = (torch.from_numpy(x).int().to(device) for x in self._now)
            self._made = rows, cols
        if not keep_captured(device, self._made) and device.type == "cuda":
            for x in self._made:
                x.record_stream(torch.cuda.current_stream(device))
        return self._made

    def _refill(self) -> None:
        """Replace the boundaries, after all launches of the current stream."""
        for target, numbers in zip(self._made or (), self._now, strict=False):
            source = torch.from_numpy(numbers.astype(np.int32))
            target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)


def changing_launches(
    step: Step, batch_size: int, device: torch.device, has_segments: bool, in_flight: bool
) -> tuple[Launch, ...]:
    """Return the launches of a step whose documents change: one for each tile and batch row.

    A kernel without segments gets the present documents one by one, and cannot be captured.

    Raises:
        ValueError: if a tile has no such segments, see `Changing.sides`.
    """
    key = "changing", batch_size, device, in_flight
    if key not in step.kept:
        step.kept[key] = tuple(_made(step, batch_size, device, in_flight))
    found: tuple[Launch, ...] = step.kept[key]
    return found if has_segments else tuple(x for launch in found for x in _singles(launch))


def _made(step: Step, batch_size: int, device: torch.device, in_flight: bool) -> Iterator[Launch]:
    assert step.changing is not None, "the caller has asked"
    for tile in step.tiles:
        documents = step.changing.documents
        queries, keys = step.changing.sides(step, tile)
        segments = ChangingSegments(documents, queries, keys, device)
        # Segments of several batch rows would have to cover all tokens of each.
        for batch in range(batch_size):
            rows, cols = region(batch, tile.rows), region(batch, tile.cols)
            yield Launch(rows, cols, tile.mask, segments, in_flight)


def _singles(launch: Launch) -> Iterator[Launch]:
    """Yield the tiles of the present documents."""
    assert launch.segments is not None, "launches of changing documents have segments"
    (batch, _, rows), (_, _, cols) = launch.rows, launch.cols
    pairs = zip(pairwise(launch.segments.rows), pairwise(launch.segments.cols), strict=True)
    for own, other in pairs:
        if length(own) and length(other):
            both = [
                (batch, slice(None), slice(side.start + span[0], side.start + span[1]))
                for side, span in ((rows, own), (cols, other))
            ]
            yield Launch(both[0], both[1], launch.mask, in_flight=launch.in_flight)
