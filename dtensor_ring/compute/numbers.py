"""Integers of a plan as tensors on the devices where kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor


class Numbers:
    """One or more lists of integers, copied to each device once.

    The tensors live as long as this object, which should live as long as its plan; for ever if a
    CUDA graph captured them, see `_CAPTURED`.

    >>> Numbers(torch.int32, (0, 3, 5)).on(torch.device("cpu"))
    (tensor([0, 3, 5], dtype=torch.int32),)
    """

    def __init__(self, dtype: torch.dtype, *lists: Sequence[int] | Tensor) -> None:
        self._dtype, self._lists = dtype, lists
        self._copies: dict[torch.device, tuple[Tensor, ...]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """A tensor of each list on the device."""
        is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        # All layers ask, and a copy makes the host wait: one for each device.
        if device not in self._copies:
            if is_captured:
                raise RuntimeError(NOT_THERE)
            self._copies[device] = self._copied(device)
        copies = self._copies[device]
        if is_captured:
            _CAPTURED.update(copies)
        elif device.type == "cuda":
            # Another stream allocated them: it must not reuse the memory while this one reads it.
            copies[0].record_stream(torch.cuda.current_stream(device))
        return copies

    def _copied(self, device: torch.device) -> tuple[Tensor, ...]:
        """The tensors, complete when this returns."""
        # Not in inference mode: tensors made there cannot be saved for a backward pass.
        with torch.inference_mode(False):
            lists = [torch.as_tensor(x, dtype=self._dtype, device="cpu") for x in self._lists]
            if device.type != "cuda":
                return tuple(x.to(device) for x in lists)
            return _in_one_transfer(lists, device)


_CAPTURED: set[Tensor] = set()
"""What CUDA graphs read when they are replayed: nothing tells when the last of them has gone."""

NOT_THERE = (
    "a CUDA graph is being captured, and the boundaries of this attention are not on the GPU yet, "
    "where no capture can bring them; run the same attention, with its backward, once before"
)

ALIGNED = 16
"""Bytes, to whose multiples each list is moved."""


def _in_one_transfer(lists: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """The lists on a GPU, as views of one copy."""
    each = ALIGNED // lists[0].itemsize
    room = [-(-len(x) // each) * each for x in lists]
    joined = torch.empty(sum(room), dtype=lists[0].dtype, pin_memory=True)
    for part, x in zip(joined.split(room), lists, strict=True):
        part[: len(x)] = x
    # The host waits for this copy; on a side stream it waits for no queued kernels as well.
    stream = _side_stream(device)
    with torch.cuda.stream(stream):
        copy = joined.to(device, non_blocking=True)
    stream.synchronize()
    return tuple(part[: len(x)] for part, x in zip(copy.split(room), lists, strict=True))


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of a device that numbers are copied on."""
    return torch.cuda.Stream(device)
