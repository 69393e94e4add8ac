"""The hops of all ranks as arrays are those that the routes have as objects."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dtensor_ring import Mask
from dtensor_ring.lab.transfers import (
    PlannedTransfers,
    RingHop,
    Transfers,
    transfers_of,
)
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.mask import Documents, as_documents
from dtensor_ring.planning.plan import checked_slices, plan_inputs
from dtensor_ring.planning.route import ROUTES
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.planning.strategy import Strategy

DOCUMENTS = ((0, 11, 12, 50, 90, 96),)
SEEN = {
    "causal": (Mask.causal(), None),
    "window": (Mask.sliding(9), None),
    "documents": (Mask.causal(), DOCUMENTS),
    "rows": (Mask.causal(), ((0, 40, 96), (0, 7, 90))),
    "full": (Mask.full(), None),
    "prefix": (Mask(None, 0, prefix=30), None),
}
Contents = dict[tuple[tuple[int, int], ...], set[int]]
LAYOUTS = ("zigzag", "contiguous", "striped", "block_cyclic:3")


def numbers(hop: RingHop) -> list[list[list[tuple[int, ...]]]]:
    """Rows of each part, in any order: a rank has at most one."""
    return [
        [sorted(zip(*(x.tolist() for x in part), strict=True)) for part in side] for side in hop
    ]


def hops(transfers: Transfers, contents: Contents) -> Iterator[object]:
    yield transfers.num_home().tolist()
    for step in range(transfers.num_steps):
        resident = transfers.resident(step)
        yield resident.sources.tolist(), resident.cols.tolist()
        for rank, (content, count) in enumerate(zip(resident.contents, resident.cols, strict=True)):
            cols = transfers.resident_cols(step, rank)
            assert len(cols) == count
            if count and step:
                contents.setdefault(cols.spans, set()).add(int(content))
            yield cols.spans
        yield numbers(transfers.shards(step))
        yield numbers(transfers.sums(step))
        if step:
            yield (transfers.are_new(step) & (resident.cols > 0)).tolist()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("seen", SEEN)
def test_arrays_are_the_hops_of_routes(seen: str, route: str) -> None:
    mask, rows = SEEN[seen]
    documents = as_documents(rows)
    for layout in map(as_layout, LAYOUTS):
        for size in (1, 2, 3, 4, 8):
            check(layout, mask, documents, size, route)


def check(layout: Layout, mask: Mask, documents: Documents | None, size: int, route: str) -> None:
    slices = checked_slices(mask, size, (96, 96), documents)
    inputs = plan_inputs((layout, layout), size, (96, 96), slices, Strategy(route=route))
    contents: Contents = {}
    found = list(hops(transfers_of(inputs, route), contents))
    assert found == list(hops(PlannedTransfers(inputs, route), {}))
    # Equal columns have one number, and no number stands for others.
    assert all(len(x) == 1 for x in contents.values())
    assert len({x for one in contents.values() for x in one}) == len(contents)
