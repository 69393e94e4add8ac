"""Keys and values in the blocks of a `BlockPool`: the part of one rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dtensor_ring.planning.paging.block_pool import BlockPool
from dtensor_ring.planning.paging.pooled import BlockCopy, PooledSequence
from dtensor_ring.planning.values.count import as_count

MAX_SIZE = 2**20
"""Of layers, heads and head dims."""


class PagedCache:
    """The keys and values that one rank of a `BlockPool` holds, of all layers.

    Memory for all blocks is allocated at once. A `PagedBatch` writes to it and attends to it.

    Args:
        pool: says which block holds what.
        num_kv_heads: of keys and values.
        head_dim: of keys, and of values unless `value_head_dim` says otherwise.
        num_layers: layers that keep keys and values.
        rank: this rank's index on the axis that the pool is sharded over.
        value_head_dim: of values.
        dtype: of keys and values; by default PyTorch's.
        device: where they are.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if one of the numbers is out of range.

    >>> pool = BlockPool(num_blocks=4, block=4)
    >>> cache = PagedCache(pool, num_kv_heads=2, head_dim=8, num_layers=1)
    >>> cache.layer(0)[0].shape, cache.num_bytes
    (torch.Size([4, 4, 2, 8]), 2048)
    """

    def __init__(
        self,
        pool: BlockPool,
        num_kv_heads: int,
        head_dim: int,
        num_layers: int,
        rank: int = 0,
        value_head_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if not isinstance(pool, BlockPool):
            raise TypeError(f"pool must be a BlockPool, got {pool!r}")
        self.pool = pool
        self.rank = as_count("rank", rank, 0, pool.dealing.world_size - 1)
        num_kv_heads = as_count("num_kv_heads", num_kv_heads, 1, MAX_SIZE)
        num_layers = as_count("num_layers", num_layers, 1, MAX_SIZE)
        head_dim = as_count("head_dim", head_dim, 1, MAX_SIZE)
        if value_head_dim is None:
            value_head_dim = head_dim
        value_head_dim = as_count("value_head_dim", value_head_dim, 1, MAX_SIZE)
        shape = pool.num_blocks, pool.dealing.block, num_kv_heads
        # Zeros: what a kernel loads beside the last key must not be NaN, which no weight removes.
        with torch.inference_mode(False):
            keys, values = (
                torch.zeros(num_layers, *shape, dim, dtype=dtype, device=device)
                for dim in (head_dim, value_head_dim)
            )
        self._keys, self._values = keys, values

    @property
    def num_layers(self) -> int:
        """Layers that keep keys and values."""
        return len(self._keys)

    @property
    def num_bytes(self) -> int:
        """Memory of this rank's blocks, in bytes."""
        return self._keys.nbytes + self._values.nbytes

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys `(num_blocks, block, Nkv, H)` and values `(num_blocks, block, Nkv, Hv)` of a layer.

        Raises:
            TypeError: if `layer` is not an int.
            ValueError: if there is no such layer.
        """
        number = as_count("layer", layer, 0, self.num_layers - 1)
        return self._keys[number], self._values[number]

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Copy the blocks that `BlockPool.append` returned, before anything else is written."""
        for rank, source, target in copies:
            if rank == self.rank:
                self._keys[:, target] = self._keys[:, source]
                self._values[:, target] = self._values[:, source]

    def gather(self, layer: int, sequence: PooledSequence) -> tuple[Tensor, Tensor]:
        """A copy of this rank's keys `(1, Nkv, C, H)` and values of a sequence, by position.

        `BlockPool.runs` says which positions they are of: the `key_runs` of `ring_attention` and
        of `decode_attention`.

        Raises:
            TypeError: if `layer` is not an int.
            ValueError: if there is no such layer, or `sequence` is not in the pool.
        """
        table = torch.from_numpy(self.pool.block_table(sequence, self.rank))
        num_cols = self.pool.dealing.num_before(len(sequence), self.rank)
        keys, values = (
            x[table.to(x.device)].flatten(0, 1)[:num_cols].transpose(0, 1).unsqueeze(0)
            for x in self.layer(layer)
        )
        return keys, values
