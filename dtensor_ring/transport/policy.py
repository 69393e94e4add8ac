"""The policy of a ring: the dtypes of its messages, and the number of partial results it keeps."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dtensor_ring.planning.ranges import as_count


@dataclass(frozen=True, slots=True)
class TransferPolicy:
    """The dtypes of a ring's messages, and the number of partial results that a rank keeps.

    All ranks of an axis use the same policy.

    Args:
        kv_dtype: dtype of keys and values, by default their own. A narrower one sends fewer bytes
            and rounds what other ranks see; a rank sees its own keys and values unrounded.
        grad_dtype: dtype of the sums of key and value gradients. `torch.bfloat16` halves their
            bytes and rounds them at each hop; docs/rounding.md has the errors. float16 overflows
            beyond 65,504. The sums of float64 tensors travel as float64 where this is float32.
        num_parts: the number of partial outputs, or partial gradients of the query, that are kept
            until one pass merges them. Each is as large as the query. On GPUs more of them save
            time, up to one per rank. The default takes about the memory of a float32 sum: two of
            16 bits on a GPU, else one.

    Raises:
        TypeError: if a dtype is not a `torch.dtype`, or `num_parts` is not an integer.
        ValueError: if a dtype is not floating, or has fewer than 16 bits; if `num_parts` is less
            than 1.

    >>> TransferPolicy(grad_dtype=torch.bfloat16).grad_dtype
    torch.bfloat16
    """

    kv_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype = torch.float32
    num_parts: int | None = None

    def __post_init__(self) -> None:
        for name in ("kv_dtype", "grad_dtype"):
            dtype = getattr(self, name)
            if dtype is None and name == "kv_dtype":
                continue
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{name} must be a torch.dtype, got {dtype!r}")
            if not dtype.is_floating_point or dtype.itemsize < 2:
                raise ValueError(f"{name} must be floating, 16 bits or more, got {dtype}")

        if self.num_parts is not None:
            # Frozen, so that a policy can be a key.
            object.__setattr__(self, "num_parts", as_count("num_parts", self.num_parts, 1))

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of keys and values of `dtype` are summed and sent."""
        # The default float32 means "at least float32": float64 gradients are not rounded.
        is_default = self.grad_dtype == torch.float32
        return torch.promote_types(dtype, torch.float32) if is_default else self.grad_dtype


DEFAULT_POLICY = TransferPolicy()
