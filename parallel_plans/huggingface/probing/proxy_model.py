"""Makes a small proxy of a model: the same code and kinds of layers, but narrow and short."""

from __future__ import annotations

import re
import sys
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule

HEADS, HEAD_DIM, WIDTH, VOCABULARY = 4, 8, 32, 64

# Options that the config derives from others if they are not given.
COMPUTED = ("attention_hidden_size", "attention_head_dim", "hybrid_layer_ids")

# Options that stay equal to another one if they are equal to it in the large config.
SAME = {
    "num_key_value_heads": ("num_attention_heads",),
    "head_dim": ("qk_rope_head_dim", "qk_head_dim"),
    "codebook_dim": ("hidden_size",),
    "index_n_heads": ("num_key_value_heads",),
}
SHARED = "num_kv_shared_layers"
SECTIONS = "mrope_section"
BY_LAYER, ROTARY = "per_layer_config", ("rope_parameters", "rope_scaling")
LAYERS = r"(num_|n_)?(hidden_|encoder_|decoder_)?(layers?|groups)|num_blocks|depth"
TOKEN = re.compile(r"\w*(token|bo[a-z]|eo[a-z])_?(id|index|idx)s?$")


def small_config(config: Any, num_of_kind: int = 1, **changes: Any) -> Any:
    """Return a small copy of a config, for a model with a layer of each kind.

    It keeps what decides how tokens see each other: windows, chunks, kinds of positions, scales.

    Args:
        config: the config of the large model.
        num_of_kind: the largest number of layers of each kind.
        changes: options that get another value.
    """
    large = config.to_dict()
    for name in ("transformers_version", "_name_or_path", "model_type", "architectures", *COMPUTED):
        large.pop(name, None)
    parts = {
        name: small_config(x)
        for name, x in vars(config).items()
        if hasattr(x, "model_type") and name not in changes
    }
    # A layer of each kind is enough, as others of that kind run the same code.
    layers = _kept_layers(config, large, num_of_kind)
    small = {name: _small(name, x, large, layers) for name, x in large.items()}
    if SECTIONS in getattr(config, "ignore_keys_at_rope_validation", ()):
        rotary = small["rope_parameters"] or {}
        small["rope_parameters"] = {SECTIONS: _sections(3, rotary)} | rotary
    return type(config).from_dict(small | parts | changes)


def needs_proxy(model: torch.nn.Module) -> bool:
    """Return whether a model cannot run tokens yet: it has no weights, or FSDP2 has sharded it.

    The first forward of FSDP2 decides which module is its root, and it is not to be a part.
    """
    is_meta = any(x.is_meta for x in model.parameters())
    return is_meta or any(isinstance(part, FSDPModule) for part in model.modules())


def without_weights(model: Any) -> Any:
    """Return a model of the same sizes on the meta device; the model itself, if it is there."""
    if any(x.is_meta for x in model.parameters()):
        return model
    with torch.device("meta"):
        return type(model)(model.config)


def small_proxy(model: Any, every_layer: bool = False) -> Any:
    """Return a small model of the same class, with random weights on the CPU.

    Args:
        model: the large model.
        every_layer: keep all layers, not only some of each kind.

    Raises:
        ValueError: if its code cannot build a model from the small config.
    """
    # All ranks examine the same proxy, and the caller's random numbers go on as without it.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        try:
            # If layers share weights, the code may need two of a kind.
            num_of_kind = sys.maxsize if every_layer else 1 + _ties_layers(model)
            proxy = type(model)(small_config(model.config, num_of_kind))
        except Exception as error:  # model code may raise anything
            raise ValueError(
                f"{type(model).__name__} is on the meta device or sharded, and the plan cannot "
                "build a small proxy of it from its config, to run a few tokens through "
                f"({type(error).__name__}: {error}); give it weights first, by from_pretrained or "
                "to_empty"
            ) from error
        with torch.no_grad():
            for x in proxy.parameters():  # biases of 0 and norms of 1 would have no effect
                x.add_(0.1 * torch.randn_like(x))
    return proxy


def _ties_layers(model: Any) -> bool:
    """Return whether layers share weights with each other."""
    tied = getattr(model, "all_tied_weights_keys", {})
    return any(".layers." in target and ".layers." in source for target, source in tied.items())


class Layers(NamedTuple):
    """The number of layers of a model, and the indices of those that its proxy keeps."""

    number: int
    kept: list[int]


def _kept_layers(config: Any, options: dict[str, Any], num_of_kind: int) -> Layers:
    """Return the first layers of each kind, at least two layers in all."""
    number = getattr(config, "num_hidden_layers", None)
    if not isinstance(number, int):
        return Layers(2, [0, 1])
    by_layer = [x for x in options.values() if isinstance(x, list) and len(x) == number]
    kinds: dict[str, list[int]] = {}
    for index in range(number):
        kinds.setdefault(repr([x[index] for x in by_layer]), []).append(index)
    if num_of_kind > number:
        return Layers(number, list(range(number)))
    kept = [index for of_kind in kinds.values() for index in of_kind[:num_of_kind]]
    kept += [index for index in range(number) if index not in kept][: max(0, 2 - len(kept))]
    if options.get(SHARED):  # the last layers reuse keys and values of earlier ones
        kept += [number - 1 - index for index in range(len(kept))]
    return Layers(number, sorted(kept))


# Options that the model derives from others if its config does not set them.
FILLED = {"head_dim": HEAD_DIM, "num_key_value_heads": HEADS, "num_experts_per_tok": 2}


# Sizes by the name of an option: the first pattern that matches counts.
SIZES: tuple[tuple[str, int], ...] = (
    (r".*vocab\w*(size|base)\w*|\w*(^|_)num_embeddings|decoder_vocab_size|n_words", VOCABULARY),
    (r"(num_|n_)?(local_|routed_|moe_num_)?experts|num_local_experts|n_routed_experts", 4),
    (r"moe_num_experts|zero_expert_num|num_zero_experts", 4),
    (r"num_experts_per_tok(en)?|moe_k|moe_top_?k|top_k_experts|experts_top_k|expert_top_k", 2),
    (r"num_selected_experts|num_experts_per_token|moe_topk|router_top_k|top_k", 2),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r"n_group|num_expert_groups?", 2),
    (r"topk_group|num_limited_groups|first_k_dense_replace|num_dense_layers", 1),
    (r"\w*lora_rank|\w*_rank|hc_lowrank|embedding_rank", 8),
    (r"qk_rope_head_dim|rotary_dim|d_rel", 4),
    (r"qk_head_dim", 12),
    (r"\w*_layer_offset", 1),
    (r"mamba_(d_head|head_dim|headdim)", 16),
    (r"\w*(num_key_value|kv|key_value)_heads|num_query_groups", 2),
    (r"index_n_heads", 16),  # with few, many scores of an index would be 0, and tie
    (r"\w*(num_|n_)(\w+_)?(attention_)?heads?|\w*attention_heads|n_head", HEADS),
    (r"\w*head_?dim|\w*head_size|kv_channels|dim_head|d_head|d_kv|\w*attention_head_dim", HEAD_DIM),
    (r"moe_(shared_expert_)?intermediate_size|expert_ffn_hidden_size", 12),
    (r"mamba_d_ssm|mamba_intermediate|ssm_intermediate_size", WIDTH),
    (
        r"\w*(intermediate|ffn|ff_|mlp|feed_forward)\w*(size|dim)?|\w*ffn_dim|d_inner|dff|dim_ff|d_ff",
        48,
    ),
    (r"hidden_dim|n_inner|inner_size", 48),
    (r"mamba_d_state|ssm_state_size|state_size|\w*_d_state", 8),
    (r"\w*chunk_size|\w*_chunk_len\w*", 16),
    (r"hidden_size_per_layer_input|index_topk\w*|ple_embed_dim|laurel_rank|compress\w*_dim", 8),
    (r"\w*hidden_size\w*|d_model|n_embd|dim|\w*emb(ed)?(ding)?_(dim|size)|\w*_embed_dim", WIDTH),
    (
        r"word_embed_proj_dim|lru_width|prediction_head_size|\w*out_hidden_size|\w*projection_dim",
        WIDTH,
    ),
    (r"\w*(period|interval|every_n_layers|layer_freq|sparse_step|_pattern)", 2),
    (r"\w*time_step_rank|\w*dt_rank", 4),
)


def _small(name: str, x: Any, options: dict[str, Any], layers: Layers) -> Any:
    """Return the value of an option in the small config."""
    number, kept = layers
    if x is None and name in FILLED:
        return FILLED[name]
    if name in ROTARY and isinstance(x, dict):
        return _rotary(x)
    if name == BY_LAYER and isinstance(x, dict):
        parts = {int(index): part for index, part in x.items()}
        return {
            str(at): {key: _small(key, y, parts[index], layers) for key, y in parts[index].items()}
            for at, index in enumerate(kept)
            if index in parts
        }
    if isinstance(x, list) and len(x) == number > 1:
        return [x[index] for index in kept]
    if TOKEN.fullmatch(name):
        return [_token(part) for part in x] if isinstance(x, list) else _token(x)
    if isinstance(x, bool) or not isinstance(x, int):
        return x
    if name == SHARED and kept != list(range(number)):
        return x and len(kept) // 2
    if x in [options.get(other) for other in SAME.get(name, ())]:
        # For example, latent attention has one key head for each query head.
        name = next(other for other in SAME[name] if x == options.get(other))
    sizes = (size for pattern, size in (*SIZES, (LAYERS, len(kept))) if re.fullmatch(pattern, name))
    # A model that is small already keeps its sizes, which fit one another.
    return min(x, next(sizes, x))


def _token(x: Any) -> Any:
    """Map a token id into the small vocabulary."""
    return x % VOCABULARY if type(x) is int and x >= 0 else x


def _rotary(options: dict[str, Any]) -> dict[str, Any]:
    """Return rotary options for the number of frequencies of a small head."""
    half = HEAD_DIM // 2
    small = {name: _rotary(x) if isinstance(x, dict) else x for name, x in options.items()}
    for name, x in options.items():
        if name == SECTIONS and x:
            small[name] = _sections(len(x), options)
        elif name in ("short_factor", "long_factor") and x:
            small[name] = x[:half]
    return small


def _sections(number: int, options: dict[str, Any]) -> list[int]:
    """Return the number of frequencies of each of `number` axes of positions."""
    half = int(HEAD_DIM // 2 * options.get("partial_rotary_factor", 1))
    return [half - number + 1, *[1] * (number - 1)]
