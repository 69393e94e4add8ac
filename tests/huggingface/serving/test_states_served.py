"""Models whose layers have states, as requests that come and go: the tokens of the stock model."""

from __future__ import annotations

from array import array
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_ring import OutOfBlocks
from dtensor_ring.extension import PooledSequence
from parallel_plans.huggingface.serving.state_slots import NO_TOKENS, KnownStates
from tests.drawn import examples
from tests.families import HYBRIDS
from tests.huggingface.generation.generating import sharded, stock
from tests.huggingface.serving.test_two_groups import MIXED, in_groups
from tests.huggingface.serving.workloads import (
    GREEDY,
    Arrival,
    Workload,
    alone_on,
    check_workload,
    prompt_of,
)
from tests.pool import on_ranks

REFUSED = {
    "MiniMax-01": "keeps a LinearAttentionLayer, which is not supported",
    "Zamba": "keeps a LinearAttentionLayer, which is not supported",
    "Inkling": "layers that add a bias by distance are not served from a pool",
    "Inkling, scaled": "layers that add a bias by distance are not served from a pool",
    "Inkling 2": "layers that add a bias by distance are not served from a pool",
    "Inkling 2, loop": "the model copies layers of its cache in its forward",
}
SERVED = [family for family in HYBRIDS if family not in REFUSED]
IN_ALL_RUNS = [("Falcon-H1", 3), ("Mamba 2", 1)]
OTHERS = {(family, 1 + i % 3) for i, family in enumerate(SERVED)} - {*IN_ALL_RUNS}


@pytest.mark.parametrize(
    ("family", "world_size"),
    [*IN_ALL_RUNS, *(pytest.param(*x, marks=pytest.mark.repeats) for x in sorted(OTHERS))],
)
@on_ranks()
def test_tokens_are_those_of_requests_alone(family: str) -> None:
    batch = check_workload(sharded(family), alone_on(stock(family)), MIXED)
    assert batch.counts.cached


@on_ranks(1)
def test_families_that_are_refused() -> None:
    for family, match in REFUSED.items():
        model = sharded(family)
        with pytest.raises(ValueError, match=match):
            model.generate_batch([[3, 4, 5]], max_new_tokens=2, **GREEDY)


SHARED = prompt_of(0, 22)
"""Five blocks of four tokens, and two more."""
NUM_SHARED = 20


@on_ranks(2)
def test_prefixes_are_computed_once() -> None:
    """What prompts begin with is computed once, if they wait together; a branch is found later."""
    own = [prompt_of(i, 4 + i) for i in range(2, 6)]
    arrivals = [Arrival(0, SHARED[:NUM_SHARED] + x, 3) for x in own]
    # The state after 8 tokens was not kept until a prompt has left the others there.
    arrivals += [Arrival(20 + 10 * i, SHARED[:8] + x, 3) for i, x in enumerate(own[:2])]
    arrivals = tuple(arrivals)
    workload = Workload(arrivals, spare=50, max_tokens=400)
    counts = check_workload(sharded("Qwen3-Next"), alone_on(stock("Qwen3-Next")), workload).counts
    lengths = [len(x) - 1 for x in own]  # the last token of a prompt is decoded
    assert counts.prefilled == NUM_SHARED + sum(lengths) + (8 + lengths[0]) + lengths[1]
    assert counts.cached == 3 * NUM_SHARED + 8


@on_ranks(2)
def test_bytes_of_states_do_not_grow() -> None:
    """A request takes as much for its states after 200 tokens as after 20."""
    found = []
    for length in (20, 200):
        model = sharded("Mamba 2")
        workload = Workload((Arrival(0, prompt_of(0, length), 9, 3),), spare=20, max_tokens=400)
        found.append(check_workload(model, alone_on(stock("Mamba 2")), workload).num_bytes)
    assert found[0] == found[1] > 0


class Planted(Exception):
    """Of a processor on all ranks."""


@on_ranks(1)
def test_a_batch_goes_on_after_an_error() -> None:
    """A step fails on all ranks, with prompts half computed: all are computed again."""
    model, alone, failed = sharded("Qwen3-Next"), alone_on(stock("Qwen3-Next")), []

    def raises(ids: Any, scores: Any) -> Any:
        if ids.shape[1] == 12 and not failed:
            failed.append(True)
            raise Planted
        return scores

    prompts = [prompt_of(0, 9), prompt_of(0, 8) + prompt_of(1, 30)]
    arrivals = tuple(Arrival(0, x, 8) for x in prompts)
    batch = Workload(arrivals, spare=9).batch(model)
    how = {"max_new_tokens": 8, **GREEDY}
    batch.add_request(prompts[0], "0", logits_processor=[raises], **how)
    batch.add_request(prompts[1], "1", **how)
    with pytest.raises(Planted):
        list(batch)
    outputs = {x.request_id: x.generated_tokens for x in batch}
    assert outputs == {str(i): alone(x, 0) for i, x in enumerate(arrivals)}


@on_ranks(2)
def test_a_prompt_that_both_groups_have() -> None:
    """A prompt that both groups have, up to its last token: its state moves alone.

    One that goes on with an answer: the second group has all of its keys, the first one not.
    """
    model, alone = sharded("Qwen3-Next"), alone_on(stock("Qwen3-Next"))
    prompt = prompt_of(0, 13)  # three blocks and a token, which is decoded
    answered = prompt + tuple(alone(Arrival(0, prompt, 4), 0))
    prompts = (prompt, prompt, answered, prompt)
    arrivals = [Arrival(9 * i, x, 6, 1 + 2 * (i == 3)) for i, x in enumerate(prompts)]
    with in_groups((0,), (1,)):
        batch = check_workload(model, alone, Workload(tuple(arrivals), spare=30))
    assert (batch.counts.prefilled, batch.counts.cached) == (12 + 4, 3 * 12)


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
