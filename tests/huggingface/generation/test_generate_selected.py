"""`generate` of models whose layers choose keys or carry a state: the stock model's tokens."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from parallel_plans.huggingface import ContextParallelCache
from parallel_plans.huggingface.core.versions import cache_name
from tests.families import BESIDE_POOLS, CHOOSES_BLOCKS, CHOOSES_POOLS, HYBRIDS, SELECTING
from tests.huggingface.generation.generating import (
    decode_messages,
    exact_softmax,
    generate,
    sharded,
    stock,
    tokens,
)
from tests.huggingface.generation.test_generate import FLOAT32, check_turns, check_ways
from tests.pool import on_ranks
from tests.results import of_first_rank

SOME = ("greedy", "left padded", "chunked prefill")
OF_DEEPSEEK = ("greedy", "no cache", "beams", "assisted", "left padded", "chunked prefill")
OF_BLOCKS = ("greedy", "no cache", "beams", "assisted", "chunked prefill")
"""The prompt of 13 tokens ends within a block of 4, and so do chunks of 5."""
OF_POOLS = ("greedy", "no cache", "beams", "chunked prefill")
"""States cannot be taken back, as assisted decoding does."""


# One family with an index in each layer, one with layers that share it, one with blocks, and two
# with pools.
GENERATED = {"DeepSeek-V3.2": 3, "GLM-5": 2, "MiniMax M3": 2, "GLM-5-Next": 2, "Qwen4-Exp": 2}
GENERATED |= {"DeepSeek-V4": 2}


@pytest.mark.parametrize(
    ("family", "world_size"),
    [
        pytest.param(x, GENERATED.get(x, 2), marks=() if x in GENERATED else pytest.mark.repeats)
        for x in (*SELECTING, *CHOOSES_BLOCKS, *CHOOSES_POOLS, *BESIDE_POOLS)
    ],
)
@on_ranks()
def test_ways_to_generate(family: str) -> None:
    ways = {"DeepSeek-V3.2": OF_DEEPSEEK, "MiniMax M3": OF_BLOCKS}.get(family, SOME)
    ways = OF_POOLS if family in {**CHOOSES_POOLS, **BESIDE_POOLS} else ways
    check_ways(family, ways + ("left padded",) * (family in CHOOSES_POOLS))


EVERYONE = (*SELECTING, *CHOOSES_BLOCKS, *CHOOSES_POOLS, *BESIDE_POOLS)


@pytest.mark.parametrize(
    ("world_size", "families"),
    [
        pytest.param(2, tuple(GENERATED), id="2"),
        *(pytest.param(x, EVERYONE, id=f"all-{x}", marks=pytest.mark.repeats) for x in (2, 4)),
    ],
)
@on_ranks()
def test_turns_equal_one_forward(families: tuple[str, ...]) -> None:
    """Parts of a sequence, sharded or not, choose the keys that the whole chooses."""
    for number, family in enumerate(families):
        check_turns(family, "zigzag", number % 2 if family in SELECTING else 0)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        pytest.param("DeepSeek-V3.2", 6, marks=pytest.mark.repeats),
        ("GLM-5", 5),
        ("MiniMax M3", 5),
    ],
)
@on_ranks(2)
def test_messages_of_a_token(family: str, expected: int) -> None:
    """One for each attention, and one for each index, which one of the three layers has not."""
    counts = decode_messages(sharded(family), {"input_ids": tokens()})
    assert counts == [expected] * 3


LENGTHS = 2, 12, 20
"""Of prompts: each pool of 3, 4 or 5 tokens ends with one of them, and holds the end of another."""


@pytest.mark.parametrize(
    "family",
    [
        *CHOOSES_POOLS,
        *BESIDE_POOLS,
        *(pytest.param(family, marks=pytest.mark.repeats) for family in CHOOSES_BLOCKS),
    ],
)
@on_ranks(3)
def test_prompts_that_end_within_a_pool(family: str) -> None:
    ours, theirs = sharded(family), stock(family)
    how: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    for length in LENGTHS:
        prompt = tokens(length)
        expected = of_first_rank(partial(theirs.generate, prompt, **how))
        assert torch.equal(ours.generate(prompt, **how), expected), length


@torch.no_grad()
def kept_bytes(family: str) -> int:
    """Bytes of the cache of two rows of 24 tokens on all ranks."""
    model = sharded(family)
    cache = ContextParallelCache(model, block=2)
    model(tokens(24), cache=cache)
    return sum(cache.usage().used)


@on_ranks(2)
def test_keys_of_an_index_are_counted() -> None:
    """Two layers of three keep them beside latents: 8 numbers of a token, and 8 + 4 in float64."""
    latents, index = 3 * (8 + 4), 2 * 8
    assert kept_bytes("GLM-5") == 2 * 24 * 8 * (latents + index)


@on_ranks(2)
def test_what_pools_are_made_of_is_counted() -> None:
    """Windows, which both ranks hold, and of each token what pools of two layers are made of."""
    keys_and_gates, of_position = (2 * 8, 4 * 8, 4 * 8), 3
    windows = 2 * 3 * 2 * 24 * 2 * 8 * 8
    rows = 2 * 24 * 8 * sum(x + of_position for x in keys_and_gates)
    assert kept_bytes("DeepSeek-V4") == windows + rows


LOOP = "Inkling 2, loop"
OTHERS = ("MiniMax-01", "Zamba", "Granite 4, attention only", LOOP)
"""Families without a case here: the first two are not served (one has its own cache, one has
attention without a layer number), the third has no state, the last runs layers several times."""
FAMILIES = tuple(x for x in HYBRIDS if x not in OTHERS)
WAYS = ("greedy", "sampled beams", "left padded", "chunked prefill", "two of each", "stops")
SAMPLE = [("Qwen3-Next", 2), ("Granite 4", 3), ("Mamba 2", 2), ("Inkling 2", 2)]


over_ranks = pytest.mark.parametrize(
    ("family", "world_size"),
    [
        pytest.param(*x, marks=() if x in SAMPLE else pytest.mark.needs("--all-generations"))
        for x in product(FAMILIES, (2, 3))
    ],
)
"""A delta rule, Mamba 2 beside attention and alone, a bias by distance, or all families."""


@over_ranks
@on_ranks()
def test_ways_with_states(family: str) -> None:
    # Stock caches of states alone cannot be asked how many tokens they have.
    unserved = (*ANEW, "Mamba 2")
    left_out = ("chunked prefill",) if family in unserved else ()
    check_ways(family, tuple(x for x in WAYS if x not in left_out))


ANEW = ("Jamba", "Mamba", "FalconMamba")
"""Stock layers of Mamba 1 begin again in each forward of several tokens, so the whole is compared.
In other families forwards are: stock Zamba2 has a least time step, `time_step_min`, for several
tokens, and none for a single one, which is 3e-3 of its logits here."""


@over_ranks
@on_ranks()
def test_turns_with_states(family: str) -> None:
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


@over_ranks
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
