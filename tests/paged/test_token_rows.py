"""Batches in which each token is a row: as many last tokens of each sequence as one likes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dtensor_ring import BlockPool, Mask, merge_attention
from dtensor_ring.paged.api import PagedBatch, PagedCache
from tests.dense import dense_attention, visible
from tests.paged.test_paged_cache import paged_cases
from tests.paged_attention import TOLERANCES, PagedCase

Counts = tuple[int, ...]

CASES: dict[str, tuple[PagedCase, Counts]] = {
    "one": (PagedCase(), (4,)),
    "many": (PagedCase(lengths=(1, 9, 30, 4), world_size=2), (1, 3, 7, 4)),
    "more than a block": (PagedCase(lengths=(30, 21), block=2, world_size=3), (17, 1)),
    "window": (PagedCase(lengths=(30, 9, 40), mask=Mask.sliding(6), world_size=2), (5, 2, 1)),
    "a window of blocks": (
        PagedCase(lengths=(60, 41), mask=Mask.sliding(17), world_size=2),
        (6, 3),
    ),
    "chunks": (PagedCase(lengths=(30, 29), mask=Mask.chunked(7), world_size=2), (5, 3)),
    "bfloat16": (PagedCase(lengths=(30, 9), dtype=torch.bfloat16), (3, 5)),
    "one each": (PagedCase(lengths=(30, 9), world_size=2), (1, 1)),
    "gathered": (PagedCase(lengths=(30, 9), kernel="gathered", world_size=3), (4, 2)),
}


def expected(case: PagedCase, counts: Counts) -> tuple[Tensor, Tensor]:
    """What each token sees as the last one of its sequence."""
    found = []
    for tensors, count in zip(case.inputs(), counts, strict=True):
        length = tensors[1].shape[2]
        for end in range(length - count + 1, length + 1):
            query, key, value = (x[:, :, :end] for x in tensors)
            seen = visible(case.mask, (end, end), 1)[:, 0, -1:]
            how = {"scale": 0.3, "softcap": case.softcap, "seen": seen}
            found.append(dense_attention(query[:, :, -1:], key, value, case.mask, **how))
    return torch.cat([x.out for x in found]), torch.cat([x.lse for x in found])


def check(case: PagedCase, counts: Counts) -> None:
    caches, sequences = case.filled()
    last = [
        query[0, :, -n:].transpose(0, 1)
        for (query, _, _), n in zip(case.inputs(), counts, strict=True)
    ]
    how = {"mask": case.mask, "scale": 0.3, "softcap": case.softcap, "kernel": case.kernel}
    batches = [PagedBatch(cache, sequences, counts) for cache in caches]
    parts = [x.attend(0, torch.cat(last).unsqueeze(2), **how) for x in batches]
    tolerance = TOLERANCES[case.dtype]
    for x, dense in zip(merge_attention(parts), expected(case, counts), strict=True):
        torch.testing.assert_close(x.double(), dense.detach(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_tokens_as_if_each_were_the_last(name: str) -> None:
    check(*CASES[name])


@st.composite
def cases(draw: st.DrawFn) -> tuple[PagedCase, Counts]:
    left, chunk = draw(st.none() | st.integers(0, 20)), draw(st.none() | st.integers(1, 9))
    mask = Mask(left, 0) if chunk is None else Mask.chunked(chunk)
    case = replace(draw(paged_cases()), mask=mask)
    return case, tuple(draw(st.integers(1, min(8, n))) for n in case.lengths)


def test_random_tokens() -> None:
    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(cases())
    def check_any(drawn: tuple[PagedCase, Counts]) -> None:
        check(*drawn)

    check_any()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_writes_are_those_of_one_token_at_a_time(world_size: int) -> None:
    """Each token goes to the rank and the slot of its position."""
    counts, found = (3, 1, 6), []
    for is_ragged in (True, False):
        pool = BlockPool(8, block=2, world_size=world_size)
        caches = [PagedCache(pool, 1, 1, 1, rank) for rank in range(world_size)]
        for kind, count in enumerate(counts):
            pool.add(range(10 * kind, 10 * kind + count))
        sequences = [*pool._sequences.values()]
        new = torch.arange(sum(counts), dtype=torch.float32)[:, None, None, None]
        for cache in caches:
            if is_ragged:
                PagedBatch(cache, sequences, counts).write(0, new, new)
                continue
            for sequence, part in zip(sequences, new.split(counts), strict=True):
                row = part.transpose(0, 2)
                PagedBatch(cache, [sequence], len(sequence)).write(0, row, row)
        found.append([cache.layer(0)[0] for cache in caches])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
