"""`generate` of models whose layers choose their keys: the tokens of the stock model."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from parallel_plans.huggingface import ContextParallelCache
from tests.families import BESIDE_POOLS, CHOOSES_BLOCKS, CHOOSES_POOLS, SELECTING
from tests.huggingface.generation.generating import decode_messages, sharded, stock, tokens
from tests.huggingface.generation.test_generate import check_turns, check_ways
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
