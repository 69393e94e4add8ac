"""What a CUDA graph captures: one place asks, refuses, and keeps what replays read.

Note [CUDA graphs]: a graph repeats launches with the addresses and numbers that they had when they
were captured. The host runs no code in a replay: it compares no ranks, and plans no documents.
So what a call brings to the device, compiles or connects has to be there before: the same call,
with its backward, runs once before its capture, and its ranks are compared there. A capture may
neither read the device on the host nor copy to it. What needs either raises here.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of a device records a CUDA graph, and runs nothing.

    >>> is_capturing(torch.device("cpu"))
    False
    """
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device, why: str, instead: str) -> None:
    """Refuse what a CUDA graph cannot have, see Note [CUDA graphs].

    Args:
        device: the device of the call's tensors.
        why: what cannot be captured, and why.
        instead: what to write in its place.

    Raises:
        RuntimeError: while a graph is captured.

    Example:
        >>> refuse_capture(torch.device("cpu"), "the host reads a length", "pass it as an int")
    """
    if is_capturing(device):
        raise RuntimeError(f"a CUDA graph is being captured, and {why}; {instead}")


# What graphs read at each replay; nothing reports when the last graph is gone.
_CAPTURED: set[object] = set()


def keep_captured(device: torch.device, read: Iterable[object]) -> bool:
    """Keep what a launch reads for ever, if a graph captures it; return whether one does."""
    is_captured = is_capturing(device)
    if is_captured:
        _CAPTURED.update(read)
    return is_captured


# What the same call brings when it runs before the capture.
RUN_ONCE = "run the same attention, with its backward, once before"
