"""The best keys of each query are those of one process: ties, documents, empty ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_ring import BlockCyclic, Contiguous, Mask, Striped, ZigZag
from dtensor_ring.planning.run_table import RunTable
from dtensor_ring.selected import run
from dtensor_ring.selected.run import best_keys
from tests.drawn import examples, seen_by_rings, turns
from tests.rings import Ring
from tests.selected.indexers import Indexer

CAUSAL, FULL = Mask.causal(), Mask.full()
ROUTES = "ring", "around", "direct", "all_gather"
INDEXERS = {
    "zigzag": Indexer(Ring(ZigZag(), 2, 16, CAUSAL), 3),
    "contiguous, four ranks": Indexer(Ring(Contiguous(), 4, 16, CAUSAL), 3),
    "striped": Indexer(Ring(Striped(), 3, 15, CAUSAL), 4),
    "fewer keys than k": Indexer(Ring(ZigZag(), 2, 8, CAUSAL), 9),
    "one key": Indexer(Ring(ZigZag(), 4, 16, CAUSAL), 1),
    "ranks without tokens": Indexer(Ring(BlockCyclic(4), 4, 6, CAUSAL), 2),
    "one rank": Indexer(Ring(Contiguous(), 1, 12, CAUSAL), 3),
    "full": Indexer(Ring(ZigZag(), 2, 12, FULL), 5),
    "window": Indexer(Ring(ZigZag(), 2, 16, Mask.sliding(4)), 3),
    "documents": Indexer(Ring(ZigZag(), 2, 16, CAUSAL, ((0, 3, 4, 13),)), 2),
    "documents by row": Indexer(Ring(Striped(), 2, 16, CAUSAL, ((0, 9, 16), (0, 1, 5))), 3),
    "heads apart": Indexer(Ring(ZigZag(), 2, 16, CAUSAL), 3, with_weights=False),
    "float32": Indexer(Ring(ZigZag(), 2, 16, CAUSAL), 3, dtype=torch.float32),
    "bfloat16": Indexer(Ring(ZigZag(), 2, 16, CAUSAL), 3, dtype=torch.bfloat16),
    "blocks": Indexer(Ring(ZigZag(), 2, 16, CAUSAL), 2, block_size=3),
    "blocks over ranks": Indexer(Ring(Striped(), 4, 16, CAUSAL), 2, block_size=4),
    "local blocks": Indexer(
        Ring(ZigZag(), 2, 24, CAUSAL), 3, with_weights=False, block_size=4, local_blocks=2
    ),
    "blocks of documents": Indexer(
        Ring(ZigZag(), 2, 16, CAUSAL, ((0, 5, 11),)), 2, block_size=4, local_blocks=1
    ),
    "a turn": Indexer(
        Ring(
            RunTable([[(5, 2)], [(7, 1)]]), 2, 8, CAUSAL, key_layout=RunTable([[(0, 3)], [(3, 5)]]),
            begin=5,
        ),
        3,
    ),
}  # fmt: skip


def check(indexer: Indexer) -> None:
    expected = indexer.expected()[:, :, indexer.ring.begin :]
    assert torch.equal(indexer.found(), expected)


@pytest.mark.parametrize("indexer", INDEXERS.values(), ids=list(INDEXERS))
def test_equals_loops_over_all_pairs(indexer: Indexer) -> None:
    check(indexer)


@pytest.mark.parametrize("route", ROUTES)
def test_routes(route: str) -> None:
    check(Indexer(replace(INDEXERS["documents by row"].ring, strategy=route), 3))


def test_chunks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SCORES", 1)
    for name in ("zigzag", "window", "blocks of documents"):
        check(INDEXERS[name])


@st.composite
def indexers(draw: st.DrawFn) -> Indexer:
    world_size = draw(st.integers(1, 4))
    layout = draw(st.sampled_from(["contiguous", "striped", "zigzag", "block_cyclic:3"]))
    ring = draw(seen_by_rings(layout, world_size, draw(st.integers(1, 2))))
    if ring.key_seq_len is None and draw(st.integers(0, 3)) == 0:
        ring = draw(turns(ring))
    size = draw(st.sampled_from([1, 1, 1, 2, 5]))
    is_cross = ring.key_seq_len is not None or ring.key_documents is not None
    return Indexer(
        replace(ring, strategy=draw(st.sampled_from(ROUTES))),
        draw(st.integers(1, 12)),
        draw(st.integers(1, 3)),
        draw(st.booleans()),
        1 if is_cross else size,
        draw(st.integers(0, 2)) if size > 1 and not is_cross else 0,
        seed=draw(st.integers(0, 9)),
    )


@settings(deadline=None, max_examples=examples(60))
@given(indexers())
def test_drawn(indexer: Indexer) -> None:
    check(indexer)


@pytest.mark.repeats
@settings(deadline=None, max_examples=2000)
@given(indexers())
def test_two_thousand_drawn(indexer: Indexer) -> None:
    check(indexer)


@settings(deadline=None, max_examples=examples(100))
@given(st.lists(st.integers(-2, 2) | st.just(-99), max_size=12), st.integers(1, 8))
def test_best_keys_of_a_row(row: list[int], k: int) -> None:
    scores = torch.tensor(row, dtype=torch.float32).masked_fill(
        torch.tensor(row) == -99, -torch.inf
    )
    found, at = best_keys(scores, torch.arange(len(row), dtype=torch.int32), k)
    kept = [i for i in range(len(row)) if row[i] != -99]
    chosen = sorted(sorted(kept, key=lambda i: (-row[i], i))[:k])
    assert [i for i in at.tolist() if i < len(row)] == chosen
    assert [x for x in found.tolist() if x > -torch.inf] == [row[i] for i in chosen]
