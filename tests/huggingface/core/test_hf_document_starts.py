"""Where documents start is found in blocks and in parts as in the whole batch."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from parallel_plans.huggingface.core import documents
from parallel_plans.huggingface.core.documents import (
    DocumentBounds,
    _traced,
    find_documents,
    find_starts,
    joined,
)

SEQ_LEN, CHUNKS = 17, {3, 5}


def drawn_positions(seed: int, num_rows: int) -> Tensor:
    """Packed documents, the first of which may begin anywhere."""
    draw = torch.Generator().manual_seed(seed)
    restarts = torch.rand(num_rows, SEQ_LEN, generator=draw) < 0.2
    index = torch.arange(SEQ_LEN).expand(num_rows, -1)
    begins = torch.where(restarts, index, 0).cummax(1).values
    return index - begins + 4 * (begins == 0)


def drawn_mask(seed: int, num_rows: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    edges = torch.randint(0, SEQ_LEN + 1, (2, num_rows, 1), generator=draw).sort(0).values
    index = torch.arange(SEQ_LEN)
    return ((index >= edges[0]) & (index < edges[1])).long()


def compacted(found: DocumentBounds) -> dict[str, list[list[int]] | None]:
    """Without the empty documents that fill up."""

    def rows(x: Tensor | None) -> list[list[int]] | None:
        if x is None:
            return None
        return [row.unique().tolist() for row in x.view(-1, x.shape[-1])]

    named = {"packed": found.packed, "others": found.others}
    return {
        name: rows(x) for name, x in (named | {str(k): x for k, x in found.chunks.items()}).items()
    }


@pytest.mark.parametrize("num_rows", [1, 3])
def test_documents_are_those_of_tensors_of_fixed_shapes(num_rows: int) -> None:
    """Which a compiler traces: another way to the same, whose tensors have the whole length."""
    for seed in range(20):
        mask, positions = drawn_mask(seed, num_rows), drawn_positions(seed, num_rows)
        for given in ((mask, None), (None, positions), (mask, positions)):
            expected = _traced(SEQ_LEN, CHUNKS, *given, has_axes=False, for_all=False)
            with patch.object(documents, "BLOCK", 4):
                named = dict(zip(("attention_mask", "position_ids"), given, strict=True))
                found = find_documents(SEQ_LEN, CHUNKS, **named)
            assert compacted(found) == compacted(expected)


@pytest.mark.parametrize("by_positions", [True, False])
def test_parts_join(by_positions: bool) -> None:
    """Each part knows the value before it, as a rank gets it from another one."""
    values = drawn_positions(3, 2) if by_positions else drawn_mask(3, 2)
    tables, before = [], None
    for begin in range(0, SEQ_LEN, 6):
        part = values[:, begin : begin + 6]
        tables.append(find_starts(part, by_positions, begin, before).table)
        before = part[:, -1:]
    whole = find_starts(values, by_positions)
    assert torch.equal(joined(tables, 2, by_positions).table, whole.table)


def test_most_batches_have_boundaries_of_one_shape() -> None:
    """Whose number does not follow the length, as long as there are few documents."""
    shapes = set()
    for length, num_documents in ((3000, 2), (3000, 900), (6000, 7)):
        positions = torch.arange(length).unsqueeze(0) % (length // num_documents)
        found = find_starts(positions, by_positions=True)
        shapes.add(found.boundaries(length).shape)
        assert len(found.table) >= num_documents
    assert shapes == {torch.Size([1025])}
    every = find_starts(torch.zeros(1, 3000, dtype=torch.long), by_positions=True)
    assert every.boundaries(3000).tolist() == [*range(3001)]
