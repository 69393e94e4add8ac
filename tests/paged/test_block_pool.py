"""The pool of blocks: prefixes that are shared, blocks that are evicted, copies, and errors."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dtensor_ring.paged.block_pool import BlockPool
from dtensor_ring.paged.blocks import BlockCopy, OutOfBlocks, PooledSequence
from tests.paged.test_block_pool_walks import state_of


def filled(pool: BlockPool, tokens: Any) -> PooledSequence:
    sequence = pool.add(tokens)
    pool.commit(sequence)
    return sequence


@pytest.mark.parametrize("world_size", range(1, 5))
def test_a_shared_prefix_needs_no_prefill_and_its_unit_is_one_block(world_size: int) -> None:
    pool = BlockPool(16, block=4, world_size=world_size)
    first = filled(pool, range(22))
    for num_common, expected in ((0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (21, 20), (22, 20)):
        second = pool.add([*range(num_common), *range(100, 110)])
        assert second.num_cached == expected, num_common
        tables = [(pool.block_table(x, r), r) for r in range(world_size) for x in (first, second)]
        shared = sum(
            len(set(a) & set(b)) for (a, _), (b, _) in zip(tables[::2], tables[1::2], strict=True)
        )
        assert shared == expected // 4
        pool.free(second)
    whole = pool.add(range(20))
    assert whole.num_cached == 20


def test_what_was_not_written_is_not_shared() -> None:
    pool = BlockPool(8, block=2)
    first, second = pool.add([1, 2, 3]), pool.add([1, 2, 3])
    assert (first.num_cached, second.num_cached) == (0, 0)
    pool.commit(first, 1)
    assert pool.add([1, 2]).num_cached == 0
    pool.commit(first, 2)
    assert pool.add([1, 2]).num_cached == 2
    # The second one has written the same block meanwhile: it takes that of the first, and what
    # comes after it is shared, too.
    pool.append(second, [4])
    pool.commit(second)
    assert pool.block_table(second, 0)[0] == pool.block_table(first, 0)[0]
    assert pool.add([1, 2, 3, 4]).num_cached == 4


def test_the_same_block_after_other_tokens_is_another() -> None:
    pool = BlockPool(8, block=2, world_size=2)
    filled(pool, [1, 2, 5, 6])
    assert pool.add([3, 4, 5, 6]).num_cached == 0
    assert pool.add([5, 6]).num_cached == 0


def test_least_recently_used_goes_first_from_its_end() -> None:
    pool = BlockPool(4, block=1)
    old, new = filled(pool, [1, 2]), filled(pool, [3, 4])
    pool.free(old)
    pool.free(new)
    pool.free(pool.add([1, 2]))  # now it is the more recent one
    pool.free(pool.add([9]))
    assert pool.add([3, 4]).num_cached == 1
    assert pool.add([1, 2]).num_cached == 2


def test_evicting_a_block_forgets_what_comes_after_it_on_other_ranks() -> None:
    pool = BlockPool(2, block=1, world_size=2)
    pool.free(filled(pool, [1, 2, 3]))  # ranks 0, 1, 1
    pool.add([8])
    assert (pool.usage().cached, pool.usage().free) == ((1, 2), (0, 0))
    pool.add([9])
    assert (pool.usage().cached, pool.usage().free) == ((0, 0), (0, 2))


def test_of_a_prompt_the_end_is_evicted_first() -> None:
    pool = BlockPool(4, block=1)
    pool.free(filled(pool, [1, 2, 3, 4]))
    pool.free(pool.add([9]))
    assert pool.add([1, 2, 3, 4]).num_cached == 3


def test_copy_on_write() -> None:
    pool = BlockPool(4, block=4, world_size=2)
    first = filled(pool, range(6))
    twin = pool.fork(first)
    assert pool.append(twin, [7]) == (BlockCopy(rank=1, source=0, target=1),)
    assert pool.append(twin, [8]) == ()
    assert pool.append(first, [9]) == ()  # nobody else holds its block any more
    # A block that serves other prompts changes in place if nobody holds it, and is forgotten.
    pool.commit(first)
    pool.append(first, [10])
    pool.commit(first)
    pool.crop(first, 7)
    third = pool.add([*range(6), 9, 10])
    assert third.num_cached == 8
    assert len(pool.append(first, [1])) == 1
    pool.crop(third, 7)
    assert pool.append(third, [1]) == ()
    assert pool.add([*range(6), 9, 10]).num_cached == 4
    # The block has other tokens now: it is entered into the tree as what it is.
    pool.commit(third)
    assert pool.add([*range(6), 9, 1]).num_cached == 8


def test_out_of_blocks_says_what_is_needed() -> None:
    pool = BlockPool(2, block=2, world_size=2)
    held = filled(pool, range(4))
    pool.free(filled(pool, [9, 9]))
    before = state_of(pool)
    with pytest.raises(OutOfBlocks) as raised:
        pool.append(held, range(14))
    error = raised.value
    assert (error.need, error.free, error.cached) == ((4, 3), (0, 1), (1, 0))
    assert str(error) == (
        "out of blocks: rank 0 lacks 3 (by rank, needed (4, 3), free (0, 1), cached and evictable "
        "(1, 0)); free or crop a sequence, or make the pool with num_blocks=5"
    )
    assert state_of(pool) == before
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.need) == (str(error), error.need)
    BlockPool(5, 2, 2).add(range(18))


def test_a_block_that_is_not_full_has_room_in_a_full_pool() -> None:
    pool = BlockPool(2, block=2)
    held = filled(pool, range(3))
    pool.append(held, [3])
    assert len(held) == 4
    with pytest.raises(OutOfBlocks, match=r"needed \(1,\), free \(0,\)"):
        pool.append(held, [4])


def test_blocks_that_are_hit_do_not_count_as_evictable() -> None:
    pool = BlockPool(2, block=1)
    pool.free(filled(pool, [1, 2]))
    with pytest.raises(OutOfBlocks, match=r"needed \(2,\), free \(0,\), .* \(1,\)"):
        pool.add([1, 8, 9])
    assert pool.add([1, 8]).num_cached == 1


@pytest.mark.parametrize(
    "tokens", [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3], dtype=np.uint8), torch.tensor([1, 2, 3])]
)
def test_tokens_of_any_kind(tokens: Any) -> None:
    pool = BlockPool(4, block=3)
    filled(pool, tokens)
    assert pool.add([1, 2, 3]).num_cached == 3


def bad_calls() -> dict[str, tuple[Callable[[BlockPool, PooledSequence], Any], type, str]]:
    """What is called, and the error."""
    freed = "sequence 1 is not in this pool: it was freed already, or belongs to another pool"
    return {
        "freed twice": (lambda p, s: [p.free(p_ := p.fork(s)), p.free(p_)], ValueError, freed),
        "another pool": (lambda p, s: BlockPool(4).append(s, [1]), ValueError, "sequence 0 is not"),
        "no sequence": (lambda p, s: p.free(3), TypeError, "sequence must be one that add or fork"),
        "crop beyond": (lambda p, s: p.crop(s, 6), ValueError, "length must be from 0 to 5, got 6"),
        "crop negative": (lambda p, s: p.crop(s, -1), ValueError, "length must be from 0 to 5"),
        "crop half": (lambda p, s: p.crop(s, 1.5), TypeError, "length must be an int, got 1.5"),
        "crop all": (lambda p, s: p.crop(s, True), TypeError, "length must be an int"),
        "commit beyond": (lambda p, s: p.commit(s, 6), ValueError, "length must be from 5 to 5"),
        "text": (lambda p, s: p.add("abc"), ValueError, "tokens must be token ids"),
        "floats": (lambda p, s: p.append(s, [0.5]), TypeError, "tokens must hold integers"),
        "rows": (lambda p, s: p.add([[1, 2]]), ValueError, r"tokens must be token ids \(T,\)"),
        "huge": (lambda p, s: p.add(np.array([2**63], np.uint64)), ValueError, "tokens must be"),
        "rank": (lambda p, s: p.block_table(s, 2), ValueError, "rank must be from 0 to 1, got 2"),
        "fork early": (
            lambda p, s: [p.append(s, [1]), p.fork(s)],
            ValueError,
            "1 tokens of sequence 0 were not committed",
        ),
        "no block": (lambda p, s: BlockPool(4, 0), ValueError, "block must be from 1"),
        "no blocks": (lambda p, s: BlockPool(0), ValueError, "num_blocks must be from 1"),
        "no ranks": (lambda p, s: BlockPool(4, world_size=0), ValueError, "world_size must be"),
        "half a block": (lambda p, s: BlockPool(4, 64.0), TypeError, "block must be an int"),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_bad_calls_leave_the_pool_as_it_was(name: str) -> None:
    call, kind, message = bad_calls()[name]
    pool = BlockPool(4, block=2, world_size=2)
    sequence = filled(pool, range(5))
    before = state_of(pool)
    with pytest.raises(kind, match=message):
        call(pool, sequence)
    if name != "fork early":
        assert state_of(pool) == before
