"""The pool of blocks: what it shares, evicts and copies, errors, and random walks over it."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dtensor_ring.paged.block_pool import BlockPool
from dtensor_ring.paged.blocks import BlockCopy, OutOfBlocks, PooledSequence


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


STEPS = 50
"""Of a walk."""
TOKENS = st.lists(st.integers(0, 1), max_size=12)
"""Few kinds of tokens, so that prompts often begin alike."""


class Walk(RuleBasedStateMachine):
    """Random calls on equal pools, one for each rank, next to the model: a dict of lists.

    Every rank has a memory: written tokens stand at the places where the tables of its own pool say
    so. A block that two write to, that is lost or given out twice shows there.
    """

    walked: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.pools: list[BlockPool] = []
        self.model: dict[int, list[int]] = {}
        self.handles: dict[int, list[PooledSequence]] = {}

    @precondition(lambda self: not self.pools)
    @rule(
        world_size=st.integers(1, 4), block=st.sampled_from([1, 2, 4]), num_blocks=st.integers(1, 9)
    )
    def start(self, world_size: int, block: int, num_blocks: int) -> None:
        self.pools = [BlockPool(num_blocks, block, world_size) for _ in range(world_size)]
        self.memories = [Memory(pool, rank) for rank, pool in enumerate(self.pools)]

    def on_all(self, call: Callable[[BlockPool, int], Any]) -> list[Any] | None:
        """What the call returns on each rank; `None` where all refuse it, and nothing changed."""
        type(self).walked["steps of pools"] += 1
        results = [self.on(pool, rank, call) for rank, pool in enumerate(self.pools)]
        if isinstance(results[0], str):
            assert len(set(results)) == 1
            return None
        return results

    def on(self, pool: BlockPool, rank: int, call: Callable[[BlockPool, int], Any]) -> Any:
        """What the call returns; where it has no room, the message."""
        before = state_of(pool)
        try:
            return call(pool, rank)
        except OutOfBlocks as error:
            refused = error
        by_rank = zip(refused.need, refused.free, refused.cached, strict=True)
        assert any(need > free + cached for need, free, cached in by_rank)
        assert state_of(pool) == before
        return str(refused)

    def written(self, key: int) -> None:
        """Each rank writes its tokens that were not, and says so."""
        for memory, handle in zip(self.memories, self.handles[key], strict=True):
            memory.write(handle)
            memory.pool.commit(handle)

    @precondition(lambda self: self.pools)
    @rule(tokens=TOKENS, is_written=st.booleans())
    def add(self, tokens: list[int], is_written: bool) -> None:
        handles = self.on_all(lambda pool, _: pool.add(tokens))
        if handles is not None:
            key = handles[0].number
            self.model[key], self.handles[key] = tokens[:], handles
            assert handles[0].num_cached <= len(tokens)
            if is_written:
                self.written(key)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), tokens=TOKENS, is_written=st.booleans())
    def append(self, data: st.DataObject, tokens: list[int], is_written: bool) -> None:
        key = self.drawn(data)

        def grow(pool: BlockPool, rank: int) -> bool:
            self.memories[rank].copy(pool.append(self.handles[key][rank], tokens))
            return True

        if self.on_all(grow):
            self.model[key] += tokens
            if is_written:
                self.written(key)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        key = self.drawn(data)
        length = data.draw(st.integers(0, len(self.model[key])))
        self.on_all(lambda pool, rank: pool.crop(self.handles[key][rank], length))
        del self.model[key][length:]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        key = self.drawn(data)
        self.written(key)
        handles = self.on_all(lambda pool, rank: pool.fork(self.handles[key][rank]))
        assert handles is not None
        self.model[handles[0].number] = self.model[key][:]
        self.handles[handles[0].number] = handles

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        key = self.drawn(data)
        self.on_all(lambda pool, rank: pool.free(self.handles[key][rank]))
        del self.model[key], self.handles[key]

    @precondition(lambda self: self.pools)
    @rule()
    def evict(self) -> None:
        """A prompt that needs all memory that nobody holds: none of it is lost."""
        pool, usage = self.pools[0], self.pools[0].usage()
        room = [f + c for f, c in zip(usage.free, usage.cached, strict=True)]
        num_blocks = 0
        while room[pool.dealing.owner(num_blocks)]:
            room[pool.dealing.owner(num_blocks)] -= 1
            num_blocks += 1
        if num_blocks:
            tokens = [7] * (num_blocks * usage.block)
            handles = self.on_all(lambda pool, _: pool.add(tokens))
            assert handles is not None
            self.on_all(lambda pool, rank: pool.free(handles[rank]))

    def drawn(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.model)))

    @invariant()
    def contents_are_those_of_the_model(self) -> None:
        for key, tokens in self.model.items():
            handles = self.handles[key]
            assert list(handles[0].tokens) == tokens
            found = {
                p: t for m, h in zip(self.memories, handles, strict=True) for p, t in m.read(h)
            }
            num_written = handles[0].num_written
            assert [found[p] for p in range(num_written)] == tokens[:num_written]
            assert sorted(found) == [*range(len(tokens))]

    @invariant()
    def no_block_is_lost(self) -> None:
        for pool in self.pools:
            check_counts(pool, [pool_handles[0] for pool_handles in self.of(pool)])

    def of(self, pool: BlockPool) -> list[list[PooledSequence]]:
        rank = self.pools.index(pool)
        return [[handles[rank]] for handles in self.handles.values()]

    @invariant()
    def ranks_agree(self) -> None:
        assert all(state_of(pool) == state_of(self.pools[0]) for pool in self.pools[1:])


def state_of(pool: BlockPool) -> Any:
    """Everything that decides what a pool does next."""
    nodes = [
        (rank, index, node.tokens, len(node.children), index in blocks.cached)
        for rank, blocks in enumerate(pool._blocks.ranks)
        for index, node in sorted(blocks.nodes.items())
    ]
    order = [list(blocks.cached) for blocks in pool._blocks.ranks]
    sequences = [
        (number, list(x.tokens), [*map(tuple, x.blocks)], x.num_written, len(x.nodes))
        for number, x in pool._sequences.items()
    ]
    return pool.usage(), nodes, order, sequences


def check_counts(pool: BlockPool, sequences: list[PooledSequence]) -> None:
    """Each block is held as often as tables name it, and is otherwise cached or free."""
    usage = pool.usage()
    for rank, blocks in enumerate(pool._blocks.ranks):
        named = Counter(i for x in sequences for i in pool.block_table(x, rank).tolist())
        assert named == Counter({i: n for i, n in enumerate(blocks.counts) if n})
        assert usage.held[rank] == len(named)
        assert usage.shared[rank] == sum(count > 1 for count in named.values())
        assert not set(blocks.cached) & set(named)
        assert usage.held[rank] + usage.cached[rank] + usage.free[rank] == usage.num_blocks
        # What is cached can be found, from the root on.
        for index, node in blocks.nodes.items():
            assert (node.rank, node.index) == (rank, index)
            while node.parent is not None:
                assert node.parent.children[node.tokens] is node
                node = node.parent
            assert node is pool._blocks.root


def test_random_walks(request: pytest.FixtureRequest) -> None:
    Walk.walked.clear()
    run_state_machine_as_test(
        Walk,
        settings=settings(
            max_examples=-(-request.config.getoption("--pool-steps") // STEPS),
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=True,
            database=None,
        ),
    )
    request.node.user_properties.append(("steps of pools", Walk.walked["steps of pools"]))


class Memory:
    """What a rank has written, by block and place in it."""

    def __init__(self, pool: BlockPool, rank: int) -> None:
        self.pool, self.rank = pool, rank
        self._content: dict[tuple[int, int], int] = {}

    def places(self, sequence: PooledSequence) -> Iterator[tuple[int, tuple[int, int]]]:
        """This rank's positions of a sequence, and where they are; from the definition alone."""
        block, ranks = self.pool.dealing
        there_and_back = [*range(ranks), *reversed(range(ranks))]
        table = iter(self.pool.block_table(sequence, self.rank).tolist())
        for number in range(-(-len(sequence) // block)):
            if there_and_back[number % (2 * ranks)] == self.rank:
                index = next(table)
                for place in range(min(block, len(sequence) - number * block)):
                    yield number * block + place, (index, place)
        assert not list(table)

    def write(self, sequence: PooledSequence) -> None:
        for position, at in self.places(sequence):
            if position >= sequence.num_written:
                self._content[at] = sequence.tokens[position]

    def read(self, sequence: PooledSequence) -> Iterator[tuple[int, int | None]]:
        for position, at in self.places(sequence):
            yield position, self._content.get(at)

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        for rank, source, target in copies:
            if rank == self.rank:
                for place in range(self.pool.dealing.block):
                    self._content[target, place] = self._content.get((source, place), -1)
