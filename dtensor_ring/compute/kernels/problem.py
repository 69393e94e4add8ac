"""The facts that decide whether a kernel can serve an attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

Determinism = Literal["off", "warn", "strict"]
"""PyTorch's setting for operations that are not deterministic: allowed, warned of, or refused."""


def determinism() -> Determinism:
    """The current setting of `torch.use_deterministic_algorithms`.

    >>> determinism()
    'off'
    """
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "warn" if torch.is_deterministic_algorithms_warn_only_enabled() else "strict"


@dataclass(frozen=True, slots=True)
class Problem:
    """All that decides whether a kernel can serve an attention; equal on ranks with equal GPUs.

    Attributes:
        device_type: type of the tensors' device, `"cpu"` or `"cuda"`.
        dtype: of query, key and value.
        head_dim: of query and key.
        value_head_dim: of value and output.
        scale: factor of the scores.
        softcap: bound of the scores; 0.0 means none.
        differentiable_lse: whether backward gets a gradient of lse.
        windowed: whether tiles may have other bands than full and causal ones.
        grouped: whether there are fewer heads of keys than of queries.
        packed: whether there are documents, so that a step may have any number of tiles.
        determinism: PyTorch's setting, by default the current one.
        capability: compute capability of the current GPU, `None` for tensors on a CPU.
    """

    device_type: str
    dtype: torch.dtype
    head_dim: int
    value_head_dim: int
    scale: float = 1.0
    softcap: float = 0.0
    differentiable_lse: bool = False
    windowed: bool = False
    grouped: bool = False
    packed: bool = False
    determinism: Determinism = field(default_factory=determinism)
    capability: tuple[int, int] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.device_type == "cuda" and torch.cuda.is_available():
            # Read here, so that what kernels support is a function of this value alone.
            object.__setattr__(self, "capability", torch.cuda.get_device_capability())
