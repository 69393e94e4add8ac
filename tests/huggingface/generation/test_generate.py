"""`generate` over a sharded cache: the tokens of the stock model, and ranks that do not agree."""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import DynamicCache

from dtensor_ring import RingError
from dtensor_ring.agreement.group_state import OTHERS_TIMEOUT
from parallel_plans.huggingface import ContextParallelCache
from parallel_plans.huggingface.core.versions import cache_name
from tests.families import BESIDE_POOLS, CHOOSES_BLOCKS, CHOOSES_POOLS, SELECTING, VOCABULARY
from tests.huggingface.generation.generating import (
    CAUSAL,
    NUM_NEW,
    PROMPT,
    check_bits,
    check_generated,
    decode_messages,
    exact_softmax,
    generate,
    sharded,
    stock,
    tokens,
)
from tests.pool import Pool, on_ranks
from tests.results import of_first_rank

CHOSEN = ("Llama", "Gemma 3", "gpt-oss", "Llama 4", "DeepSeek-V3")
"""Grouped heads; a window and everything; sinks; chunks; latents that are expanded."""
LEFT = torch.arange(PROMPT).expand(2, -1) >= torch.tensor([[5], [0]])
ONE = {"input_ids": tokens(rows=1)}
REPEATED = {"input_ids": tokens(4, rows=1).repeat(1, 4)}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "no cache": {"use_cache": False},
    "sampled": {"do_sample": True, "temperature": 2.0},
    "beams": {"num_beams": 2},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "two of each": {"num_return_sequences": 2, "do_sample": True},
    "prompt lookup": REPEATED | {"prompt_lookup_num_tokens": 3},
    "assisted": ONE | {"assistant_model": "OPT", "max_new_tokens": 9},
    "left padded": {"attention_mask": LEFT.long()},
    "left padded, no cache": {"attention_mask": LEFT.long(), "use_cache": False},
    "chunked prefill": {"prefill_chunk_size": 5},
    "left padded, chunked": {"attention_mask": LEFT.long(), "prefill_chunk_size": 4},
    "embeddings": {"input_ids": None, "inputs_embeds": True},
    "hidden states": {"output_hidden_states": True},
    "stops": {"stop_token": True, "min_new_tokens": 0},
}


def check_way(family: str, ours: Any, theirs: Any, way: str) -> None:
    found = generate(ours, **_options(ours, WAYS[way]))
    with exact_softmax():
        expected = of_first_rank(lambda: generate(theirs, **_options(theirs, WAYS[way])))
    check_generated(found, expected, f"{family}, {way}", 1e-4)


def _options(model: Any, way: dict[str, Any]) -> dict[str, Any]:
    """What a way asks of a model."""
    options = {"input_ids": tokens()} | way
    if "assistant_model" in options:
        options["assistant_model"] = stock(options["assistant_model"])
    if options.pop("inputs_embeds", None):
        options["inputs_embeds"] = model.get_input_embeddings()(tokens()).detach()
    if options.pop("stop_token", None):  # of rows that end at different steps
        options["eos_token_id"] = [2 * x for x in range(VOCABULARY // 2)]
    return options


@on_ranks(2)
def test_greedy_tokens_of_all_families() -> None:
    for family in CAUSAL:
        check_way(family, sharded(family), stock(family), "greedy")


def check_ways(family: str, ways: tuple[str, ...]) -> None:
    ours, theirs = sharded(family), stock(family)
    theirs.config.output_router_logits = False  # the stock model fails with it beside padding
    for way in ways:
        check_way(family, ours, theirs, way)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One family in all ways and others in some, or all of them in all."""
    ways = tuple(WAYS)
    some = "sampled beams", "assisted", "left padded", "chunked prefill"
    windowed = ways if metafunc.config.getoption("--all-cases") else some
    cases: list[Any] = [("Llama", 2, ways), ("Gemma 3", 3, windowed), ("DeepSeek-V3", 3, some)]
    cases += [("gpt-oss", 2, some), ("Llama 4", 3, some)]
    if metafunc.config.getoption("--all-generations"):
        cases = [(*case, ways) for case in product(CAUSAL, (2, 3))]
    if "ways" in metafunc.fixturenames:
        names = [f"{family}-{world_size}" for family, world_size, _ in cases]
        metafunc.parametrize(("family", "world_size", "ways"), cases, ids=names)
    if "layout" in metafunc.fixturenames:
        layouts = {"zigzag": 4, "balanced": 2}
        if metafunc.config.getoption("--all-generations"):
            layouts |= {"contiguous": 1, "striped": 2, "block_cyclic:2": 3}
        metafunc.parametrize(("layout", "world_size"), list(layouts.items()))


@on_ranks()
def test_ways_to_generate(family: str, ways: tuple[str, ...]) -> None:
    check_ways(family, ways)


TURNS = (2, 1, 9, 1, 2, 7, 1, 1, 4, 9, 1)
"""New tokens of each forward: the first, and more than four, are sharded over ranks. Of four ranks
two have none of the first two tokens, and one still has none when the third is decoded."""
IN_FLOAT32 = ("Llama 4", "DeepSeek-V3", *SELECTING, *CHOOSES_BLOCKS, *CHOOSES_POOLS, *BESIDE_POOLS)
FLOAT32 = dict.fromkeys(IN_FLOAT32, 1e-6) | {"GLM-5-Next": 1e-5, "DeepSeek-V4": 1e-5}
"""Errors of models that compute rotations or routers in float32 whatever their dtype."""


def stock_turns(model: Any, batch: dict[str, Tensor], mask: Tensor | None) -> Tensor:
    """Logits of a stock model, whose tokens come as many at a time as `TURNS` says."""
    cache, end, parts = DynamicCache(config=model.config), 0, []
    for num_tokens in TURNS:
        new = {name: x[:, end : end + num_tokens] for name, x in batch.items()}
        end += num_tokens
        seen = {} if mask is None else {"attention_mask": mask[:, :end].long()}
        parts.append(model(**new, **seen, **{cache_name(model): cache}, use_cache=True).logits)
    return torch.cat(parts, 1)


@torch.no_grad()
def check_turns(family: str, layout: str, num_padding: int, in_turns: bool = False) -> None:
    """Logits of one forward of the whole, however many tokens come at a time.

    Or those of the stock model in as many forwards.
    """
    ours, theirs = sharded(family, layout), stock(family)
    ids = tokens(sum(TURNS))
    mask = torch.arange(len(ids[0])).expand(2, -1) >= torch.tensor([[num_padding], [0]])
    batch = {"input_ids": ids, "position_ids": (mask.long().cumsum(1) - 1).clamp(min=0)}
    with exact_softmax():
        whole = batch | {"attention_mask": mask.long(), "use_cache": False}
        seen = mask if num_padding else None
        makes = {
            False: lambda: theirs(**whole).logits,
            True: lambda: stock_turns(theirs, batch, seen),
        }
        expected = of_first_rank(makes[in_turns])
    cache, end, parts = ContextParallelCache(ours, decode_tokens=4, block=2), 0, []
    for num_tokens in TURNS:
        new = {name: x[:, end : end + num_tokens] for name, x in batch.items()}
        end += num_tokens
        seen = {"attention_mask": mask[:, :end].long()} if num_padding else {}
        parts.append(ours(**new, **seen, cache=cache).logits)
        assert cache.get_seq_length() == end
    found = torch.cat(parts, 1)
    check_bits(found)
    error = (found - expected)[mask].abs().max().item()
    assert error < FLOAT32.get(family, 1e-10), f"{family}, {num_padding} tokens of padding: {error}"


def check_all_turns(layout: str, families: tuple[str, ...]) -> None:
    for number, family in enumerate(families):
        check_turns(family, layout, number % 2)


MORE = ("Gemma 2", "Mistral, short window")


def test_turns_equal_one_forward(
    pool: Pool, request: pytest.FixtureRequest, layout: str, world_size: int
) -> None:
    """Every second family over four ranks and the others over two, or all over both."""
    families = (*CHOSEN, *MORE)
    if not any(map(request.config.getoption, ("--all-cases", "--all-generations"))):
        families = families[world_size <= 2 :: 2]
    turned = families[::-1] if world_size > 2 else families
    pool.run(world_size, check_all_turns, layout, turned)


class OtherToken(transformers.LogitsProcessor):
    """Chooses another token on the last rank, at a step."""

    def __init__(self, step: int, token: int) -> None:
        self.left, self.token = step, token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0 and dist.get_rank() == dist.get_world_size() - 1:
            scores[:, self.token] = scores.max() + 1
        return scores


class Raises(OtherToken):
    """Raises there."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0 and dist.get_rank() == dist.get_world_size() - 1:
            raise KeyError("planted")
        return scores


PLANTED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "another token": (OtherToken(3, 7), {}, "differ in tokens given as agree: .* rank"),
    "another last token": (OtherToken(NUM_NEW, 7), {}, "differ in tokens: .* rank"),
    "an early end": (
        OtherToken(3, 1),
        {"eos_token_id": 1, "min_new_tokens": 0},
        "differ in direction: .*the end of generate",
    ),
    "an error": (Raises(3, 0), {}, "KeyError: 'planted'"),
}


@pytest.mark.parametrize("name", PLANTED)
@on_ranks(3)
def test_ranks_that_drift_apart(name: str) -> None:
    planted, options, match = PLANTED[name]
    ours = sharded("Llama")
    is_last = dist.get_rank() == dist.get_world_size() - 1
    expected = KeyError if name == "an error" and is_last else RingError
    with pytest.raises(expected, match="planted" if expected is KeyError else match):
        generate(ours, input_ids=tokens(), logits_processor=[planted], **options)


def fails(batch: int, ids: Tensor) -> list[int]:
    raise KeyError("planted on all")


@on_ranks(2)
def test_ranks_that_begin_differently() -> None:
    """What differs before the first token is named, and the group goes on."""
    ours, rank = sharded("Llama"), dist.get_rank()
    for changes, match in (
        ({"input_ids": tokens() + rank}, "differ in input_ids: .*checksum"),
        ({"max_new_tokens": 3 + rank}, "differ in max_new_tokens: 3 on .0., 4 on .1."),
        ({"stop_strings": ["a" * (1 + rank)]}, "differ in stop_strings"),
        ({"logits_processor": [Raises(9, 0)][rank:]}, "differ in logits_processor"),
    ):
        with pytest.raises(ValueError, match=match):
            generate(ours, **{"input_ids": tokens()} | changes)
    torch.manual_seed(rank)
    asked = {"input_ids": tokens(), "max_new_tokens": 2}
    with pytest.raises(ValueError, match=r"torch.manual_seed\(s\), one s .* random state"):
        ours.generate(**asked, do_sample=True)
    found = ours.generate(**asked)
    check_bits(found)
    # Late: what all ranks are refused alike is no failure.
    time.sleep((OTHERS_TIMEOUT + 0.2) * rank)
    with pytest.raises(ValueError, match="max_time would stop"):
        ours.generate(**asked, max_time=1.0)
    with pytest.raises(KeyError, match="planted on all"):  # the group stays in order
        ours.generate(**asked, prefix_allowed_tokens_fn=fails)
    assert torch.equal(ours.generate(**asked), found)


OTHER_TURNS = {
    "tokens": (70, 70, "differ in input_ids"),
    "a number": (70, 2, "differ in direction"),
}


@pytest.mark.parametrize("name", OTHER_TURNS)
@on_ranks(3)
@torch.no_grad()
def test_other_turns_of_a_cache(name: str) -> None:
    """All ranks raise, after whatever number of forwards on which they agreed."""
    ours, is_last = sharded("Gemma 3"), dist.get_rank() == dist.get_world_size() - 1
    first, last, match = OTHER_TURNS[name]
    cache = ContextParallelCache(ours)
    ours(tokens(), cache=cache)
    with pytest.raises(RingError, match=match):
        ours(tokens(last).flip(1) if is_last else tokens(first), cache=cache)
    assert cache.get_seq_length() == 13


@on_ranks(2)
def test_one_message_for_each_full_layer() -> None:
    full = {"Llama": 2, "Gemma 3": 1, "Mistral, short window": 0, "DeepSeek-V3": 2}
    for family, expected in full.items():
        found = decode_messages(sharded(family), {"input_ids": tokens()})
        assert found == [expected] * 3, family
