"""Forwards with a sharded cache, and `generate`: all ranks must do the same at every token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from hashlib import blake2b
from inspect import signature
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dtensor_ring import RingError
from dtensor_ring.extension import (
    axis_group,
    check_agreement,
    checked_barrier,
    gathered,
    positions_of,
)
from parallel_plans.huggingface.core.adapters import NO_VIRTUAL_TOKENS
from parallel_plans.huggingface.core.attention_function import RingInputs
from parallel_plans.huggingface.core.model_masks import (
    is_precomputed,
    padding_of,
    precomputed_masks,
)
from parallel_plans.huggingface.core.positions import LastTokens
from parallel_plans.huggingface.core.versions import (
    NAMES_OF_CACHE,
    cache_argument,
    cache_name,
    with_cache,
)
from parallel_plans.huggingface.core.whole_rows import (
    ROW,
    WHOLE_ROWS,
    check_one_document,
    check_whole_rows,
)
from parallel_plans.huggingface.generation.cache_memory import CacheMemory, NewTokens
from parallel_plans.huggingface.generation.left_padding import check_same_padding, left_padding
from parallel_plans.huggingface.probing.probe import ROUTER_LOGITS
from parallel_plans.huggingface.sharding.agreement import described
from parallel_plans.huggingface.sharding.batch import (
    BOUNDARIES,
    LOGITS_TO_KEEP,
    POSITIONS,
    keywords,
    parse,
    shard,
)
from parallel_plans.huggingface.sharding.sharding import Sharding, whole_outputs
from parallel_plans.huggingface.states.state_steps import StateStep, StepTokens

if TYPE_CHECKING:
    from parallel_plans.huggingface.generation.context_parallel_cache import ContextParallelCache


GROWS = "a cache over a sharded sequence grows with each token: forwards with one run eager"
# Arguments that are not the model's, or are given to it again.
OF_CALL = (*NAMES_OF_CACHE, "use_cache", "output_logits")
# Arguments that are of no use, or mean something else, with a cache.
UNCACHED = (*BOUNDARIES, "labels", "shift_labels", ROUTER_LOGITS)


def cache_of(model: Any, sharding: Sharding, arguments: dict[str, Any]) -> ContextParallelCache:
    """Return the cache of a call that has one, or a new one for a call that asks for one.

    Raises:
        ValueError: if the cache is not of this model, or was replaced by a sharded one.
    """
    from parallel_plans.huggingface.generation.context_parallel_cache import ContextParallelCache

    cache = cache_argument(arguments)
    if isinstance(cache, ContextParallelCache) and cache.sharding is sharding:
        return cache
    from transformers import DynamicCache

    name = cache_name(model)
    if isinstance(cache, ContextParallelCache):
        raise ValueError(
            f"{name} is a ContextParallelCache of another model; make one of this model"
        )
    if cache is None or (sharding.generates and _is_fresh(cache)):
        _replace(cache, name, sharding)
        return ContextParallelCache(model)
    is_filled = isinstance(cache, DynamicCache) and _is_filled(cache)
    raise ValueError(
        f"{name} is a {type(cache).__name__}, whose keys and values are not sharded along the "
        "sequence; give a ContextParallelCache(model), or use_cache=True for a new one"
        + (f". If it came from peft: {NO_VIRTUAL_TOKENS}" if is_filled else "")
    )


def _replace(cache: Any, name: str, sharding: Sharding) -> None:
    """Record that a new cache replaces this one; refuse to do it twice, which loses tokens."""
    if cache in sharding.replaced:
        raise ValueError(
            f"{name} is the DynamicCache that generate began with, which a sharded one has "
            f"replaced; go on with that, output.{name} of the forward before"
        )
    if cache is not None:
        sharding.replaced.add(cache)


def _is_fresh(cache: Any) -> bool:
    """Return whether the cache is an empty one of the kind that `generate` makes."""
    from transformers import DynamicCache

    return type(cache) is DynamicCache and not cache.offloading and not _is_filled(cache)


def _is_filled(cache: Any) -> bool:
    """Return whether a stock cache has seen tokens."""
    try:
        return cache.get_seq_length() > 0
    except ValueError:  # it keeps states only, which count no tokens
        return cache.has_previous_state()


@torch.compiler.disable(reason=GROWS)
def forward_with_cache(
    plain: Callable[..., Any], model: Any, sharding: Sharding, arguments: dict[str, Any]
) -> Any:
    """Run a whole model on new tokens with a cache, see `call_with_cache`."""
    cache = cache_of(model, sharding, arguments)
    if not cache.memory.seq_len:  # the forward that cached tokens has compared the weights
        sharding.agree(model, arguments)
    return call_with_cache(plain, model, sharding, cache, arguments)


def call_with_cache(
    plain: Callable[..., Any],
    model: Any,
    sharding: Sharding,
    cache: ContextParallelCache,
    arguments: dict[str, Any],
    tokens: Tensor | None = None,
    of_kept: str = "logits",
) -> Any:
    """Return the output of a model for new tokens: whole, plain tensors on every rank.

    Args:
        plain: the model's own forward.
        model: a model, or the language model within one that merged images into its embeddings.
        sharding: how the model is sharded.
        cache: keys and values of the tokens before.
        arguments: the arguments of the call, by name.
        tokens: ids that the embeddings were made of, which ranks compare.
        of_kept: name of the output that has the last tokens only, if not all are asked for.

    Raises:
        ValueError: if an argument has no meaning with a cache, or is not about the new tokens.
    """
    asked = {name: x for name, x in arguments.items() if name not in OF_CALL}
    mask, memory = asked.pop("attention_mask", None), cache.memory
    _check_cached(model, asked, mask)
    batch, past = parse(model, asked, sharding.loss), memory.seq_len
    num_tokens = batch.tokens.shape[1]
    end, seen = past + num_tokens, None
    if tokens is None:
        tokens = batch.tokens
    # What is no tensor was made by an outer model, see `_check_cached`.
    if not (mask is None or isinstance(mask, Tensor)):
        seen, mask = precomputed_masks(mask, num_tokens, keeps_plain=True), padding_of(mask)
    padding = None if mask is None else left_padding(mask, end)
    positions = sharding.positions(batch, past, mask)
    _check_places(sharding, positions, memory, padding)
    kept, counted, num_kept = None, None, batch.others.get(LOGITS_TO_KEEP, 0)
    with (
        memory.appending(tokens, padding, num_kept) as (new, inputs),
        _states(sharding, cache, new, mask),
    ):
        if new.sharded_length:  # otherwise a layer's message compares the tokens
            sharding.check_same_batch(arguments | {"input_ids": tokens}, "a sharded append step")
            sharding.tokenwise.begin(model)
            batch = replace(batch, positions=positions, seen=seen)
            mesh, length = new.axis.mesh, new.sharded_length
            runs = new.layout.runs(mesh.get_local_rank(), mesh.size(), length)
            indices = positions_of(runs, tokens.device)
            batch = shard(batch, indices, new.sharded_length, past)
            at = past + indices
        else:
            at = torch.arange(past, end, device=tokens.device)
            counted = at.unsqueeze(0) if positions is None else positions
            batch = batch if seen is None else replace(batch, seen=seen)
        of_pools = memory.inputs_of_pools(new, tokens)
        ring = RingInputs(inputs, at, sharding.layer_masks, past=past, pools=of_pools)
        how = keywords(batch, ring, use_cache=True)
        if new.sharded_length:
            kept = sharding.keep_logits(how, new.layout, num_tokens, new.sharded_length)
        else:
            how[POSITIONS] = counted
        if hasattr(model.config, ROUTER_LOGITS):
            how[ROUTER_LOGITS] = False  # the config may ask for a loss
        sharding.set_largest(positions, at, num_tokens, past)
        try:
            output = plain(model, **how, **{cache_name(model): cache})
        finally:
            if sharding.largest.is_read:
                sharding.largest.clear()
    if not new.sharded_length:
        return output
    last = {of_kept: kept}
    return type(output)(**{name: _whole(x, new, last.get(name)) for name, x in output.items()})


def _check_places(
    sharding: Sharding, positions: Tensor | None, memory: CacheMemory, padding: Tensor | None
) -> None:
    """Refuse places that a model would count wrongly by itself, and other padding than before."""
    past = memory.seq_len
    if sharding.counts_places == ROW:
        if padding is not None:
            raise ValueError(WHOLE_ROWS)
        check_whole_rows(None, positions, past)
    elif sharding.counts_places:
        check_one_document(None, positions, past, padding)
    if sharding.layer_masks:  # without attention, nothing sees cached padding
        check_same_padding(padding, memory.left_padding, past)


@contextmanager
def _states(
    sharding: Sharding, cache: ContextParallelCache, new: NewTokens, mask: Tensor | None
) -> Iterator[None]:
    """Open a context in which layers with a state go on from those that the cache has."""
    if sharding.passing is None:
        yield
        return
    # A mask that hides nothing is no mask.
    mask = None if mask is None or bool(mask.all()) else mask[:, new.past :]
    tokens = StepTokens(
        mesh=new.axis.mesh,
        layout=new.layout,
        number=new.num_tokens,
        sharded_length=new.sharded_length,
        mask=mask,
    )
    step = StateStep(cache.memory.states, tokens)
    with sharding.passing.stepping(step):
        yield
    cache.memory.states = step.after()


def _check_cached(model: Any, batch: dict[str, Any], mask: Any) -> None:
    for name in UNCACHED:
        given = batch.get(name)
        if isinstance(given, Tensor) or given:
            raise ValueError(
                f"{name} is not supported together with a cache over a sharded sequence; leave one "
                "of them out (use_cache=False)"
            )
    if torch.is_grad_enabled():
        raise ValueError(
            "a cache (given, or by use_cache=True) is for inference over a sharded sequence; call "
            "the model under torch.no_grad(), or leave it out"
        )
    if model.training and model.is_activation_checkpointing:
        raise ValueError(
            "transformers drops the cache of layers with activation checkpointing in training; "
            "call model.eval() first, or pass use_cache=False"
        )
    is_dense = isinstance(mask, Tensor) and is_precomputed(mask)
    if is_dense or not (mask is None or isinstance(mask, Tensor) or is_precomputed(mask)):
        raise ValueError(
            "attention_mask must be one tensor (B, S) of the cached and the new tokens, got "
            f"{tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__}"
        )


def _whole(x: Any, new: NewTokens, kept: LastTokens | None) -> Any:
    """Return an output for all new tokens, or for those that are kept, on every rank."""
    if isinstance(x, tuple):
        return tuple(_whole(part, new, kept) for part in x)
    if not isinstance(x, Tensor):
        return x
    if kept is not None:
        return kept.join(x, 1)
    mesh, length = new.axis.mesh, new.sharded_length
    return gathered(x, 1, axis_group(mesh), length, new.layout.spec)[:, : new.num_tokens]


SAME_CALL = (
    "generate from the same prompt with the same options and, with do_sample, from the same "
    "random state (torch.manual_seed(s), one s on all ranks, before generate)"
)
# Arguments that may differ from rank to rank.
OWN_OF_RANKS = ("streamer", "self")
CACHES = (None, "dynamic")
DRAFTS = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
"""Options that make `generate` propose several tokens at a time."""


def install_generate(model: Any, sharding: Sharding) -> None:
    """Make `generate` of this model, not of its class, compare the ranks and gather outputs."""
    can_generate = getattr(model, "can_generate", None)
    if can_generate is None or not can_generate():
        return
    plain = type(model).generate

    @wraps(plain)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        group = axis_group(sharding.axis.mesh)
        try:
            kwargs = with_cache(self, kwargs)
            _check(self, sharding, _asked(plain, self, args, kwargs))
            with whole_outputs(self), _generating(sharding):
                result = type(self).generate(self, *args, **kwargs)
        # The ranks know already: the group is shut down.
        except RingError:
            raise
        except BaseException:
            with checked_barrier(group, "generate", {}):  # the others would wait for this rank
                raise
        with checked_barrier(group, "the end of generate", _tokens_of(result)):
            return result

    model.generate = MethodType(generate, model)


@contextmanager
def _generating(sharding: Sharding) -> Iterator[None]:
    """Mark that `generate` calls the forward, which may then replace caches made there."""
    before, sharding.generates = sharding.generates, True
    try:
        yield
    finally:
        sharding.generates = before


def _option(model: Any, asked: dict[str, Any], name: str) -> Any:
    """Return an option of the call, of its config, or of the model's config, in this order."""
    value = asked.get(name)
    for config in (asked.get("generation_config"), model.generation_config):
        value = getattr(config, name, None) if value is None else value
    return value


def _asked(
    plain: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    asked = dict(signature(plain).bind(model, *args, **kwargs).arguments)
    return asked | asked.pop("kwargs", {})


def _check(model: Any, sharding: Sharding, asked: dict[str, Any]) -> None:
    """Refuse calls that differ between ranks, or would be wrong over a sharded sequence.

    Raises:
        ValueError: on every rank, naming the argument.
    """
    # Compare first: late ranks would take an error of earlier ranks for a failure.
    described = _described(model, asked) | {"cache_dtype of the plan": str(sharding.cache_dtype)}
    check_agreement(axis_group(sharding.axis.mesh), described, SAME_CALL)
    if cache_argument(asked) is not None:
        num_cached = cache_of(model, sharding, asked).get_seq_length()
        _check_prompt(asked, num_cached)
        _check_drafts(model, asked, num_cached)
    limits = [x for x in asked.get("stopping_criteria") or () if "MaxTime" in type(x).__name__]
    if limits or _option(model, asked, "max_time") is not None:
        raise ValueError(
            "max_time would stop ranks at different tokens over a sharded sequence; use "
            "max_new_tokens"
        )
    implementation = _option(model, asked, "cache_implementation")
    if implementation not in CACHES:
        raise ValueError(
            f"cache_implementation={implementation!r} is not supported over a sharded sequence, "
            'whose cache is dynamic; leave it out, or say "dynamic" if it comes from the '
            "generation_config"
        )


def _check_prompt(asked: dict[str, Any], num_cached: int) -> None:
    """Refuse token ids that have nothing after the cached tokens; embeddings are checked later."""
    prompt = asked.get("inputs", asked.get("input_ids"))
    if isinstance(prompt, Tensor) and prompt.shape[-1] <= num_cached:
        raise ValueError(
            f"the prompt has {prompt.shape[-1]} tokens, and the cache has {num_cached}: a prompt "
            "begins with the cached tokens, and has at least one more; to generate from the start "
            "of it, call cache.reset(), or take the last tokens out with cache.crop(-number)"
        )


def _check_drafts(model: Any, asked: dict[str, Any], num_cached: int) -> None:
    """Refuse drafts after cached tokens, which transformers would compute a second time."""
    given = [name for name in DRAFTS if _option(model, asked, name)]
    if given and num_cached:
        raise ValueError(
            f"{given[0]} is not supported with a cache that has {num_cached} tokens: transformers "
            "would append the whole prompt to them again; leave it out, or call cache.reset(), "
            "which computes the prompt anew"
        )


def _described(model: Any, asked: dict[str, Any]) -> dict[str, str]:
    """Describe what must be the same on all ranks."""
    listed = {name: x for name, x in asked.items() if x is not None and name not in OWN_OF_RANKS}
    facts = described(listed)
    facts |= {name: written(x) for name, x in listed.items() if not isinstance(x, Tensor)}
    facts["generation_config of the model"] = written(model.generation_config)
    if _option(model, asked, "do_sample"):
        facts["random state"] = _digest(model.device)
    return facts


def _tokens_of(result: Any) -> dict[str, str]:
    """Describe the generated tokens, which must be the same on all ranks."""
    tokens = getattr(result, "sequences", result)
    return described({"tokens": tokens}) if isinstance(tokens, Tensor) else {}


def written(x: Any) -> str:
    """Describe options by value, and other objects by type."""
    if hasattr(x, "to_dict"):
        return str(sorted(x.to_dict().items(), key=str))
    if isinstance(x, (list, tuple)):
        return str([written(part) for part in x])
    return repr(x) if isinstance(x, (bool, int, float, str, dict)) else type(x).__name__


def _digest(device: torch.device) -> str:
    # The state of a generator has kilobytes, of which ranks compare a digest.
    states = b"".join(bytes(state.cpu().numpy()) for state in _random_states(device))
    return blake2b(states, digest_size=6).hexdigest()


def _random_states(device: torch.device) -> Iterator[Tensor]:
    yield torch.get_rng_state()
    if device.type != "cpu":
        yield torch.get_device_module(device).get_rng_state(device)
