"""The sizes of the tensors of an attention, and what their parts take in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dtensor_ring.all_to_all.plan import AllToAllPlan, HeadShard
from dtensor_ring.planning.ranges import as_count, length
from dtensor_ring.transport.transport import TransferPolicy


class TensorSizes(NamedTuple):
    """The sizes of the tensors of an attention.

    Attributes:
        heads: number of query heads, and of key and value heads.
        head_dims: head dim of queries and keys, and of values.
        batch: rows of the batch.
        dtype: dtype of query, key and value.
        kv_dtype: dtype of keys and values in messages; one of 8 bits has scales.
        sum_dtype: dtype of key and value gradient sums in messages.
    """

    heads: tuple[int, int]
    head_dims: tuple[int, int]
    batch: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    sum_dtype: torch.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of a number of query, key and value."""
        return self.dtype.itemsize

    @property
    def kv_itemsize(self) -> int:
        """Bytes of a number of keys and values in messages, without scales."""
        return self.kv_dtype.itemsize

    @property
    def sum_itemsize(self) -> int:
        """Bytes of a number of key and value gradient sums in messages."""
        return self.sum_dtype.itemsize

    @property
    def wide_itemsize(self) -> int:
        """Bytes of a number that results are merged in: float32 or wider."""
        return max(4, self.itemsize)

    def heads_after(self, all_to_all: AllToAllPlan | None) -> tuple[int, int]:
        """Return the query and key heads of a rank after an all-to-all; without one, all heads."""
        if all_to_all is None:
            return self.heads
        return self.heads_of(all_to_all.head_shard(all_to_all.rank, self.heads[1]))

    def heads_of(self, shard: HeadShard) -> tuple[int, int]:
        """Return the number of query and key heads of a shard of the heads."""
        query, key = (length(shard.span(count, self.heads[1])) for count in self.heads)
        return query, key


def tensor_sizes(
    heads: Any, head_dim: Any, batch: Any, dtype: Any, policy: Any
) -> tuple[TensorSizes, str]:
    """Check the arguments, and return the sizes and the name of the dtype, such as "bfloat16".

    Args:
        heads: of queries, and of keys and values.
        head_dim: of queries, keys and values.
        batch: rows of the batch.
        dtype: of query, key and value, or its name.
        policy: the dtypes in which messages travel.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if a number is out of range.
    """
    if not isinstance(heads, Sequence) or len(heads) != 2:
        raise TypeError(f"heads must be two numbers, of queries and of keys, got {heads!r}")
    query, key = (as_count("heads", count, 1) for count in heads)
    if query % key:
        raise ValueError(f"heads of queries must be a multiple of those of keys, got {heads}")
    kind = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise TypeError(f"dtype must be floating, such as torch.bfloat16, got {dtype!r}")
    if not isinstance(policy, TransferPolicy):
        raise TypeError(
            f"policy must be a TransferPolicy, such as TransferPolicy(), got {policy!r}"
        )
    dim = as_count("head_dim", head_dim)
    sizes = TensorSizes(
        heads=(query, key),
        head_dims=(dim, dim),
        batch=as_count("batch", batch),
        dtype=kind,
        kv_dtype=policy.dtype_of_keys(kind),
        sum_dtype=policy.sum_dtype(kind),
    )
    return sizes, str(kind).removeprefix("torch.")
