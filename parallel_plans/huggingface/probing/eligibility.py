"""Checks which models a plan serves: models that mix tokens in attention only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from parallel_plans.huggingface.core import positions
from parallel_plans.huggingface.core.adapters import adapters_of, check_adapters
from parallel_plans.huggingface.core.modules import (
    NO_CROSS_ATTENTION,
    WHOLE_HEADS,
    backbone_of,
    language_model_of,
    parts_beside_text,
    takes_labels,
)
from parallel_plans.huggingface.selecting.compressed import compressing_layers
from parallel_plans.huggingface.selecting.indexers import INDEXED_KIND, indexers_of
from parallel_plans.huggingface.states.stateful import stateful_layers

# In a description from `_stateful_layers`: layers whose keys are windows of tokens.
COMPRESSES = re.compile(r"\((\w*_)?compressed\w*\)")
COMPRESSED = (
    "attend to windows of tokens, each pooled into one key, which an index may choose. It would "
    "take the tokens of a window from two ranks where it reaches over the end of a rank's tokens, "
    "the number of each window in the whole sequence, where the model counts from the first token "
    "that it gets, and one softmax over tokens and windows"
)
STATEFUL = re.compile(
    "mamba|deltanet|shortconv|lightning|linearattention|recurrent|rwkv|xlstm", re.I
)
HEADS = (
    *("Model", "ForCausalLM", "LMHeadModel", "ForConditionalGeneration"),
    *("ForMaskedLM", "ForTokenClassification"),
)


def without_adapters(model: Any) -> Any:
    """Return the model that a `PeftModel` wraps, or the model itself."""
    base_of = getattr(model, "get_base_model", None)
    return model if base_of is None else base_of()


# The class of transformers for heads of multi-token prediction.
DRAFTS = "MtpModel"
DRAFTING = (
    "its heads draft tokens from the hidden states of another model, and transformers does not "
    "train them: its loss of several heads raises; torchtitan trains such heads, see "
    "docs/torchtitan.md"
)


def check_model(model: Any) -> None:
    """Refuse a model whose result would depend on how its sequence is sharded.

    Raises:
        ValueError: naming the obstacle, and the nearest fix.
    """
    check_adapters(adapters_of(model))
    model = without_adapters(model)
    if hasattr(model, "_orig_mod"):  # importing torch's class for it takes a second
        raise ValueError(
            "the model is compiled, and the plan would shard the graphs of one process: apply the "
            "plan to the model, then torch.compile(model)"
        )
    name, config = type(model).__name__, getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        raise ValueError(
            f"model must be one of transformers 5.x for a context-parallel plan, got {name}; "
            "dtensor_ring.ContextParallel serves any module that takes query, key and value"
        )
    for reason in _reasons(backbone_of(model), config):
        raise ValueError(f"no context-parallel plan for {name}: {reason}")


def _reasons(model: Any, config: Any) -> Iterator[str]:
    """Yield the reasons why a model has no plan."""
    if getattr(config, "is_encoder_decoder", False):
        yield (
            "its decoder attends to what an encoder makes of another sequence, and "
            f"{NO_CROSS_ATTENTION}"
        )
        return
    if type(model).__name__ == DRAFTS:
        yield DRAFTING
        return
    if language_model_of(model) is not model:
        yield from _reasons_of_parts(model)
        return
    layers = _stateful_layers(model, config)
    compressed = [layer for layer in layers if COMPRESSES.search(layer)]
    if compressed:
        yield f"{', '.join(compressed)} {COMPRESSED}; over a sequence that is not sharded it trains"
    if layers:
        yield (
            f"{', '.join(layers)} carry a state along the sequence, or convolve it, and store it "
            "in no cache of transformers, from which a rank could pass it on"
        )
    # Models with states do not declare that attribute; running them shows what they do.
    if not getattr(model, "_supports_attention_backend", False) and not stateful_layers(model):
        yield "its attention does not go through transformers' attention interface"
    if not _has_known_head(model):
        yield (
            "its head reads the sequence as a whole, or is not known not to; supported are base "
            "models, whose class has a name that ends in Model, and heads whose name ends in "
            f"{', '.join(HEADS[1:] + WHOLE_HEADS)}"
        )
    if poolers := [
        name for name, x in model.named_modules() if type(x).__name__.endswith("Pooler")
    ]:
        yield f"{poolers[0]} pools one rank's tokens; make the model with add_pooling_layer=False"
    types = _rope_types(config) & set(positions.LENGTH_DEPENDENT_ROPE)
    if types and not any(positions.length_dependent(model)):
        yield (
            f"rotary embeddings of type {types.pop()!r} depend on the largest position, and none "
            "of its modules has that rope_type, so the plan cannot pass it the one of the batch; "
            "default, linear, llama3 and yarn do not depend on it"
        )
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and "position" in path:
            owner = model.get_submodule(path.rpartition(".")[0])
            if _counts_itself(module, owner):
                yield (
                    f"{path} counts positions by itself, from the tokens it sees or from an "
                    f"offset, and not by a method {positions.FROM_TOKENS} of "
                    f"{type(owner).__name__} or an attention_mask, which would be called with the "
                    "whole batch"
                )
    if getattr(config, "return_dict", True) is False:
        yield "it returns tuples, in which nothing has a name; set config.return_dict = True"
    if getattr(config, "token_dropout", False):
        yield (
            "token_dropout scales embeddings by the share of masked tokens, of which a rank sees "
            "its own only; set config.token_dropout = False before the model is made"
        )


def _reasons_of_parts(model: Any) -> Iterator[str]:
    """Yield the reasons why an outer model has no plan."""
    decoder = language_model_of(model)
    path = next((name for name, x in model.named_modules() if x is decoder), "")
    beside = ", ".join(name for name in parts_beside_text(model) if name != path)
    what = f"its language model is a part of it, beside {beside or 'what makes its inputs'}"
    if decoder is None:
        yield f"{what}, and no module of its own"
        return
    reason = next(_reasons(decoder, decoder.config), None)
    if reason is None and _has_known_head(model):
        return
    # If the whole model has no plan, the language model alone may have one, with its own head.
    served = (x for x in (decoder, model.get_decoder()) if not any(_reasons(x, x.config)))
    alone = next(served, None)
    if alone is None:
        yield f"{what}; that part, {path}, has no plan either: {reason}"
        return
    why = f"{path} has none: {reason}" if reason else "its head reads the sequence as a whole"
    path = next(name for name, x in model.named_modules() if x is alone)
    yield (
        f"{what}, and {why}; apply the plan, with unshard_outputs=True, to its {path} alone, and "
        'if the model makes its masks, set model.config.text_config._attn_implementation = "ring"'
    )


def _has_known_head(model: Any) -> bool:
    name = type(model).__name__
    return name.endswith(HEADS[1:]) or (not takes_labels(model) and name.endswith(HEADS[0]))


# Types of layers that mix tokens in attention, or not at all.
WITHOUT_STATE = re.compile(r"(\w+_)?(full|sliding|chunked)_attention|moe|mlp|dense|sparse")


def _stateful_layers(model: Any, config: Any) -> list[str]:
    """Return names of layers that carry state between tokens, found by their kind or modules."""
    modules = dict(model.named_modules())
    handing = {part for layer in stateful_layers(model) for part in layer.modules()}
    # Modules that pass their state to the next rank are served, and so are layers around them.
    served = {name for name, x in modules.items() if not handing.isdisjoint(x.modules())}
    kinds = enumerate(getattr(config, "layer_types", None) or ())
    indexed = {x.layer_idx for x in indexers_of(model)}
    known = indexed | {x.layer_idx for x in compressing_layers(model)}
    # An indexer may serve layers after its own, which have none.
    selects = {INDEXED_KIND} if indexed else set()
    stateful = {
        f"layers.{i}": kind
        for i, kind in kinds
        if not WITHOUT_STATE.fullmatch(kind) and kind not in selects and i not in known
    }
    paths = {layer: next((x for x in modules if x.endswith(layer)), layer) for layer in stateful}
    if refused := [layer for layer, path in paths.items() if path not in served]:
        return [f"{paths[layer]} ({stateful[layer]})" for layer in refused]
    if served:
        return []  # running the model shows whether it mixes tokens elsewhere
    return [
        f"{name} ({type(module).__name__})"
        for name, module in modules.items()
        if (STATEFUL.search(type(module).__name__) and not hasattr(module, "config_class"))
        or (isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1)
    ]


def _rope_types(config: Any) -> set[str]:
    """Return the types of rotary embeddings: some models have one for each type of layer."""
    options = getattr(config, "rope_parameters", None) or {}
    nested = [x for x in options.values() if isinstance(x, dict)]
    return {x["rope_type"] for x in (options, *nested) if x.get("rope_type")}


def _counts_itself(embedding: nn.Embedding, owner: nn.Module) -> bool:
    """Return whether an embedding may count positions in a way that the plan cannot replace."""
    if hasattr(owner, positions.FROM_TOKENS) or positions.counts_mask(embedding):
        return False
    return type(embedding) is not nn.Embedding or embedding.padding_idx is not None
