"""Warns of layouts that cut an attention into far more tiles than there are documents."""

from __future__ import annotations

import warnings

from dtensor_ring.ops.caller import CALLER
from dtensor_ring.ops.options import Question
from dtensor_ring.planning.plan import Plan

# The largest number of tiles of a rank without a warning: they are planned in about 0.03 s.
MANY = 1000


def warn_of_tiles(plan: Plan, question: Question) -> None:
    """Warn if the layout makes many tiles, and more than there are documents.

    The number is rounded down to a power of two. Python shows each text once, so a line of the user
    is reported again only if a batch takes twice the number.
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
    """Return the number of documents or slices in all batch rows."""
    if question.slices is not None:
        return sum(map(len, question.slices.tables))
    documents = question.documents
    return sum(row.size - 1 for row in documents.arrays) if documents else 1
