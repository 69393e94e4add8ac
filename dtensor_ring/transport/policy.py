"""The dtypes in which messages travel."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TransferPolicy:
    """The dtypes in which a ring's messages travel; all ranks of an axis have one policy.

    Args:
        kv_dtype: dtype of keys and values, by default their own. A narrower one sends fewer bytes
            and rounds what other ranks see; a rank sees its own keys and values unrounded.
        grad_dtype: dtype of the sums of key and value gradients. `torch.bfloat16` halves their
            bytes and rounds them at each hop; docs/numerics.md has the errors. float16 overflows
            beyond 65,504. The sums of float64 tensors travel as float64 where this is float32.

    Raises:
        TypeError: if a dtype is not a `torch.dtype`.
        ValueError: if a dtype is not floating, or has fewer than 16 bits.

    >>> TransferPolicy(grad_dtype=torch.bfloat16).grad_dtype
    torch.bfloat16
    """

    kv_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("kv_dtype", "grad_dtype"):
            dtype = getattr(self, name)
            if dtype is None and name == "kv_dtype":
                continue
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{name} must be a torch.dtype, got {dtype!r}")
            if not dtype.is_floating_point or dtype.itemsize < 2:
                raise ValueError(f"{name} must be floating, 16 bits or more, got {dtype}")

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of keys and values of `dtype` are summed and travel."""
        # float32 stands for wide, so that float64 gradients are not rounded by default.
        is_default = self.grad_dtype == torch.float32
        return torch.promote_types(dtype, torch.float32) if is_default else self.grad_dtype


DEFAULT_POLICY = TransferPolicy()
