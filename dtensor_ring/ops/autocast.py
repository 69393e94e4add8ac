"""The dtype that autocast asks for, and which tensors are cast to it."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the autocast dtype of a device type, `None` if autocast is off."""
    is_on = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if is_on else None


def cast(x: Tensor, device_type: str, dtype: torch.dtype) -> Tensor:
    """Cast a tensor if `scaled_dot_product_attention` would cast it under autocast."""
    is_eligible = x.is_floating_point() and x.dtype != torch.float64
    return x.to(dtype) if is_eligible and x.device.type == device_type else x
