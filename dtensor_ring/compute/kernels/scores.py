"""How a query scores a key."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from dtensor_ring.planning.masks.mask import Mask


class Scores(NamedTuple):
    """How a query scores a key: `softcap * tanh(scale * q.k / softcap)`, or `scale * q.k`.

    A kernel reads `scale` and `softcap` only. The mask of a launch is in its `Launch`, and sinks
    are added after the last merge.

    Attributes:
        mask: what a query sees, in global positions.
        scale: factor of the products.
        softcap: bound of the scores (Gemma 2, 2024, arXiv 2408.00118); 0.0 means none.
        sinks: one learned logit for each query head `(N,)`.
        kernel: name of the block kernel; `None` takes the first that can.
    """

    mask: Mask
    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    kernel: str | None = None
