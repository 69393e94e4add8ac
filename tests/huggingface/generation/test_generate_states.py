"""`generate` of models whose layers carry a state: prompts in parallel, then token by token."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from parallel_plans.huggingface import ContextParallelCache
from parallel_plans.huggingface.core.versions import cache_name
from tests.families import HYBRIDS
from tests.huggingface.generation.generating import exact_softmax, generate, sharded, stock, tokens
from tests.huggingface.generation.test_generate import FLOAT32, check_turns, check_ways
from tests.pool import on_ranks

LOOP = "Inkling 2, loop"
OTHERS = ("MiniMax-01", "Zamba", "Granite 4, attention only", LOOP)
"""A cache of its own and attention without a number, which are not served; no state; and layers
that run several times, which are served without a cache."""
FAMILIES = tuple(x for x in HYBRIDS if x not in OTHERS)
WAYS = ("greedy", "sampled beams", "left padded", "chunked prefill", "two of each", "stops")
SAMPLE = [("Qwen3-Next", 2), ("Granite 4", 3), ("Mamba 2", 2), ("Inkling 2", 2)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A delta rule, Mamba 2 beside attention and alone, a bias by distance, or all families."""
    if "world_size" in metafunc.fixturenames:
        is_all = metafunc.config.getoption("--all-generations")
        cases = [*product(FAMILIES, (2, 3))] if is_all else SAMPLE
        metafunc.parametrize(("family", "world_size"), cases)


@on_ranks()
def test_ways_to_generate(family: str) -> None:
    # Stock caches of states alone cannot be asked how many tokens they have.
    unserved = (*ANEW, "Mamba 2")
    left_out = ("chunked prefill",) if family in unserved else ()
    check_ways(family, tuple(x for x in WAYS if x not in left_out))


ANEW = ("Jamba", "Mamba", "FalconMamba")
"""Stock layers of Mamba 1 begin again in each forward of several tokens, so the whole is compared.
In other families forwards are: stock Zamba2 has a least time step, `time_step_min`, for several
tokens, and none for a single one, which is 3e-3 of its logits here."""


@on_ranks()
def test_turns_equal_one_forward(family: str) -> None:
    """Few tokens on all ranks, many sharded, after those that are cached."""
    # Scans compute in float32 whatever the dtype.
    FLOAT32.update(dict.fromkeys(HYBRIDS, 5e-6))
    for layout, padding in (("contiguous", 0), ("zigzag", 1)):
        check_turns(family, layout, padding, in_turns=family not in ANEW)


def states_of(cache: Any) -> list[Tensor]:
    """Those that a stock cache keeps, with the columns that the next token reads."""
    found = []
    for layer in cache.layers:
        for x in getattr(layer, "conv_states", {}).values():
            found += [] if x is None else [x[..., 1:]]
        found += [x for x in getattr(layer, "recurrent_states", {}).values() if x is not None]
    return found


@on_ranks()
@torch.no_grad()
def test_states_are_those_of_one_process(family: str) -> None:
    """In one layout; both are compared by turns."""
    layout = "zigzag" if family in ("Qwen3-Next", "Inkling 2") else "contiguous"
    ours, theirs = sharded(family, layout), stock(family)
    for number in (2, 11, 24):
        expected = DynamicCache(config=theirs.config)
        with exact_softmax():
            theirs(input_ids=tokens(number), **{cache_name(theirs): expected}, use_cache=True)
        cache = ContextParallelCache(ours)
        ours(input_ids=tokens(number), cache=cache)
        pairs = [*zip(states_of(cache.whole()), states_of(expected), strict=True)]
        assert pairs
        for found, state in pairs:
            torch.testing.assert_close(found, state, rtol=1e-4, atol=1e-5)
        other = ContextParallelCache(ours)
        other.load_state_dict(cache.state_dict())
        next_ones = [ours(input_ids=tokens(1), cache=x).logits for x in (cache, other)]
        assert torch.equal(*next_ones)


@on_ranks(2)
def test_refused() -> None:
    """To take tokens back out of a state, and a cache of a model's own."""
    model = sharded("Granite 4")
    cache = ContextParallelCache(model)
    with torch.no_grad():
        model(input_ids=tokens(8), cache=cache)
    with pytest.raises(ValueError, match="away from the states of layers"):
        cache.crop(-1)
    cache.crop(-8)
    assert cache.get_seq_length() == 0
    assert not cache.memory.states
    for family in OTHERS[:2]:
        with pytest.raises(ValueError, match=r"keeps a LinearAttention.* use_cache=False"):
            generate(sharded(family), input_ids=tokens())


@pytest.mark.skipif(LOOP not in HYBRIDS, reason="since transformers 5.24")
@on_ranks(2)
def test_layers_that_run_several_times_generate_without_a_cache() -> None:
    ours, theirs = sharded(LOOP), stock(LOOP)
    with pytest.raises(ValueError, match=r"copies layers of its cache .* use_cache=False"):
        generate(ours, input_ids=tokens())
    with exact_softmax():
        expected = generate(theirs, input_ids=tokens(), use_cache=False).sequences
    assert torch.equal(generate(ours, input_ids=tokens(), use_cache=False).sequences, expected)
