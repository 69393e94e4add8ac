"""A bias by distance: queries add it to the score of keys so many positions before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtensor_ring import Balanced, Contiguous, Mask, Slices
from dtensor_ring.planning.layout import BlockCyclic, Striped, ZigZag
from tests.ops.test_op import errors_of
from tests.pool import Pool
from tests.rings import Case, Ring

CAUSAL, FULL = Mask.causal(), Mask.full()
DOCUMENTS = ((0, 3, 4, 4, 11, 24), (0, 9, 11, 24, 24, 24))
LAYOUTS = Contiguous(), Striped(), ZigZag(), BlockCyclic(2)


def cases(world_size: int) -> list[Case]:
    """Layouts, masks, strategies and options; a bias for some distances, or for all."""

    def case(ring: Ring, extent: int = 5, **options: Any) -> Case:
        return Case(ring, extent=extent, **options)

    rings = [Ring(layout, world_size, 24, CAUSAL) for layout in LAYOUTS]
    rings += [Ring(layout, world_size, 24, CAUSAL, DOCUMENTS) for layout in LAYOUTS]
    rings += [Ring(ZigZag(), world_size, 21, Mask.sliding(4), strategy="all_gather")]
    rings += [Ring(Balanced(CAUSAL, 24, world_size, DOCUMENTS, block=2), world_size, 24, CAUSAL)]
    rings += [Ring(Contiguous(), world_size, 12, FULL, key_seq_len=20)]
    slices = Slices.documents(torch.tensor(DOCUMENTS[0]), Mask.sliding(4))
    rings += [Ring(Striped(), world_size, 24, FULL, slices=slices)]
    ring = Ring(ZigZag(), world_size, 24, CAUSAL)
    options: list[dict[str, Any]] = [
        {"extent": 1, "sinks": (0.5, -1.0, 2.0, 0.0), "grad_lse": True},
        {"extent": 40, "heads": (2, 2), "batch": 3, "head_dims": (8, 6)},
        {"dropout_p": 0.3},
    ]
    return [*map(case, rings), *(case(ring, **x) for x in options)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equals_dense_attention(pool: Pool, world_size: int) -> None:
    given = cases(world_size)
    for rank, by_case in enumerate(pool.run(world_size, errors_of, given)):
        for case, found in zip(given, by_case, strict=True):
            assert max(found.values()) < 1e-12, f"rank {rank}: {case} {found}"
