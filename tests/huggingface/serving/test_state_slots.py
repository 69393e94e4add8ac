"""Slots of states: each sequence has the state after exactly the tokens that it has written."""

from __future__ import annotations

from array import array
from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_ring import OutOfBlocks
from dtensor_ring.extension import PooledSequence
from parallel_plans.huggingface.serving.state_slots import NO_TOKENS, KnownStates
from tests.drawn import examples

BLOCK, MAX_KNOWN = 2, 3


class Walk:
    """Sequences that come and go; a state is the tokens that it stands for."""

    def __init__(self, num_blocks: int, world_size: int) -> None:
        self.pool = KnownStates(num_blocks, BLOCK, world_size, MAX_KNOWN)
        self.table: dict[int, tuple[int, ...]] = {NO_TOKENS: ()}
        self.running: list[PooledSequence] = []

    def add(self, tokens: list[int]) -> None:
        with suppress(OutOfBlocks):
            self.running.append(self.pool.add(tokens))

    def compute(self, sequence: PooledSequence, most: int) -> None:
        """Write some of the tokens that are missing, as a step does."""
        number = self.pool.num_until(sequence, min(most, len(sequence) - sequence.num_written))
        self.copy()
        if number:
            end = sequence.num_written + number
            self.table[self.pool.slot(sequence)] = tuple(sequence.tokens[:end])
            self.pool.commit(sequence, end)

    def copy(self) -> None:
        for source, target in self.pool.take_copies():
            self.table[target] = self.table[source]

    def check(self) -> None:
        """Look at all at once: a copy that waits is as good as made."""
        table = dict(self.table)
        for source, target in self.pool._copies:
            table[target] = table[source]
        slots = [self.pool.slot(x) for x in self.running]
        for sequence, slot in zip(self.running, slots, strict=True):
            assert table[slot] == tuple(sequence.tokens[: sequence.num_written])
        known = self.pool._known
        assert len(known) <= MAX_KNOWN
        for node, slot in known.items():
            ends = b""
            while node.parent is not None:
                ends, node = node.tokens + ends, node.parent
            assert b"".join(x.to_bytes(8, "little") for x in table[slot]) == ends
        used = [NO_TOKENS, *slots, *known.values(), *self.pool._unused]
        assert sorted(used) == list(range(self.pool.num_slots))


STEPS = st.one_of(
    st.tuples(st.just("add"), st.lists(st.integers(0, 1), min_size=0, max_size=9)),
    st.tuples(st.sampled_from(["compute", "decode", "fork", "free"]), st.integers(0, 9)),
    st.tuples(st.just("expect"), st.integers(0, 9)),
)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(STEPS, max_size=40), st.sampled_from([5, 30]), st.integers(1, 2))
def test_states_are_those_of_the_tokens(
    steps: list[tuple[str, list[int] | int]], num_blocks: int, world_size: int
) -> None:
    walk = Walk(num_blocks, world_size)
    for kind, given_ in steps:
        if isinstance(given_, list):
            walk.add(given_)
        elif walk.running:
            sequence = walk.running[given_ % len(walk.running)]
            is_done = sequence.num_written == len(sequence)
            if kind == "compute":
                walk.compute(sequence, 1 + given_)
            elif kind == "expect":
                walk.pool.expect(sequence, walk.running[-1].tokens)
            elif kind == "free":
                walk.running.remove(sequence)
                walk.pool.free(sequence)
            elif is_done and kind == "fork":
                walk.running.append(walk.pool.fork(sequence))
            elif is_done and kind == "decode":
                with suppress(OutOfBlocks):
                    walk.pool.append(sequence, [given_ % 2])
                    walk.compute(sequence, 1)
        walk.check()


def test_prompts_go_on_from_known_states() -> None:
    """A state is kept where a prompt leaves another one, from the second prompt on."""
    walk, shared = Walk(99, 1), [1, 2, 3, 4, 5, 6]
    cached = []
    for own in (7, 8, 9):
        walk.add([*shared, own, own])
        cached.append(walk.running[-1].num_cached)
        while walk.running[-1].num_written < 8:
            walk.compute(walk.running[-1], 99)
    # The first one's last state is at the end of its 8 tokens, after its own ones.
    assert cached == [0, 0, 6]


def test_prompts_that_wait_need_no_second_computation() -> None:
    walk, shared = Walk(99, 1), [1, 2, 3, 4, 5, 6]
    walk.add([*shared, 7, 7])
    walk.pool.expect(walk.running[0], array("q", [*shared, 8]))
    walk.compute(walk.running[0], 99)
    assert walk.running[0].num_written == 6
    walk.add([*shared, 8])
    assert walk.running[1].num_cached == 6


def test_a_chat_goes_on_from_its_last_block() -> None:
    walk = Walk(99, 1)
    walk.add([1, 2, 3])
    walk.compute(walk.running[0], 99)
    for token in (4, 5, 6, 7):
        walk.pool.append(walk.running[0], [token])
        walk.compute(walk.running[0], 1)
    walk.pool.free(walk.running.pop())
    walk.add([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert walk.running[0].num_cached == 6
    assert len(walk.pool._known) == 1
