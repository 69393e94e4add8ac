"""Small Hugging Face models, one for each kind of attention that families of models have."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
} | {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")}
WINDOW = {"sliding_window": 256}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
LATENT = {
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}
GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
CHUNKS = {"attention_chunk_size": 256, "num_local_experts": 4, "intermediate_size_mlp": 352}
NO_SCALING = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", WINDOW),
    "gemma2": ("Gemma2", WINDOW | {"head_dim": 32, "query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3", WINDOW | {"head_dim": 32, "query_pre_attn_scalar": 32}),
    "gpt_oss": ("GptOss", WINDOW | EXPERTS | NO_SCALING | {"head_dim": 32, "num_local_experts": 4}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS | {"head_dim": 32, "num_experts": 4}),
    "deepseek_v3": ("DeepseekV3", EXPERTS | LATENT | GROUPS),
    "llama4": ("Llama4", CHUNKS | {"head_dim": 32, "num_experts_per_tok": 1}),
    "modernbert": ("ModernBert", {"local_attention": 256}),
}
TEXT_CONFIGS = ("Gemma3", "Llama4")
MASKED = ("modernbert",)
"""Models that learn to fill in masked bytes, not the next byte."""


def small_model(name: str, seq_len: int) -> Any:
    """The model of that name, the same weights on every rank."""
    family, options = MODELS[name]
    config_name = f"{family}{'Text' if family in TEXT_CONFIGS else ''}Config"
    sizes = SIZES | {"max_position_embeddings": seq_len} | options
    config = getattr(transformers, config_name)(**sizes)
    head = "ForMaskedLM" if name in MASKED else "ForCausalLM"
    torch.manual_seed(0)
    return getattr(transformers, f"{family}{head}")(config)
