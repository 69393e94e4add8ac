"""The launches of alike steps are those of every step, planned one by one."""

from __future__ import annotations

from typing import Any

import pytest

from dtensor_ring import Mask, Slices
from dtensor_ring.balanced.balanced import layout_for
from dtensor_ring.compute.execute import launches
from dtensor_ring.lab.launch_table import launch_table
from dtensor_ring.lab.machine import FORMS
from dtensor_ring.lab.transfers import transfers_of
from dtensor_ring.planning.mask import as_documents
from dtensor_ring.planning.plan import checked_slices, plan, plan_inputs
from dtensor_ring.planning.strategy import as_strategy
from dtensor_ring.planning.tile import FULL

DOCUMENTS = ((0, 11, 12, 50, 90, 96),)
SEEN: dict[str, dict[str, Any]] = {
    "causal": {"mask": Mask.causal()},
    "window": {"mask": Mask.sliding(9)},
    "chunks": {"mask": Mask.chunked(10)},
    "documents": {"mask": Mask.causal(), "documents": as_documents(DOCUMENTS)},
    "rows": {"mask": Mask.causal(), "documents": as_documents(((0, 40, 96), (0, 7, 90)))},
    "prefix": {"slices": Slices.prefix([0, 96], 30)},
}
CASES = [("zigzag", 5), ("zigzag", 4), ("striped", 4), ("block_cyclic:3", 4)]


@pytest.mark.parametrize("strategy", ["around", "all_gather", "ulysses:2+around"])
@pytest.mark.parametrize("seen", SEEN)
def test_table_is_that_of_plans(seen: str, strategy: str) -> None:
    given = {"mask": FULL, "documents": None, "slices": None} | SEEN[seen]
    batch = len(given["documents"] or "x") if given["documents"] else 2
    for name, size in [*CASES, ("balanced", 4)]:
        if "ulysses" in strategy and size % 2:
            continue
        mask, documents, slices = given["mask"], given["documents"], given["slices"]
        layout = layout_for(name, None if slices else mask, 96, size, documents, slices)
        way = as_strategy(strategy, size)
        cut = checked_slices(mask, size, (96, 96), documents, slices=slices)
        inputs = plan_inputs((layout, layout), size, (96, 96), cut, way)
        for has_segments in (True, False):
            table = launch_table(inputs, transfers_of(inputs, way.route), batch, has_segments)
            for rank in range(0, size, way.heads):
                asked = layout, mask, rank, size, 96, documents
                found = plan(*asked, strategy=way, slices=slices)
                for step in found.steps:
                    shape = batch, found.num_local[0], len(step.cols)
                    made = launches(step, shape, has_segments)
                    kind = table.kinds[step.number, rank // way.heads]
                    assert table.counts[kind] == len(made)
                    areas = [t.area * (1 if t.batch is not None else batch) for t in step.tiles]
                    assert table.pairs[kind].sum() == sum(areas)
                    bounds = [(x.mask.left is None) + (x.mask.right is None) for x in made]
                    forms = [FORMS[x] for x in table.forms[kind, : len(made)]]
                    assert forms == [("window", "causal", "full")[x] for x in bounds]
                    for number, launch in enumerate(made):
                        repeats = len(range(batch)[launch.rows[0]])
                        rows = len(range(shape[1])[launch.rows[2]])
                        assert table.rows[kind, number] == repeats * rows
                        cols = len(range(shape[2])[launch.cols[2]])
                        assert table.cols[kind, number] == repeats * cols
