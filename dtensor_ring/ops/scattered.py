"""Warns of layouts that cut an attention into far more tiles than there are documents."""

from __future__ import annotations

import warnings

from dtensor_ring.ops.caller import CALLER
from dtensor_ring.ops.options import Question
from dtensor_ring.planning.plan import Plan

MANY = 1000
"""Tiles of a rank that nobody minds: they are planned in 0.03 s."""


def warn_of_tiles(plan: Plan, question: Question) -> None:
    """Warn of many tiles, and of more than documents, as they are made of the layout.

    Their number is told as the power of two below it: Python shows a text once, so that a line of
    the user is told again only where a batch takes twice as many.
    """
    num_tiles = sum(len(step.tiles) for step in plan.steps)
    if num_tiles <= MANY or num_tiles <= _num_slices(question):
        return
    place = f"{CALLER.place}: " if CALLER.place else ""
    warnings.warn(
        f"{place}the layout {question.layout.spec!r} cuts this attention into over "
        f"{1 << (num_tiles.bit_length() - 1):,} tiles for each rank, about one for each document "
        "and rank; planning a batch takes some 30 us for each, and so does launching, with kernels "
        "that take one document at a time; 'balanced', made for the documents of a batch, has few",
        stacklevel=2,
    )


def _num_slices(question: Question) -> int:
    """Documents or slices, of all batch rows."""
    if question.slices is not None:
        return sum(map(len, question.slices.tables))
    documents = question.documents
    return sum(row.size - 1 for row in documents.arrays) if documents else 1
