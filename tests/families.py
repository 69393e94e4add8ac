"""Small models of the families of transformers, with random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 32
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "initializer_range": 0.2,
} | {f"{name}_token_id": 1 for name in ("bos", "eos", "cls", "sep")}
HEAD_DIM = {"head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
}
ROUTED = {
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
}
LLAMA4 = {
    "intermediate_size_mlp": 24,
    "attention_chunk_size": 12,
    "num_local_experts": 2,
    "no_rope_layers": [1, 0],
    "layer_types": ["chunked_attention", "full_attention"],
    "floor_scale": 7,
    "attn_scale": 0.3,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LONG_ROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1.0, 1.5],
    "long_factor": [1.0, 4.0],
    "original_max_position_embeddings": 17,  # plain batches are longer, packed ones are not
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Mistral, short window": ("Mistral", {"sliding_window": 3}),
    "Mistral, long window": ("Mistral", {"sliding_window": 30}),
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", HEAD_DIM),
    "Qwen3-MoE": ("Qwen3Moe", HEAD_DIM | EXPERTS),
    "Qwen3-MoE, router loss": (
        "Qwen3Moe",
        HEAD_DIM | EXPERTS | {"output_router_logits": True, "router_aux_loss_coef": 0.5},
    ),
    "Mixtral, router loss": (
        "Mixtral",
        {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5},
    ),
    "Gemma 2": ("Gemma2", HEAD_DIM | {"sliding_window": 5, "query_pre_attn_scalar": 8}),
    "Gemma 3": ("Gemma3", HEAD_DIM | {"sliding_window": 5, "sliding_window_pattern": 2}),
    "gpt-oss": (
        "GptOss",
        HEAD_DIM | {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "Phi-3": ("Phi3", {"sliding_window": 7}),
    "Phi-3, longrope": ("Phi3", {"rope_parameters": LONG_ROPE}),
    "Llama, dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0}, "max_position_embeddings": 17},
    ),
    "OLMo 2": ("Olmo2", {}),
    "Granite": ("Granite", {"attention_multiplier": 0.3, "residual_multiplier": 0.7}),
    "Llama 4": ("Llama4", HEAD_DIM | LLAMA4),
    "DeepSeek-V3": ("DeepseekV3", LATENT | ROUTED),
    "ModernBERT": ("ModernBert", {"local_attention": 6, "global_attn_every_n_layers": 2}),
    "BERT": ("Bert", NO_DROPOUT),
    "RoBERTa": ("Roberta", NO_DROPOUT),
    "OPT": ("OPT", {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0}),
}
ENCODERS = ("ModernBERT", "BERT", "RoBERTa")
TEXT = ("Gemma3", "Llama4")
"""Their configs of language models are named so."""


def small_model(family: str, head: str = "", **changes: Any) -> Any:
    """The same weights at every call, attention as transformers writes it out."""
    name, options = FAMILIES[family]
    text = "Text" if name in TEXT else ""
    config = getattr(transformers, f"{name}{text}Config")(**SMALL | options | changes)
    head = head or ("ForMaskedLM" if family in ENCODERS else "ForCausalLM")
    torch.manual_seed(0)
    model = getattr(transformers, name + head)(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases, norms and sinks would hide behind 0 and 1
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.set_attn_implementation("eager")
    return model.eval()
