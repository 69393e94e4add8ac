"""What a pool's batches and caches refuse, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dtensor_ring import BlockPool
from dtensor_ring.paged.api import PagedBatch, PagedCache

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
REFUSED: dict[str, tuple[Callable[..., Any], type, str]] = {
    "stale": (stale, ValueError, "sequence 0 has changed since this batch was made"),
    "committed": (committed, ValueError, "4 of 5 tokens .* take num_tokens=1"),
    "committed since": (
        committed_since,
        ValueError,
        "5 of 5 tokens .* its last 1 cannot be written, append the next tokens first",
    ),
    "layer": (lambda c, s: PagedBatch(c, [s]).attend(1, QUERY), ValueError, "layer must be from 0"),
    "too many": (lambda c, s: PagedBatch(c, [s], 6), ValueError, "num_tokens must be from 1 to 5"),
    "too many of one": (
        lambda c, s: PagedBatch(c, [s], [6]),
        ValueError,
        "num_tokens must be from 1 to 5",
    ),
    "too many numbers": (
        lambda c, s: PagedBatch(c, [s], [1, 2]),
        ValueError,
        "one for each of the 1, got 2",
    ),
    "none": (lambda c, s: PagedBatch(c, [s], 0), ValueError, "num_tokens must be from 1 to 5"),
    "twice": (lambda c, s: PagedBatch(c, [s, s]), ValueError, "sequences must differ"),
    "no list": (lambda c, s: PagedBatch(c, s), TypeError, "sequences must be a list"),
    "no sequence": (lambda c, s: PagedBatch(c, [3]), TypeError, "sequence must be one that add"),
    "freed": (lambda c, s: [c.pool.free(s), PagedBatch(c, [s])], ValueError, "freed already"),
    "query": (attend(1, 2, 2, 8), ValueError, r"query must be \(1, 2, 1, 8\) torch.float32"),
    "heads": (attend(1, 3, 1, 8), ValueError, "query must have a multiple of the 2 heads"),
    "no tensor": (
        lambda c, s: PagedBatch(c, [s]).attend(0, 3),
        TypeError,
        "query must be a tensor",
    ),
    "gradient": (grown, NotImplementedError, "query or sinks needs one"),
    "kernel": (attend(1, 2, 1, 8, kernel="x"), ValueError, "unknown paged kernel 'x'; known"),
    "device": (attend(1, 2, 1, 8, kernel="flash_attn2"), ValueError, FLASH),
    "mask": (attend(1, 2, 1, 8, mask="causal"), TypeError, "mask must be"),
    "dealt": (
        lambda c, s: PagedBatch(c, [s]).write(0, torch.zeros(1, 2, 2, 8), None, dealt=True),
        ValueError,
        r"key must be \(1, 2, 1, 8\)",
    ),
    "value": (
        lambda c, s: PagedBatch(c, [s]).write(0, torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 4)),
        ValueError,
        r"value must be \(1, 2, 1, 8\)",
    ),
    "mesh": (
        lambda c, s: PagedBatch(PagedCache(BlockPool(4, 2, 2), 2, 8, 1), []).decode(0, QUERY),
        ValueError,
        "make the pool with world_size",
    ),
    "rank": (lambda c, s: PagedCache(c.pool, 2, 8, 1, rank=1), ValueError, "rank must be"),
    "pool": (lambda c, s: PagedCache(4, 2, 8, 1), TypeError, "pool must be a BlockPool"),
    "gathered": (lambda c, s: c.gather(1, s), ValueError, "layer must be from 0 to 0"),
}
"""What is called with a cache and its sequence of 5 tokens; and the error."""


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, kind, message = REFUSED[name]
    cache = PagedCache(BlockPool(8, block=2), 2, 8, 1)
    sequence = cache.pool.add(range(5))
    with pytest.raises(kind, match=message):
        call(cache, sequence)
