"""Attention through block tables in float64, as the packages of GPU kernels take them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.sequences import Scores

Given = dict[str, Any]
"""Arguments of a call, by name."""


def run_pages(given: Given, scores: Scores, multiple: int) -> tuple[Tensor, Tensor]:
    """Out and lse of queries `(E, R, N, H)`, or packed `(T, N, H)` with `cu_seqlens_q`.

    Args:
        given: names as of flash attention 3.
        scores: how a query scores a key.
        multiple: of which pages have to be.
    """
    query, keys, values = given["q"], given["k"], given["v"]
    table, lengths = given["page_table"], given["seqused_k"]
    assert table.dtype == lengths.dtype == torch.int32
    assert (table.dim(), lengths.shape) == (2, table.shape[:1])
    assert all(x.is_contiguous() for x in (keys, values, table))
    assert keys.shape[:3] == values.shape[:3]
    assert keys.shape[1] % multiple == 0
    assert query.stride(-1) == 1
    assert lengths.max() <= (given.get("max_seqlen_k") or lengths.max())
    assert (scores.left, scores.right) == (None, None)
    rows = list(query)
    if query.dim() == 3:
        bounds = given["cu_seqlens_q"].tolist()
        rows = [query[first:end] for first, end in pairwise(bounds)]
        assert max(map(len, rows)) <= given["max_seqlen_q"]
    found = [
        scores.forward(*(x.double() for x in (q, *_kv(table[e], lengths[e], keys, values))))
        for e, q in enumerate(rows)
    ]
    outs, lses = zip(*found, strict=True)
    if query.dim() == 3:
        return torch.cat(outs).to(query.dtype), torch.cat(lses, 1).float()
    return torch.stack(outs).to(query.dtype), torch.stack(lses).float()


def _kv(table: Tensor, length: Tensor, *pools: Tensor) -> list[Tensor]:
    """The keys and values of an entry."""
    assert 0 < length <= len(table) * pools[0].shape[1]
    assert all(0 <= index < len(pools[0]) for index in table.tolist())
    return [pool[table.long()].flatten(0, 1)[:length] for pool in pools]
