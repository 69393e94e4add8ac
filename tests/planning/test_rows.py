"""Masks and documents as slices, against what they show."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from dtensor_ring.planning.mask import as_documents
from dtensor_ring.planning.plan import checked_slices
from dtensor_ring.planning.slices import rows_of
from tests.drawn import examples
from tests.planning.test_plan import cross_rings, rings
from tests.rings import Ring
from tests.slices import shown


@settings(deadline=None, max_examples=examples(120))
@given(rings() | cross_rings())
def test_slices_show_what_is_visible(ring: Ring) -> None:
    documents, key_documents = (
        as_documents(rows, keep_empty=True) for rows in (ring.documents, ring.key_documents)
    )
    found = checked_slices(
        *(ring.mask, ring.world_size, ring.seq_lens, documents, key_documents, ring.slices)
    )
    expected = ring.visible().numpy()
    for batch, table in rows_of(found):
        for row in range(ring.batch) if batch is None else [batch]:
            assert np.array_equal(shown(table, ring.seq_lens), expected[row])
