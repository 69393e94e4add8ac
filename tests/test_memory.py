"""What a ring allocates beside its kernels: counted in bytes, by storage, at every op it calls."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtensor_ring import Balanced, Contiguous, Mask, Striped, ZigZag, decode_attention
from dtensor_ring.compute import merge
from dtensor_ring.compute.kernels import Saved, Scores
from dtensor_ring.compute.kernels.kernel import Kernel
from dtensor_ring.ring import ring_backward, ring_forward
from dtensor_ring.transport import transport as protocol
from dtensor_ring.transport.transport import BufferPool, ProcessGroupTransport
from tests.pool import Pool
from tests.rings import Ring

BATCH, HEADS, KV_HEADS, HEAD_DIM, SHARD = 2, 8, 2, 16, 64
QUERY = BATCH * HEADS * SHARD * HEAD_DIM  # numbers of a rank's query
SHARDS = 2 * BATCH * KV_HEADS * SHARD * HEAD_DIM  # and of its key and value
ROWS = BATCH * HEADS * SHARD  # and of its lse
CAST_SIZE = 512  # what is cast at a time


class Counted(TorchDispatchMode):
    """Storages that ops made: bytes that are alive at most, and how many are large."""

    def __init__(self, large: int) -> None:
        super().__init__()
        self.peak, self.num_large = 0, 0
        self._large = large
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._ours: set[int] = set()

    def ignore(self, *tensors: Tensor) -> None:
        """Those that a kernel makes."""
        self._ours |= {StorageWeakRef(x.untyped_storage()).cdata for x in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and _key(x) not in given | self._ours:
                storage = x.untyped_storage()
                self._alive[_key(x)] = StorageWeakRef(storage), storage.nbytes()
                self.num_large += storage.nbytes() >= self._large
        self._alive = {key: x for key, x in self._alive.items() if not x[0].expired()}
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._alive.values()))
        return result


def _key(x: Tensor) -> int:
    return StorageWeakRef(x.untyped_storage()).cdata


class Ready(Kernel):
    """Hands out tensors of the right shapes, most of them made before: the ring is counted."""

    name = "ready"

    def __init__(self, dtype: torch.dtype, counted: Counted) -> None:
        self._counted = counted
        self._out, self._lse = torch.ones(QUERY, dtype=dtype), torch.ones(ROWS)
        counted.ignore(self._out, self._lse)

    def missing(self) -> None:
        return None

    def supports(self, problem: object) -> None:
        return None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
        assert (key.shape[1], value.shape[1]) == (KV_HEADS, KV_HEADS), "nothing is expanded"
        return self._shaped(self._out, query), self._shaped(self._lse, query[..., 0])

    def backward(self, saved: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
        num_large = self._counted.num_large
        grads = torch.ones_like(key), torch.ones_like(value)  # which the ring may keep for a while
        self._counted.num_large = num_large
        return self._shaped(self._out, query), *grads

    @staticmethod
    def _shaped(flat: Tensor, like: Tensor) -> Tensor:
        return flat[: like.numel()].view(like.shape)


RINGS = [
    Ring(layout, world_size, world_size * SHARD, mask)
    for world_size in (2, 4)
    for layout, mask in (
        (ZigZag(), Mask.causal()),
        (Striped(), Mask.causal()),
        (Contiguous(), Mask.full()),
        (Contiguous(), Mask.sliding(3 * SHARD)),
        (ZigZag(), Mask.sliding(SHARD // 2)),
        (Contiguous(), Mask.local(1, SHARD)),
        (Balanced(Mask.causal(), world_size * SHARD, world_size, block=4), Mask.causal()),
    )
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ring", RINGS, ids=lambda r: f"{r.layout.name}-{r.mask}-{r.world_size}")
def test_memory_beside_the_kernels(pool: Pool, ring: Ring, dtype: torch.dtype) -> None:
    """Whatever the number of steps: messages, their gradients, and what is accumulated."""
    wide = 4
    narrow = dtype.itemsize
    cast = 0 if dtype == torch.float32 else wide  # of the result
    output = wide if dtype == torch.float32 else wide + narrow
    # Of rows: log-sum-exps, weights, and what they add up to.
    forward_limit = _messages(ring) * narrow + QUERY * output + (6 * ROWS + 2 * CAST_SIZE) * wide
    # Gradients: those two that travel, the one on its way home, and the rank's own; then a step's,
    # as kernels return them, and their sum if they outgrow a shard.
    backward_limit = _messages(ring) * narrow + (QUERY + 4 * SHARDS) * wide + QUERY * cast
    backward_limit += 2 * SHARDS * narrow + SHARDS * wide
    counts = pool.run(ring.world_size, _count, ring, dtype)
    assert max(forward.peak for forward, _ in counts) >= SHARDS * narrow, "they were counted"
    assert max(backward.peak for _, backward in counts) >= SHARDS * (narrow + wide)
    for forward, backward in counts:
        assert forward.peak <= forward_limit
        assert backward.peak <= backward_limit
        if not cast and ring.layout.name != Balanced.name:  # else the merge, or a sum, makes more
            assert forward.num_large <= 3 + ring.is_direct, "messages, and the output"
            assert backward.num_large <= 8, "the limit's tensors, one by one"


def _messages(ring: Ring) -> int:
    """Numbers in two shards; or in three messages, where those are more and go directly."""
    transfers = [x for plan in ring.plans() for hop in plan.shards for x in hop.sends]
    widest = max(len(transfer.cols) for transfer in transfers)
    return max(2 * SHARD, (2 + ring.is_direct) * widest) * SHARDS // SHARD


class Count(NamedTuple):
    """Of one loop."""

    peak: int
    num_large: int


def _count(ring: Ring, dtype: torch.dtype) -> list[Count]:
    """Of forward and of backward."""
    plan = ring.plans()[dist.get_rank()]
    query, grad_out = (torch.ones(BATCH, HEADS, SHARD, HEAD_DIM, dtype=dtype) for _ in range(2))
    key, value = (torch.ones(BATCH, KV_HEADS, SHARD, HEAD_DIM, dtype=dtype) for _ in range(2))
    counts, transport = [], ProcessGroupTransport(dist.group.WORLD)
    for is_forward in (True, False):
        counted = Counted(SHARDS * dtype.itemsize // 4)
        kernel, scores = Ready(dtype, counted), Scores(ring.mask, 1.0)
        with (
            patch.multiple(protocol, BUFFERS=BufferPool()),
            patch.multiple(merge, CAST_SIZE=CAST_SIZE),
            counted,
        ):
            if is_forward:
                out, lse = ring_forward(query, (key, value), plan, kernel, scores, transport)
            else:
                saved = Saved(grad_out, out, lse)
                ring_backward(saved, query, (key, value), plan, kernel, scores, transport)
        counts.append(Count(counted.peak, counted.num_large))
    return counts


@pytest.mark.parametrize("batch", [1, 3])
def test_decoding_allocates_nothing_in_proportion_to_the_keys(batch: int) -> None:
    """Of a cache with room for more, and rows of unequal lengths."""
    peaks = []
    for num_keys in (64, 6400):
        cache = torch.randn(2, batch, 2, 2 * num_keys, 16, dtype=torch.bfloat16)
        key, value = cache[:, :, :, :num_keys]
        query = torch.randn(batch, 8, 1, 16, dtype=torch.bfloat16)
        starts = torch.arange(num_keys - batch, num_keys)
        for starts_of_rows in (None, starts):
            counted = Counted(1 << 20)
            with torch.no_grad(), counted:
                decode_attention(query, key, value, query_starts=starts_of_rows)
            peaks.append(counted.peak)
    assert peaks[:2] == peaks[2:]
    assert 0 < max(peaks) < 16 * query.numel() * 4
