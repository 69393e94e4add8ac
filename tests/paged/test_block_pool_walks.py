"""Random walks over a pool, against a model that knows of sequences as lists of tokens only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
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
from dtensor_ring.paged.blocks import OutOfBlocks, PooledSequence
from tests.paged.pools import Memory

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
