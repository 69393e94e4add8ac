"""A cache that is sharded along the sequence, as users of transformers handle it."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from itertools import count, product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, LlamaModel, MaxTimeCriteria, StaticCache

from dtensor_ring import ShardedCache
from dtensor_ring.compute.kernels import KERNELS
from parallel_plans.huggingface import ContextParallelCache
from parallel_plans.huggingface.core.versions import cache_name, parameter_of_cache, with_cache
from parallel_plans.huggingface.generation import cache_memory as window
from parallel_plans.huggingface.generation.cache_memory import WindowCache
from tests.families import SMALL
from tests.huggingface.generation.generating import (
    CACHE,
    NUM_NEW,
    check_bits,
    generate,
    sharded,
    stock,
    tokens,
)
from tests.pool import on_ranks

NAMES = ("cache", "past_key_values")
LEFT = torch.ones(2, 13, dtype=torch.long)
HOLE = LEFT.index_fill(1, torch.tensor(4), 0)
RIGHT = LEFT.index_fill(1, torch.tensor(12), 0)
GENERATE: dict[str, dict[str, Any]] = {
    "max_time would stop ranks": {"max_time": 3.0},
    "max_time .* max_new_tokens": {"stopping_criteria": [MaxTimeCriteria(3.0)]},
    "cache_implementation='static' is not": {"cache_implementation": "static"},
    "cache_implementation='offloaded' is not": {"cache_implementation": "offloaded"},
    "cache_implementation='quantized' is not": {"cache_implementation": "quantized"},
    "cache_implementation='paged' is not": {"cache_implementation": "paged"},
    "output_attentions is not": {"output_attentions": True},
    "no padding but on the left": {"attention_mask": HOLE},
    f"{CACHE} is a DynamicCache": {"cache": DynamicCache()},
    "cache and past_key_values are names of one": dict.fromkeys(NAMES, DynamicCache()),
}
FORWARD: dict[str, dict[str, Any]] = {
    f"{CACHE} is a DynamicCache, .* ContextParallelCache.model": {"cache": DynamicCache()},
    "is a EncoderDecoderCache": {"cache": EncoderDecoderCache(DynamicCache(), DynamicCache())},
    "cache and past_key_values are names of one": dict.fromkeys(NAMES, DynamicCache()),
    "tokenizer.padding_side": {"use_cache": True, "attention_mask": RIGHT},
    r"attention_mask must be \(B, 13\), of all": {
        "use_cache": True,
        "attention_mask": LEFT[:, 1:],
    },
    r"attention_mask must be one tensor \(B, S\) of": {
        "use_cache": True,
        "attention_mask": LEFT.view(2, 1, 1, 13),
    },
    "output_router_logits is not .* with a cache": {
        "use_cache": True,
        "output_router_logits": True,
    },
    "logits_to_keep must be a number": {"use_cache": True, "logits_to_keep": torch.arange(2)},
}


@on_ranks(2)
def test_refused() -> None:
    ours = sharded("Llama")
    ours.generation_config.pad_token_id = 0
    for match, changes in GENERATE.items():
        with pytest.raises(ValueError, match=match):
            generate(ours, **{"input_ids": tokens()} | changes)
    static = StaticCache(config=ours.config, max_cache_len=32)
    with pytest.raises(ValueError, match=f"{CACHE} is a StaticCache"):
        generate(ours, input_ids=tokens(), cache=static)
    ours.generation_config.cache_implementation = "static"
    with pytest.raises(ValueError, match='say "dynamic" if it comes from'):
        generate(ours, input_ids=tokens())
    ours.generation_config.cache_implementation = None
    with torch.no_grad():
        for match, changes in FORWARD.items():
            with pytest.raises(ValueError, match=match):
                ours(**{"input_ids": tokens()} | changes)
        with pytest.raises(ValueError, match=f"{CACHE} is a StaticCache"):
            ours(tokens(), cache=static)
        with pytest.raises(ValueError, match="labels is not supported together with a cache"):
            ours(tokens(), labels=tokens(), cache=ContextParallelCache(ours))
    with pytest.raises(ValueError, match=r"under torch.no_grad\(\)"):
        ours(tokens(), use_cache=True)
    assert generate(ours, input_ids=tokens()).sequences.shape == (2, 13 + NUM_NEW)


@on_ranks(3)
@torch.no_grad()
def test_misused() -> None:
    ours, other = sharded("Llama, dynamic"), sharded("Qwen2")
    cache = ContextParallelCache(ours)
    for nothing in (cache.batch_select_indices, cache.reorder_cache):
        nothing(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    angles = ours.model.rotary_emb(torch.zeros(1), torch.arange(9).view(1, 9))
    first = ours(tokens(), past_key_values=cache).logits  # the name before 5.24
    drafted = partial(generate, ours, input_ids=tokens(20), cache=cache)
    mask, padded = torch.ones(2, 14, dtype=torch.long), ContextParallelCache(ours)
    mask[0, :3] = 0
    ours(tokens(), attention_mask=mask[:, :13], cache=padded)
    wrong: tuple[tuple[str, Any], ...] = (
        ("of another model", lambda: other(tokens(), cache=cache)),
        ("a cache of 2 rows got 3", lambda: ours(tokens(5, 3), cache=cache)),
        ("crop takes 0 to 13 tokens", lambda: cache.crop(-14)),
        ("crop takes .* got 2", lambda: cache.crop(2)),
        ("decode_tokens must be from 1 to 64", lambda: ContextParallelCache(ours, decode_tokens=0)),
        ("block must", lambda: ContextParallelCache(ours, block=0)),
        ("one model under a context_parallel_plan", lambda: ContextParallelCache(stock("Llama"))),
        ("must be from 0 to 31", lambda: ours(tokens(1) + 99, cache=cache)),
        (r"hides \[3, 0\] .* \[0, 0\]", lambda: ours(tokens(1), attention_mask=mask, cache=cache)),
        (r"hides \[0, 0\] .* \[3, 0\]", lambda: ours(tokens(1), cache=padded)),
        ("prompt_lookup_num_tokens .* 13", lambda: drafted(prompt_lookup_num_tokens=3)),
        ("assistant_model is not supp", lambda: drafted(assistant_model=stock("OPT"))),
    )
    for match, call in wrong:
        with pytest.raises(ValueError, match=match):
            call()
    layer = ours.model.layers[1]
    hook = layer.register_forward_pre_hook(_fail)
    for new in (1, 70):  # neither a decoded nor a sharded append step leaves anything behind
        with pytest.raises(ZeroDivisionError):
            ours(tokens(new), cache=cache)
    hook.remove()
    assert cache.get_seq_length() == 13
    again = ours.model.rotary_emb(torch.zeros(1), torch.arange(9).view(1, 9))
    assert torch.equal(again[0], angles[0]), "not those of the forward that failed"
    hook = layer.register_forward_pre_hook(lambda *_: deepcopy(cache.layers[1]))
    with pytest.raises(ValueError, match=r"copies layers of its cache .* use_cache=False"):
        ours(tokens(1), cache=cache)
    hook.remove()
    with (
        mock.patch.object(cache, "update", lambda *new, **_: new[:2]),
        pytest.raises(ValueError, match=r"attends to 1 keys per rank where .* use_cache=False"),
    ):
        ours(tokens(1), cache=cache)
    # A copy goes on by itself, as one of transformers does.
    copied = deepcopy(cache)
    second = ours(tokens(2), cache=copied).logits
    assert (cache.get_seq_length(), copied.get_seq_length()) == (13, 15)
    torch.testing.assert_close(ours(tokens(2), cache=cache).logits, second)
    cache.crop(-2)
    torch.testing.assert_close(ours(tokens(2), cache=cache).logits, second)
    cache.reset()
    assert torch.equal(ours(tokens(), cache=cache).logits, first)
    assert cache.batch_size == 2


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


@on_ranks(2)
@torch.no_grad()
def test_half_done() -> None:
    """What fails in some layer is done in none: forwards, and choices of rows."""
    cases: tuple[tuple[str, Any, str, int, Any], ...] = (
        (
            "Mistral, short window",
            window,
            "_from",
            2,
            lambda x, cache: x(tokens(2), cache=cache),
        ),
        ("Gemma 3", ShardedCache, "select", 1, lambda _, cache: cache.batch_repeat_interleave(2)),
        ("Gemma 3", WindowCache, "selected", 1, lambda _, cache: cache.batch_repeat_interleave(2)),
    )
    for family, owner, name, number, call in cases:
        ours = sharded(family)
        cache = ContextParallelCache(ours)
        ours(tokens(), cache=cache)
        expected = ours(tokens(2), cache=deepcopy(cache)).logits
        plain, calls = getattr(owner, name), count(1)
        fails = lambda *args: _fail() if next(calls) == number else plain(*args)  # noqa: B023, E731
        with mock.patch.object(owner, name, fails), pytest.raises(ZeroDivisionError):
            call(ours, cache)
        assert torch.equal(ours(tokens(2), cache=cache).logits, expected), name


@on_ranks(2)
@torch.no_grad()
def test_models_with_kernels_of_their_own() -> None:
    """The plan of another model over the same ranks names another kernel, which is not used."""
    ours, _ = sharded("Gemma 3", kernel="reference"), sharded("Gemma 3", kernel="cpu_flash")
    cache = ContextParallelCache(ours)
    with mock.patch.object(KERNELS["cpu_flash"], "forward", _fail):
        for number in (13, 1):
            assert ours(tokens(number), cache=cache).logits.isfinite().all()


@on_ranks(2)
def test_lookup() -> None:
    """More tokens are proposed, and taken back, than a decode step takes."""
    ours, theirs = sharded("Gemma 3"), stock("Gemma 3")
    options = {"input_ids": tokens(4, rows=1).repeat(1, 4), "prompt_lookup_num_tokens": 3}
    found = generate(ours, **options, cache=ContextParallelCache(ours, decode_tokens=1))
    assert torch.equal(found.sequences, generate(theirs, **options).sequences)


@on_ranks(3)
def test_bytes() -> None:
    """Each rank has its part of what sees everything, in blocks, and all of the windows."""
    ours, size = sharded("Gemma 3"), dist.get_world_size()
    chat = ContextParallelCache(ours, block=4)
    result = generate(ours, input_ids=tokens(40), past_key_values=chat)
    assert chat.get_seq_length() == 39 + NUM_NEW
    usage = chat.usage()
    pair, window = 2 * 2 * 2 * 8 * 8, 4  # rows, heads, keys and values, head dim, bytes; tokens
    assert sum(usage.used) == pair * (39 + NUM_NEW + size * window)
    assert max(usage.held) <= pair * (-(-(39 + NUM_NEW) // size) + 2 * 4 + window)
    assert result[CACHE] is chat


@on_ranks(2)
@torch.no_grad()
def test_rows() -> None:
    """Rows are chosen, doubled and cropped as in a cache of transformers, windows included."""
    for family in ("Gemma 3", "Llama 4"):
        ours, theirs = sharded(family), stock(family)
        pairs: list[tuple[Any, Any]] = []
        for model, cache in (
            (ours, ContextParallelCache(ours, block=2)),
            (theirs, DynamicCache(config=theirs.config)),
        ):
            cache.activate_past_recording()
            model(tokens(20, 3), logits_to_keep=4, **with_cache(model, {"cache": cache}))
            cache.crop(-3)
            cache.batch_select_indices(torch.tensor([2, 0]))
            cache.batch_repeat_interleave(2)
            cache.reorder_cache(torch.tensor([3, 1, 0, 0]))
            pairs.append((model, cache))
        found, expected = (
            [model(tokens(n, 4), **with_cache(model, {"cache": cache})).logits for n in (1, 3, 1)]
            for model, cache in pairs
        )
        for here, there in zip(found, expected, strict=True):
            check_bits(here)
            torch.testing.assert_close(here, there, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="layers with a window of 12 have the last"):
        pairs[0][1].crop(-20)


@on_ranks(3)
def test_a_chat() -> None:
    """Answers of several turns, then the next question: as of the stock model."""
    for family in ("Llama", "Gemma 3", "DeepSeek-V3"):
        ours, theirs = sharded(family), stock(family)
        answers = []
        for model, chat in (
            (ours, ContextParallelCache(ours, decode_tokens=4)),
            (theirs, DynamicCache(config=theirs.config)),
        ):
            said: Tensor = tokens(9)
            for question in (0, 2, 7):  # the last is sharded over the ranks
                said = torch.cat([said, tokens(question)], 1) if question else said
                mask = torch.ones_like(said)  # what looks like padding here and there is none
                given = with_cache(model, {"attention_mask": mask, "cache": chat})
                said = generate(model, input_ids=said, **given).sequences
            answers.append(said)
        assert torch.equal(*answers), (family, answers)


def test_layers_that_keep_something_else() -> None:
    from parallel_plans.huggingface.generation.context_parallel_cache import _stock_layers

    for match, given in (
        ("layer 1 keeps a LinearAttentionLayer", {"layer_types": ["full_attention", "conv"]}),
        ("layer 1 attends to what an encoder .* use_cache=False", {"cross_attention_layers": [1]}),
    ):
        with pytest.raises(ValueError, match=match):
            _stock_layers(transformers.LlamaModel(transformers.LlamaConfig(**SMALL, **given)))


def loop(goes_on: bool) -> Any:
    """A `custom_generate` that goes on with the cache of the forward before, or the first one."""

    def generated(model: Any, input_ids: Tensor, **given: Any) -> Tensor:
        cache, new = given[CACHE], input_ids
        for _ in range(NUM_NEW):
            output = model(new, **{CACHE: cache})
            cache = output[CACHE] if goes_on else cache
            new = output.logits[:, -1:].argmax(-1)
            input_ids = torch.cat([input_ids, new], 1)
        return input_ids

    return generated


@on_ranks(2)
def test_loops() -> None:
    ours, theirs = sharded("Llama"), stock("Llama")

    def run(model: Any, goes_on: bool) -> Tensor:
        asked = {"custom_generate": loop(goes_on), "max_new_tokens": NUM_NEW}
        return model.generate(tokens(), **asked)

    expected = run(theirs, goes_on=False)  # its cache grows in place
    assert torch.equal(run(ours, goes_on=True), expected)
    with pytest.raises(ValueError, match=rf"go on with that, output\.{CACHE}"):
        run(ours, goes_on=False)


@pytest.mark.parametrize("way", ["model", "forward"])
@on_ranks(2)
def test_compiled(way: str) -> None:
    """Forwards with a cache run eager within a compiled model."""
    ours, theirs = sharded("Llama"), stock("Llama")
    if way == "model":
        ours.compile(backend="eager")
    else:
        ours.forward = torch.compile(ours.forward, backend="eager")
    answers = [generate(x, input_ids=tokens()).sequences for x in (ours, theirs)]
    assert torch.equal(*answers)


@on_ranks(2)
def test_checkpointing() -> None:
    ours = sharded("Llama").train()
    ours.activation_checkpointing_enable()
    with pytest.raises(ValueError, match=r"call model\.eval\(\) first, or pass use_cache=False"):
        ours.generate(tokens(), max_new_tokens=NUM_NEW)
    asked = {"max_new_tokens": NUM_NEW, "do_sample": False}
    without = ours.generate(tokens(), use_cache=False, **asked)
    assert torch.equal(without, ours.eval().generate(tokens(), **asked))


class Newer:
    def forward(self, input_ids: Any, cache: Any = None) -> None: ...


class Older:
    def forward(self, input_ids: Any, past_key_values: Any = None, **kwargs: Any) -> None: ...


class Mamba:
    def forward(self, input_ids: Any, cache_params: Any = None) -> None: ...


class Without:
    def forward(self, input_ids: Any, **kwargs: Any) -> None: ...


CALLED = {Newer: "cache", Older: "past_key_values", Mamba: "cache_params"}


def test_a_cache_gets_the_name_that_the_forward_has() -> None:
    for kind, given in product(CALLED, CALLED.values()):
        found = with_cache(kind(), dict.fromkeys(CALLED.values()) | {"input_ids": 1, given: 2})
        assert found == {"input_ids": 1, CALLED[kind]: 2}


def test_a_forward_that_names_none_hands_on_its_parts_name() -> None:
    assert parameter_of_cache(Without.forward) is None
    assert cache_name(Without()) == parameter_of_cache(LlamaModel.forward)


def test_no_cache_and_two() -> None:
    assert with_cache(Newer(), {"input_ids": 1, "cache": None}) == {"input_ids": 1}
    with pytest.raises(ValueError, match="cache and cache_params are names of one argument"):
        with_cache(Newer(), {"cache": 1, "cache_params": 2})
