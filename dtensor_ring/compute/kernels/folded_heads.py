"""The query heads that share a key head, as rows of one head: then keys are read once for all."""

from __future__ import annotations

from torch import Tensor


def fold_heads(query: Tensor, num_kv_heads: int) -> Tensor:
    """Return `(B, N, R, H)` as `(B, Nkv, N / Nkv * R, H)`: heads of a group become rows of one."""
    # A view of head-major memory. Other orders are copied if groups have several heads and rows.
    batch, num_heads, rows, head_dim = query.shape
    return query.reshape(batch, num_kv_heads, num_heads // num_kv_heads * rows, head_dim)


def unfold_heads(x: Tensor, num_heads: int) -> Tensor:
    """Return `(B, Nkv, N / Nkv * R, ...)` as `(B, N, R, ...)`."""
    batch, num_kv_heads, rows, *head_dim = x.shape
    return x.reshape((batch, num_heads, rows * num_kv_heads // num_heads, *head_dim))
