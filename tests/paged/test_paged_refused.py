"""What a pool's batches and caches refuse, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtensor_ring import BlockPool
from dtensor_ring.paged.api import PagedBatch, PagedCache
from tests.refusals import Refused, check_refused

QUERY = torch.zeros(1, 2, 1, 8)


def stale(cache: PagedCache, s: Any) -> None:
    batch = PagedBatch(cache, [s])
    cache.pool.append(s, [1])
    batch.attend(0, QUERY)


def committed(cache: PagedCache, s: Any) -> None:
    cache.pool.commit(s, 4)
    PagedBatch(cache, [s], 3).write(0, torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8))


def committed_since(cache: PagedCache, s: Any) -> None:
    batch, new = PagedBatch(cache, [s]), torch.zeros(1, 2, 1, 8)
    batch.write(0, new, new)
    cache.pool.commit(s)
    batch.write(0, new, new)


def attend(*shape: int, **how: Any) -> Callable[..., Any]:
    return lambda cache, s: PagedBatch(cache, [s]).attend(0, torch.zeros(shape), **how)


def grown(cache: PagedCache, s: Any) -> None:
    PagedBatch(cache, [s]).attend(0, QUERY.clone().requires_grad_())


FLASH = r"kernel 'flash_attn2' cannot read these blocks \(flash_attn2: it runs on CUDA"
REFUSED: Refused = {
    ValueError: {
        "sequence 0 has changed since this batch was made": stale,
        "4 of 5 tokens .* take num_tokens=1": committed,
        "5 of 5 tokens .* its last 1 cannot be written, append the next tokens": committed_since,
        "layer must be from 0": lambda c, s: PagedBatch(c, [s]).attend(1, QUERY),
        "num_tokens must be from 1 to 5, got 6": lambda c, s: PagedBatch(c, [s], 6),
        "num_tokens must be from 1 to 5, got 7": lambda c, s: PagedBatch(c, [s], [7]),
        "one for each of the 1, got 2": lambda c, s: PagedBatch(c, [s], [1, 2]),
        "num_tokens must be from 1 to 5, got 0": lambda c, s: PagedBatch(c, [s], 0),
        "sequences must differ": lambda c, s: PagedBatch(c, [s, s]),
        "freed already": lambda c, s: [c.pool.free(s), PagedBatch(c, [s])],
        r"query must be \(1, 2, 1, 8\) torch.float32": attend(1, 2, 2, 8),
        "query must have a multiple of the 2 heads": attend(1, 3, 1, 8),
        "unknown paged kernel 'x'; known": attend(1, 2, 1, 8, kernel="x"),
        FLASH: attend(1, 2, 1, 8, kernel="flash_attn2"),
        r"key must be \(1, 2, 1, 8\)": lambda c, s: PagedBatch(c, [s]).write(
            0, torch.zeros(1, 2, 2, 8), None, dealt=True
        ),
        r"value must be \(1, 2, 1, 8\)": lambda c, s: PagedBatch(c, [s]).write(
            0, torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 4)
        ),
        "make the pool with world_size": lambda c, s: PagedBatch(
            PagedCache(BlockPool(4, 2, 2), 2, 8, 1), []
        ).decode(0, QUERY),
        "rank must be": lambda c, s: PagedCache(c.pool, 2, 8, 1, rank=1),
        "layer must be from 0 to 0": lambda c, s: c.gather(1, s),
    },
    TypeError: {
        "sequences must be a list": lambda c, s: PagedBatch(c, s),
        "sequence must be one that add": lambda c, s: PagedBatch(c, [3]),
        "query must be a tensor": lambda c, s: PagedBatch(c, [s]).attend(0, 3),
        "mask must be": attend(1, 2, 1, 8, mask="causal"),
        "pool must be a BlockPool": lambda c, s: PagedCache(4, 2, 8, 1),
    },
    NotImplementedError: {"query or sinks needs one": grown},
}
"""What is called with a cache and its sequence of 5 tokens; and the error."""


def test_refused() -> None:
    def run(call: Callable[..., Any]) -> None:
        cache = PagedCache(BlockPool(8, block=2), 2, 8, 1)
        call(cache, cache.pool.add(range(5)))

    check_refused(REFUSED, run)
