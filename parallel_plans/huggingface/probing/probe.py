"""Runs a model on a few tokens, to check that its tokens interact in attention only.

`is_by_token` runs one function, such as a layer or a hook, in which they must not interact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel_plans.huggingface.core.attention_function import at_positions, tokens_of
from parallel_plans.huggingface.core.bias_tables import making_tables
from parallel_plans.huggingface.core.local_attention import keeping_local_attention
from parallel_plans.huggingface.core.modules import language_model_of
from parallel_plans.huggingface.core.passed_on import passing_on
from parallel_plans.huggingface.core.patterns import (
    OWN_MASKS,
    PROBE,
    alone,
    frozen,
    pattern_of,
    run_with,
    two_tokens,
)
from parallel_plans.huggingface.states.state_passing import LocalStatePassing, StateSpecs
from parallel_plans.huggingface.states.stateful import passing_states, stateful_layers

NUM_TOKENS = 8
# Windows up to nearly this many tokens are found in a layer's own attention function.
NUM_KEYS = 2**15
ROUTER_LOGITS = "output_router_logits"


def probe(model: Any, indices: tuple[int, ...], **inputs: Any) -> Any:
    """Return the model's output for the tokens at `indices`.

    In 16 bits the row is repeated until there are `NUM_TOKENS` tokens: products of other shapes
    round differently, and a router could then choose other experts.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    parameter = next(model.parameters())
    num_rows = 1 if parameter.dtype.itemsize > 2 else NUM_TOKENS // len(indices)
    index = torch.tensor([indices] * num_rows, device=parameter.device)
    config = model.config.get_text_config()
    positions = index % (getattr(config, "max_position_embeddings", None) or NUM_TOKENS)
    AttentionInterface.register(PROBE, _alone)
    AttentionMaskInterface.register(PROBE, pattern_of)
    decoder = language_model_of(model)
    decoder.set_attn_implementation(PROBE)
    if hasattr(config, ROUTER_LOGITS):  # a config may request them
        inputs = {ROUTER_LOGITS: False} | inputs

    def add_inputs(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        # This replaces any mask that an outer model has made: each token sees only itself.
        return args, kwargs | {"ring": index[0], "attention_mask": torch.ones_like(positions)}

    hook = decoder.register_forward_pre_hook(add_inputs, with_kwargs=True)
    try:
        with passing_on(decoder), making_tables(decoder), keeping_local_attention(decoder):
            return model(
                input_ids=index % config.vocab_size,
                position_ids=positions,
                attention_mask=torch.ones_like(positions),
                use_cache=False,
                **inputs,
            )
    finally:
        hook.remove()


def _alone(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    ring: Tensor | None = None,
    position_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return a value that depends on the query, key and value of each token alone."""
    if ring is None:
        raise ValueError(
            f"{type(module).__name__} gets no keyword arguments from the model, so that attention "
            "cannot know how the sequence is sharded; it has no context-parallel plan"
        )
    key, value = tokens_of(key), tokens_of(value)
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    query, bias = at_positions(module, query, position_bias, ring)
    # No product of query and key: it would hide wrong positions that rotate both alike.
    scores = (query - key.roll(1, -1)).sum(-1, keepdim=True)
    for x in (bias, sinks):  # of each query, too
        scores = scores if x is None else scores + x.sum(-1, keepdim=True)
    return (value * (1 + scores.tanh())).transpose(1, 2).contiguous(), None


# Relative tolerance: above bfloat16 rounding, far below the effect of another token.
TOLERANCE = 0.02

# One shard has a gap, the other lacks the first and last tokens. The other does not lie evenly
# around the middle, as zigzag shards do: reversed tokens would be right in it.
SHARDS = ((0, 1, 6, 7), (1, 2, 3, 4))

# Contiguous shards, for models whose layers carry a state.
NEIGHBOURS = ((0, 1, 2, 3), (4, 5, 6, 7))

# Outputs by module name and number of the call, in execution order.
ModuleOutputs = dict[tuple[str, int], Tensor]


# Note [What a probe finds]: a model's code does not show this, so the model is probed with an
# attention in which each token sees only itself. The output of a token must then not depend on the
# other tokens. Shards of four tokens are compared with all eight, module by module. This finds
# convolutions, shifts of tokens, means over a batch, positions that a model counts itself, and
# factors that depend on the length or the largest position. It does not find effects that begin at
# a greater length, in training only, or with special tokens; in 16 bits, nor those that depend on
# the number of tokens in all rows.
def check_token_mixing(model: Any) -> StateSpecs:
    """Refuse a model in which tokens interact outside of attention and of states of layers.

    Returns:
        The states of each stateful layer.

    Raises:
        ValueError: naming the first module whose output depends on the other tokens, or if the
            model does not pass the keywords of attention down to it.
    """
    layers, states = stateful_layers(model), LocalStatePassing()
    with frozen(model), passing_states(layers, states):
        states.begin()
        whole = _outputs(model, tuple(range(NUM_TOKENS)))
        # The shards are a sequence of their own, whose first one begins without a state.
        states.forget()
        for shard in NEIGHBOURS if layers else SHARDS:
            states.begin()
            parts = _outputs(model, shard)
            _check_states(model, layers, states)
            for (name, call), found in parts.items():
                if not _agree(found, whole.get((name, call)), shard):
                    raise ValueError(
                        f"no context-parallel plan for {type(model).__name__}: the output of "
                        f"{name or 'the model'} for a token depends on tokens that a rank does not "
                        "hold, or on how many there are"
                    )
    return states.specs(len(layers))


# The ring replaces a model's own attention function, and a name replaces its masks. So layers must
# use the masks as they are, and the function must hide no keys by itself.
def check_attention(model: Any) -> None:
    """Refuse a model whose layers hide keys by other means than the masks that it asks for.

    Raises:
        ValueError: naming the layer that changes its mask, or whose own attention function hides
            keys that its mask shows.
    """
    from transformers.masking_utils import eager_mask

    tokens = two_tokens(model)
    masks: list[Tensor] = []
    reasons: list[str] = []
    names = {module: name for name, module in model.named_modules()}

    def make_mask(**kwargs: Any) -> Tensor:
        masks.append(eager_mask(**kwargs | {"allow_is_bidirectional_skip": False}))
        return masks[-1]

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> tuple[Tensor, None]:
        name = f"{names.get(module) or 'its attention'} ({type(module).__name__})"
        is_choice = getattr(attention_mask, "of_pools", False) is True
        if attention_mask is not None and not is_choice and not _is_one_of(masks, attention_mask):
            reasons.append(f"{name} changes or replaces the masks of transformers.masking_utils")
        elif _hides_keys(module, query, tokens_of(key), options):
            reasons.append(f"{name} has an attention function that hides keys which its mask shows")
        return alone(query, value), None

    with frozen(model), suppress(Exception):  # model code may raise anything
        run_with(model, attend, make_mask, input_ids=tokens, attention_mask=torch.ones_like(tokens))
    if reasons:
        raise ValueError(
            f"no context-parallel plan for {type(model).__name__}: {reasons[0]}, which the plan "
            f"would not do. {OWN_MASKS}"
        )


def _is_one_of(masks: list[Tensor], mask: Tensor) -> bool:
    """Return whether `mask` is one of these masks, or a slice of one."""
    return mask.untyped_storage().data_ptr() in {x.untyped_storage().data_ptr() for x in masks}


def _hides_keys(module: nn.Module, query: Tensor, key: Tensor, options: dict[str, Any]) -> bool:
    """Return whether a layer's own attention function hides keys from the last of many tokens."""
    function = _own_function(module)
    if function is None:
        return False
    # Equal scores: the output is the mean index of the keys that the query sees.
    new = partial(torch.zeros, dtype=torch.float32, device=key.device)
    index = torch.arange(NUM_KEYS, dtype=torch.float32, device=key.device)
    values = torch.stack([torch.ones_like(index), index], -1).expand(1, key.shape[1], -1, -1)
    given = options | {"scaling": 1.0, "dropout": 0.0}
    try:
        out, _ = function(
            module,
            new(1, query.shape[1], 1, 1),
            new(1, key.shape[1], NUM_KEYS, 1),
            values,
            new(1, 1, 1, NUM_KEYS),
            **given,
        )
        # Sinks make both columns smaller alike.
        mean = out[..., 1] / out[..., 0]
    except Exception:  # model code may want other shapes
        return False
    return not torch.allclose(mean, index.mean().expand_as(mean), rtol=TOLERANCE)


# What files of transformers call their own attention function.
EAGER = "eager_attention_forward"


def _own_function(module: nn.Module) -> Callable[..., Any] | None:
    """Return the attention function in the file of a layer's class, or of one that it extends."""
    for kind in type(module).__mro__:
        forward = unwrap(vars(kind).get("forward", nn.Module.forward))
        if EAGER in getattr(getattr(forward, "__code__", None), "co_names", ()):
            return forward.__globals__.get(EAGER)
    return None


def check_head(model: Any) -> None:
    """Refuse a model whose head combines the tokens of its language model.

    Raises:
        ValueError: if the output for some hidden states depends on the others.
    """
    everything = tuple(range(NUM_TOKENS))
    with frozen(model):
        whole = _of_tokens(probe(model, everything))
        for shard in SHARDS:
            with _hidden_states(language_model_of(model), shard):
                found = _of_tokens(probe(model, everything))
            if found.shape[:2] != (whole.shape[0], len(shard)) or not _agree(found, whole, shard):
                raise ValueError(
                    f"no context-parallel plan for {type(model).__name__}: what it makes of the "
                    "hidden states of its language model depends on tokens that a rank does not "
                    "hold"
                )


def _of_tokens(output: Any) -> Tensor:
    logits = getattr(output, "logits", None)
    return output.last_hidden_state if logits is None else logits


@contextmanager
def _hidden_states(decoder: nn.Module, shard: tuple[int, ...]) -> Iterator[None]:
    """Make a language model return the hidden states of the tokens in `shard` only."""

    def cut(module: nn.Module, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[:, list(shard)]
        return output

    hook = decoder.register_forward_hook(cut)
    try:
        yield
    finally:
        hook.remove()


def _check_states(model: Any, layers: list[nn.Module], states: LocalStatePassing) -> None:
    """Refuse a layer that reads its state only when it is called with a single token."""
    names = {module: name for name, module in model.named_modules()}
    for number, (kind, _) in states.unused().items():
        raise ValueError(
            f"no context-parallel plan for {type(model).__name__}: {names[layers[number]]} goes on "
            f"from the {kind} state of its cache with a single token only, and begins again with "
            "several"
        )


def _outputs(model: Any, indices: tuple[int, ...]) -> ModuleOutputs:
    """Return the output of each module for the tokens at `indices`, with isolated tokens."""
    outputs: ModuleOutputs = {}
    names = {module: name for name, module in model.named_modules()}
    hooks = [module.register_forward_hook(_recorder(names, outputs)) for module in names]
    try:
        probe(model, indices)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def _recorder(names: dict[nn.Module, str], outputs: ModuleOutputs) -> Callable[..., None]:
    def record(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            # A module may run several times, for example when layers share it.
            calls = sum(name == names[module] for name, _ in outputs)
            outputs[names[module], calls] = output.detach()

    return record


def _agree(found: Tensor, whole: Tensor | None, shard: tuple[int, ...]) -> bool:
    """Return whether `found` equals its shard of `whole` up to rounding; dimension 1 is tokens."""
    # Integers and vectors hold sizes and indices, not values of tokens.
    if whole is None or found.ndim < 2 or not (found.is_floating_point() or found.is_complex()):
        return True
    if whole.shape != (1, NUM_TOKENS, *found.shape[2:]):
        return True
    # In 16 bits `probe` repeats the row, so the first one is enough.
    expected, found = whole[:, list(shard)], found[:1]
    if found.shape != expected.shape or not expected.isfinite().all():
        return True
    difference, scale = (found - expected).float_power(2), expected.float_power(2)
    return bool(difference.abs().sum() <= (TOLERANCE**2) * scale.abs().sum())


# Kernels of eight bits want more than 16 tokens.
NUM_TRIED = 32
# The tokens of the second run: a shard with a gap, without the first and the last. It does not lie
# evenly around the middle: a function that reverses tokens would give it what is right.
TRIED_SHARD = (*range(2, 12), *range(19, 29))
# How much larger a token of the first run is, which the second lacks: a mean over tokens follows
# it, and a scale for all tokens rounds the others to zero.
LARGER, LARGE = 1_000.0, 16


@torch.no_grad()
def is_by_token(run: Callable[[Tensor], Tensor], like: Any) -> bool:
    """Return whether outputs of a shard are those of the whole, in which a token is larger.

    Args:
        run: takes `(..., L, H)`, and returns as many tokens.
        like: what it gets in a forward, `(..., L, H)`; other things are not tried.
    """
    if not isinstance(like, Tensor) or isinstance(like, DTensor) or not like.is_floating_point():
        return True
    numbers = torch.arange(NUM_TRIED * like.shape[-1], device=like.device)
    shape = *(1,) * (like.ndim - 2), NUM_TRIED, like.shape[-1]
    whole = numbers.float().sin().view(shape).to(like.dtype)
    whole[..., LARGE, :] *= LARGER
    shard = whole[..., list(TRIED_SHARD), :]
    try:
        expected = run(whole)[..., list(TRIED_SHARD), :].float()
        of_shard = run(shard).float()
    except Exception:  # code of a model may want other shapes, or return no tensor, as a router
        return True
    if of_shard.shape != expected.shape or not expected.isfinite().all():
        return True
    return bool((of_shard - expected).norm() <= TOLERANCE * expected.norm())
