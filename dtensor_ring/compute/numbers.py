"""Integers of a plan as tensors on the devices where kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor


class Numbers:
    """Lists of integers, copied to each device once.

    The tensors live as long as this object, which should live as long as its plan. A CUDA graph
    that captured them may outlive them.

    >>> Numbers(torch.int32, (0, 3, 5)).on(torch.device("cpu"))
    (tensor([0, 3, 5], dtype=torch.int32),)
    """

    def __init__(self, dtype: torch.dtype, *lists: Sequence[int] | Tensor) -> None:
        self._dtype, self._lists = dtype, lists
        self._copies: dict[torch.device, tuple[Tensor, ...]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """A tensor of each list on the device."""
        # All layers ask, and a copy makes the host wait: one for each device.
        if device not in self._copies:
            self._copies[device] = self._copied(device)
        copies = self._copies[device]
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            # Another stream allocated them: it must not reuse the memory while this one reads it.
            for numbers in copies:
                numbers.record_stream(torch.cuda.current_stream(device))
        return copies

    def _copied(self, device: torch.device) -> tuple[Tensor, ...]:
        """The tensors, complete when this returns."""
        # The host waits for these copies; on a side stream it waits for no queued kernels as well.
        stream = _side_stream(device) if device.type == "cuda" else None
        with torch.inference_mode(False), torch.cuda.stream(stream):
            # Not in inference mode: tensors made there cannot be saved for a backward pass.
            on_host = [torch.as_tensor(x, dtype=self._dtype, device="cpu") for x in self._lists]
            return tuple(numbers.to(device) for numbers in on_host)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of a device that numbers are copied on."""
    return torch.cuda.Stream(device)
