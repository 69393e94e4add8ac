"""Small models of all types that transformers has, and batches for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import transformers
from torch import Tensor

from parallel_plans.huggingface.probing.proxy_model import WIDTH, small_config
from tests.model_images import IMAGE_TOKENS, Images

KINDS = {
    "causal": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "masked": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "image-text": ("AutoModelForImageTextToText", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
}
SEQ_LEN, FIRST_TOKEN, LAST_TOKEN = 24, 3, 40
Batches = dict[str, dict[str, Tensor]]
"""By name, of what a model is called with."""
IMAGE_AT = 5
"""Tokens of text before the image."""
LARGEST = 20_000_000
"""Weights of a model that is still small."""

CHOOSES_BLOCKS = {
    "layer_types": ["full_attention", "minimax_m3_sparse"],
    "index_block_size": 4,
    "index_topk_blocks": 2,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 6},
        "index_topk": 2,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "dots3_note_text": {
        "layer_types": ["indexed_attention", "sliding_attention"],
        "per_layer_config": {
            "1": {
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "q_lora_rank": 8,
                "kv_lora_rank": 8,
                "head_dim": 12,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 4,
                "v_head_dim": 8,
            }
        },
        "num_hidden_layers": 2,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "gemma3": {"mm_tokens_per_image": 4},
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "gemma4": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "patch_size": 4,
            "pooling_kernel_size": 2,
        }
    },
    "apertus1p5": {
        "image_token_offset": 44,
        "vision_config": {
            "codebook_size": 8,
            "embed_dim": 8,
            "latent_channels": 8,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
        },
        "audio_token_offset": 52,
        "audio_config": {
            "model_type": "wavtokenizer_encoder",
            "codebook_size": 8,
            "codebook_dim": 32,
            "hidden_size": 32,
            "num_filters": 2,
            "num_lstm_layers": 1,
        },
    },
    "inkling2_loop_text": {
        "num_hidden_layers": 3,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
    },
    "mamba2": {"num_heads": 8},
    "dory": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    "reformer": {"is_decoder": True},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "esm": {"vocab_size": 64, "pad_token_id": 0, "token_dropout": False},
    "qwen4_exp_text": {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "xmod": {"default_language": "en_XX"},
    "gemma4_text, shared keys and values": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
    },
    "minimax_m3_vl_text, sparse layers": CHOOSES_BLOCKS,
    "granitemoehybrid, attention only": {"layer_types": ["full_attention"] * 2},
}
"""By type: what its config has no default for, or what users set. Others are variants of a type."""
PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "dots3_note": {
        "text_config": OPTIONS["dots3_note_text"],
        "vision_config": {"adapter_in_dim": WIDTH, "adapter_out_dim": WIDTH},
        "audio_config": {"adapter_input_size": WIDTH, "adapter_out_dim": WIDTH},
    },
    "glm5_next": {"text_config": {"index_kpool": 4}},
    "hy_v4_vl": {"text_config": {"qk_rope_head_dim": 8}},
    "inkling2_loop": {"text_config": OPTIONS["inkling2_loop_text"]},
    "inkling_mm_model": {"vision_config": {"n_layers": 5, "patch_size": 8}},  # fewer need scipy
    "minimax_m3_vl": {"text_config": CHOOSES_BLOCKS},
    "qwen4_exp": {"text_config": OPTIONS["qwen4_exp_text"]},
}
"""The same of the models that a model consists of."""


def types_of(kind: str) -> list[str]:
    """All model types of a kind, and variants of them."""
    names = getattr(transformers.models.auto.modeling_auto, KINDS[kind][1])
    variants = [name for name in OPTIONS if name.partition(",")[0] in names and name not in names]
    return sorted({*names, *variants}) if kind == "causal" else sorted(names)


def small_model(kind: str, name: str) -> Any:
    """The same weights at every call; attention and experts as transformers writes them out."""
    large, parts = default_config(name), PARTS.get(name, {})
    small = {part: small_config(getattr(large, part), **x) for part, x in parts.items()}
    config = small_config(large, **OPTIONS.get(name, {}), **small)
    for option in IMAGE_TOKENS:  # large ids made small may be that of padding
        if getattr(config, option, None) == 0:
            setattr(config, option, LAST_TOKEN)
    for part in _parts(config):
        for option, x in part.to_dict().items():
            if "drop" in option and isinstance(x, float):
                setattr(part, option, 0.0)
    torch.manual_seed(0)
    with torch.device("meta"):
        count = sum(x.numel() for x in auto(kind).from_config(config).parameters())
    if count > LARGEST:
        raise ValueError(f"its small proxy has {count:,} weights")
    model = auto(kind).from_config(config)
    with torch.no_grad():
        for x in model.parameters():  # biases, norms and sinks would hide behind 0 and 1
            x.add_(0.05 * torch.randn_like(x))
    model.set_attn_implementation("eager")
    with suppress(AttributeError, ValueError):
        model.set_experts_implementation("eager")
    return model.float().eval()


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for x in vars(config).values():
        if hasattr(x, "model_type"):
            yield from _parts(x)


def default_config(name: str) -> Any:
    """That of a type, or of the type of a variant."""
    return transformers.CONFIG_MAPPING[name.partition(",")[0]]()


def auto(kind: str) -> Any:
    """The class that makes models of a kind."""
    return getattr(transformers, KINDS[kind][0])


def batches(images: Images | None = None) -> Batches:
    """Plain, padded and packed, with an image in each row; labels are the tokens of text."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(FIRST_TOKEN, LAST_TOKEN, (2, SEQ_LEN), generator=generator)
    inputs: dict[str, Tensor] = {}
    if images is not None:
        tokens = tokens + (tokens == images.token)
        block = torch.full((2, images.num_tokens), images.token)
        tokens = torch.cat([tokens[:, :IMAGE_AT], block, tokens[:, IMAGE_AT:]], 1)
        inputs = dict(images.inputs)
        if images.types:
            inputs[images.types] = (tokens == images.token).long()
    is_text = torch.ones_like(tokens) if images is None else tokens != images.token
    length = tokens.shape[1]
    index = torch.arange(length).expand(2, -1)
    held = index < torch.tensor([[length], [length - 9]])
    labels = tokens.masked_fill(is_text == 0, -100)
    plain = {"input_ids": tokens, "labels": labels} | inputs
    padded = plain | {"input_ids": tokens * held, "attention_mask": held.long()}
    padded["labels"] = labels.masked_fill(~held, -100)
    begin = length - SEQ_LEN + 9
    packed = plain | {"position_ids": torch.where(index < begin, index, index - begin)}
    return {"plain": plain, "padded": padded, "packed": packed}
