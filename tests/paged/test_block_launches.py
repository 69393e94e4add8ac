"""Blocks of many entries in one launch or a few, next to a copy of each entry's own."""

from __future__ import annotations

from math import log
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dtensor_ring.compute.kernels import Scores
from dtensor_ring.compute.kernels.kernel import Pages
from dtensor_ring.compute.merge import merge_ragged
from dtensor_ring.paged import kernels
from dtensor_ring.paged.kernels import Gathered, InPlace, launches_of
from dtensor_ring.planning.tile import FULL

BLOCK = 4
TABLES: dict[str, tuple[list[list[int]], list[tuple[int, int]]]] = {
    "neighbours": ([[3, 4], [5]], [(3, 1)]),
    "others between": ([[3, 5], [6]], [(4, 1)]),
    "far apart": ([[1, 9], [15]], [(3, 1)]),
    "all share": ([[2, 3], [2, 3], [2, 3]], [(2, 4)]),
    "a beginning": ([[2, 3, 7], [2, 3, 8, 9], [2, 3, 10]], [(4, 1), (2, 4)]),
    "one twice": ([[2, 2]], [(1, 2)]),
    "widths": ([[0, 1, 2], [1, 2], [2], [2], [2]], [(1, 1), (1, 2), (1, 8)]),
}
"""Blocks of each entry; and of each launch, the blocks that it computes and their readers."""


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_each_block_is_read_once(
    name: str, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, expected = TABLES[name]
    num_rows, found = 3, []
    torch.manual_seed(0)
    keys, values = torch.randn(2, 16, BLOCK, 2, 8, dtype=torch.float64)
    query = torch.randn(len(tables), num_rows, 4, 8, dtype=torch.float64)
    kernel_of = kernels.block_kernel

    def spy(queries: Tensor, *facts: Any) -> Any:
        num_readers = queries.shape[2] // (2 * num_rows)  # two heads share a key head
        found.append((len(queries), num_readers))
        return kernel_of(queries, *facts)

    monkeypatch.setattr(kernels, "block_kernel", spy)
    lengths = np.array([BLOCK * len(x) for x in tables], dtype=np.int32)
    width = max(map(len, tables))
    pages = Pages(np.array([x + [0] * (width - len(x)) for x in tables]), lengths, BLOCK)
    given = query, keys, values, pages, Scores(FULL, 0.3, softcap)
    for one, other in zip(InPlace().forward(*given), Gathered().forward(*given), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)
    assert found == expected
    assert launches_of(pages) is launches_of(pages)


def test_neighbours_are_not_copied() -> None:
    pages = Pages(np.array([[3, 4], [5, 0]]), np.array([8, 4]), BLOCK)
    (launch,) = launches_of(pages).parts
    keys = torch.zeros(16, BLOCK, 2, 8)
    assert launch._read(keys).data_ptr() == keys[3].data_ptr()


def test_rows_that_no_partial_has_seen() -> None:
    """They stay (0, -inf); others are the mean by weight."""
    outs = torch.tensor([[1.0], [3.0], [0.0], [0.0], [7.0]])
    lses = torch.tensor([0.0, 0.0, -torch.inf, -torch.inf, 5.0])
    groups, counts = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([2, 2, 1])
    out, lse = merge_ragged(outs, lses, groups, counts)
    assert out.tolist() == [[2.0], [0.0], [7.0]]
    torch.testing.assert_close(lse, torch.tensor([log(2), -torch.inf, 5.0]))
