"""Pads the tensors of a kernel on a CPU, so that its bits do not depend on where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


# Note [Aligned products]: a matrix product of the CPU's library sums in another order if a matrix
# begins, or a row of it, at an address that is no multiple of a cache line: the bits of a head then
# depend on the heads before it, and on which thread computes it. Tokens and head dims that are
# multiples of 32 keep all addresses within aten's flash attention aligned, in its buffers too.
# Padding is 0, and hidden by a mask; it adds zeros at the end of each sum.
def padded_attend(
    kernel: Callable[..., Any], inputs: Tensors, is_causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)` of query, key and value.

    Args:
        kernel: takes query, key, value, `is_causal` and `attn_mask`.
        inputs: query `(B, N, R, H)`, key and value `(B, Nkv, C, H)`.
        is_causal: whether row i sees columns up to i; then R is C.
        bias: added to the scores `(R, C)`, or `None`.
    """
    query, key, value = inputs
    num_rows, num_cols, head_dim = query.shape[2], key.shape[2], query.shape[3]
    mask = _bias(bias, query, num_cols, is_causal)
    out, lse = kernel(
        aligned(query), aligned(key), aligned(value), is_causal=is_causal, attn_mask=mask
    )
    return out[:, :, :num_rows, :head_dim], lse[:, :, :num_rows]


def padded_backward(
    kernel: Callable[..., Any],
    by_row: Tensors,
    by_col: Tensors,
    is_causal: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value.

    Args:
        kernel: takes the gradient of out, query, key, value, out, lse, dropout, `is_causal` and
            `attn_mask`.
        by_row: gradient of out, query, out and lse.
        by_col: key and value.
        is_causal: whether row i sees columns up to i; then there are as many rows as columns.
        bias: added to the scores `(R, C)`, or `None`.
    """
    (grad_out, query, out, lse), (key, value) = by_row, by_col
    num_rows, num_cols, head_dim = query.shape[2], key.shape[2], query.shape[3]
    mask = _bias(bias, query, num_cols, is_causal)
    # Rows of padding have gradients of 0, so their weights do not matter.
    lse = torch.nn.functional.pad(lse, (0, up(num_rows) - num_rows))
    grads = kernel(
        aligned(grad_out),
        aligned(query),
        aligned(key),
        aligned(value),
        aligned(out),
        lse,
        0.0,  # no dropout
        is_causal,
        attn_mask=mask,
    )
    dq, dk, dv = (
        grad[:, :, :size, :head_dim]
        for grad, size in zip(grads, (num_rows, num_cols, num_cols), strict=True)
    )
    return dq, dk, dv


# Tokens and head dims are padded to multiples of this many numbers: a cache line of 16 bits.
MULTIPLE = 32


def up(size: int) -> int:
    """Return the smallest multiple of `MULTIPLE` from a size on."""
    return -(-size // MULTIPLE) * MULTIPLE


# Bytes of a cache line.
LINE = 64


def aligned(x: Tensor) -> Tensor:
    """Return `(B, N, L, H)` with L and H padded by 0; a copy unless it is aligned already."""
    batch, heads, num_tokens, head_dim = x.shape
    line = LINE // x.itemsize
    if not (
        num_tokens % MULTIPLE
        or head_dim % MULTIPLE
        or x.data_ptr() % LINE
        or any(x.stride(dim) % line for dim in range(3) if x.shape[dim] > 1)
    ):
        return x
    result = x.new_zeros(batch, heads, up(num_tokens), up(head_dim))
    result[:, :, :num_tokens, :head_dim] = x
    return result


def _bias(bias: Tensor | None, query: Tensor, num_cols: int, is_causal: bool) -> Tensor | None:
    """Return the bias of padded rows and columns; `None` if none is needed."""
    # In a causal square the columns of padding come after all rows that are read.
    if is_causal or (bias is None and num_cols % MULTIPLE == 0):
        return None
    num_rows = query.shape[2]
    result = query.new_zeros(up(num_rows), up(num_cols))
    result[:, num_cols:] = -torch.inf
    if bias is not None:
        result[:num_rows, :num_cols] = bias
    return result
