"""Prompts as one sequence: where their tokens are, and what they see there."""

from __future__ import annotations

import numpy as np
import pytest

from dtensor_ring import BlockPool, Mask
from dtensor_ring.paged.prefill import PackedPrompts
from tests.dense import visible

MASKS = [
    Mask.causal(),
    Mask.full(),
    Mask.sliding(3),
    Mask.local(5, 1),
    Mask.chunked(7),
    Mask.prefix_causal(5),
]


def prompts(world_size: int) -> tuple[BlockPool, list[tuple[object, int]]]:
    """Some share blocks; of some a part of a block is held, or nothing."""
    pool = BlockPool(64, block=4, world_size=world_size)
    first = pool.add(range(21))
    pool.commit(first, 14)
    chunks = [(first, 5)]
    for tokens, num_tokens in (
        ([*range(12), 50, 51], 2),  # three blocks of the first one
        ([*range(12), 60], 1),  # and these again
        ([*range(4), 70, 71, 72, 73, 74], 4),  # one of them
        (range(80, 86), 6),
    ):
        chunks.append((pool.add(tokens), num_tokens))
    return pool, chunks  # type: ignore[return-value]


def positions(runs: np.ndarray) -> list[int]:
    return [p for row in runs.tolist() for start, n in row for p in range(start, start + n)]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_each_prompt_sees_what_it_sees_alone(mask: Mask, world_size: int) -> None:
    pool, chunks = prompts(world_size)
    packed = PackedPrompts(chunks, pool.dealing)  # type: ignore[arg-type]
    # 14 tokens of the first prompt, whose first 12 others share.
    assert packed.num_cached == 14
    queries, keys = (sorted(positions(x)) for x in (packed.query_runs, packed.key_runs))
    assert keys == [*range(14 + 18)]
    assert queries == keys[14:]
    slices, found = packed.slices(mask), np.zeros((len(keys), len(keys)), dtype=bool)
    slices.check(len(keys), len(keys))
    for pieces in packed.prompts:
        begin, end = pieces[-1].tokens
        alone = visible(mask, (end, end), 1)[0, 0].numpy()
        at = [p + x.shift for x in pieces for p in range(*x.tokens)]
        assert len(at) == end
        found[np.ix_(at[begin:], at)] = alone[begin:]
    seen = [[slices.sees(query, key) for key in keys] for query in queries]
    assert np.array_equal(seen, found[14:])


def test_who_sees_the_same_is_joined() -> None:
    """Queries of neighbours that see all of a beginning are one slice."""
    pool = BlockPool(64, block=4)
    first = pool.add(range(9))
    pool.commit(first, 8)
    chunks = [(first, 1), *((pool.add([*range(8), x, x]), 2) for x in (20, 30, 40))]
    (table,) = PackedPrompts(chunks, pool.dealing).slices(Mask.causal()).tables
    assert table[0, :4].tolist() == [8, 15, 0, 8]
    assert len(table) == 5
