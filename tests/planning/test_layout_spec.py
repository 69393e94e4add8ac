"""Layouts by their names, and what names none."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dtensor_ring import Balanced, Mask
from dtensor_ring.planning.layout import Contiguous, Layout
from dtensor_ring.planning.run_table import PerBatch, RunTable, as_layout
from tests.layouts import LAYOUTS

SPECS = [layout.spec for layout in LAYOUTS]


BELONGS_TO_BATCH = "the balanced layout belongs to one batch, so it is passed with it"


@dataclass(frozen=True)
class Impostor(Contiguous):
    """Not a layout of ours, in spite of its name."""

    shift: int = 1


@pytest.mark.parametrize("layout", LAYOUTS, ids=SPECS)
def test_as_layout(layout: Layout) -> None:
    assert as_layout(layout) is layout
    assert as_layout(layout.spec) == layout


def test_specs() -> None:
    assert SPECS[:4] == ["contiguous", "striped", "zigzag", "block_cyclic:2"]
    assert not any(layout.per_batch for layout in LAYOUTS)
    assert RunTable.per_batch
    assert Balanced.per_batch


def test_layouts_of_a_batch() -> None:
    """By name they stand for any of them, which shards nothing; by value they are themselves."""
    layout = as_layout("balanced")
    assert (layout, layout.per_batch, layout.spec) == (PerBatch(), True, "balanced")
    with pytest.raises(ValueError, match=BELONGS_TO_BATCH):
        layout.runs(0, 2, 8)
    for made in (Balanced(Mask.causal(), 8, 2), RunTable((((0, 4),), ((4, 4),)))):
        assert as_layout(made) is made


KNOWN = "known layouts: contiguous, striped, zigzag, block_cyclic:<block>, whole_blocks:<block>$"


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ("ring", ValueError, f"unknown layout 'ring'; {KNOWN}"),
        (Impostor(), ValueError, rf"unknown layout Impostor\(shift=1\); {KNOWN}"),
        (2, TypeError, "a layout is a Layout or its name, got int"),
        (None, TypeError, "a layout is a Layout or its name, got NoneType"),
        ("block_cyclic", ValueError, f"'block_cyclic' .*takes 1 parameters, got 0.; {KNOWN}"),
        ("block_cyclic:", ValueError, f"'block_cyclic:' has wrong parameters .*; {KNOWN}"),
        ("block_cyclic:2,3", ValueError, f"takes 1 parameters, got 2.; {KNOWN}"),
        ("block_cyclic:two", ValueError, f"invalid literal for int.*; {KNOWN}"),
        ("block_cyclic:0", ValueError, f"a block holds at least one token, got 0.; {KNOWN}"),
        ("zigzag:2", ValueError, f"'zigzag:2' .*takes 0 parameters, got 1.; {KNOWN}"),
    ],
)
def test_as_layout_refuses(wrong: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        as_layout(wrong)  # type: ignore[arg-type]
