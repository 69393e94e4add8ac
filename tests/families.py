"""Small models of the families of transformers, with random weights."""

from __future__ import annotations

import re
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
    "Phi-3, longrope": (
        "Phi3",  # plain batches are longer than 17, packed ones are not
        {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 17},
    ),
    "Llama, dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0}, "max_position_embeddings": 17},
    ),
    "OLMo 2": ("Olmo2", {}),
    "Nemotron": ("Nemotron", {}),
    "Granite": ("Granite", {"attention_multiplier": 0.3, "residual_multiplier": 0.7}),
    "Llama 4": ("Llama4", HEAD_DIM | LLAMA4),
    "DeepSeek-V3": ("DeepseekV3", LATENT | ROUTED),
    "ModernBERT": ("ModernBert", {"local_attention": 6, "global_attn_every_n_layers": 2}),
    "BERT": ("Bert", NO_DROPOUT),
    "RoBERTa": ("Roberta", NO_DROPOUT),
    "OPT": ("OPT", {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0}),
}
DELTA_NET = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 6,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 4,
    "mamba_expand": 2,
}
INKLING = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 6,
    "d_rel": 3,
    "rel_extent": 9,
    "layer_types": ["hybrid_sliding", "hybrid"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}
GRANITE = {"num_local_experts": 2, "output_router_logits": False, "shared_intermediate_size": 24}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-Next": (
        "Qwen3Next",
        HEAD_DIM | EXPERTS | DELTA_NET | {"shared_expert_intermediate_size": 12},
    ),
    "Qwen3.5": ("Qwen3_5", HEAD_DIM | DELTA_NET),
    "OLMo hybrid": ("OlmoHybrid", DELTA_NET),
    "Kimi Linear": (
        "KimiLinear",
        LATENT
        | {"q_lora_rank": None, "linear_head_dim": 4, "linear_num_heads": 4}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
        | {"layer_types": ["linear_attention", "full_attention"]}
        | {"mlp_layer_types": ["dense", "sparse"]},
    ),
    "Granite 4": ("GraniteMoeHybrid", MAMBA | GRANITE | {"layer_types": ["mamba", "attention"]}),
    "Granite 4, attention only": (
        "GraniteMoeHybrid",
        MAMBA | GRANITE | {"layer_types": ["attention", "attention"]},
    ),
    "Nemotron-H": (
        "NemotronH",
        {"layers_block_type": ["mamba", "attention", "mlp", "mamba"], "head_dim": 4}
        | {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 6}
        | {"n_groups": 1, "chunk_size": 4},
    ),
    "Falcon-H1": ("FalconH1", MAMBA | {"mamba_d_ssm": 32}),
    "Bamba": ("Bamba", MAMBA | {"attn_layer_indices": [1]}),
    "Zamba2": (
        "Zamba2",
        {"mamba_ngroups": 1, "n_mamba_heads": 4, "mamba_d_state": 6, "chunk_size": 4}
        | {"layers_block_type": ["linear_attention", "hybrid", "linear_attention"]}
        | {"num_hidden_layers": 3, "num_mem_blocks": 1, "use_shared_attention_adapter": False},
    ),
    "LFM2": ("Lfm2", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
    "MiniMax-01": (
        "MiniMax",
        HEAD_DIM
        | {"layer_types": ["linear_attention", "full_attention"]}
        | {"num_local_experts": 2, "block_size": 4},
    ),
    "Jamba": (
        "Jamba",
        {"mamba_d_state": 6, "mamba_dt_rank": 4, "num_experts": 2}
        | {"attn_layer_period": 2, "attn_layer_offset": 1}
        | {"expert_layer_period": 2, "expert_layer_offset": 1},
    ),
    "Zamba": (
        "Zamba",
        {"mamba_d_state": 6, "mamba_dt_rank": 4, "n_mamba_heads": 2}
        | {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    ),
    "Inkling": (
        "Inkling",
        HEAD_DIM | INKLING | {"mlp_layer_types": ["dense", "sparse"], "n_shared_experts": 1},
    ),
    "Inkling, scaled": (
        "Inkling",  # by positions in a row, also of packed documents
        HEAD_DIM | INKLING | {"log_scaling_n_floor": 5, "n_shared_experts": 1},
    ),
    "Inkling 2": (
        "Inkling2",
        HEAD_DIM
        | INKLING
        | {"num_hidden_layers": 4, "layer_types": ["hybrid_sliding", "hybrid"] * 2}
        | {"n_layers_per_attn_res_block": 2, "log_scaling_n_floor": 5}
        | {"unpadded_vocab_size": VOCABULARY},
    ),
    "Mamba": ("Mamba", {"state_size": 6, "time_step_rank": 4}),
    "FalconMamba": ("FalconMamba", {"state_size": 6, "time_step_rank": 4}),
    "Mamba 2": (
        "Mamba2",
        {"num_heads": 4, "head_dim": 8, "state_size": 6}
        | {"n_groups": 1, "chunk_size": 4, "expand": 2},
    ),
}
"""Layers with a state, some beside attention."""
if hasattr(transformers, "Inkling2LoopTextConfig"):  # since 5.24
    HYBRIDS["Inkling 2, loop"] = (
        "Inkling2Loop",
        HEAD_DIM
        | INKLING
        | {"num_hidden_layers": 3, "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"]}
        | {"n_layers_per_attn_res_block": 1, "log_scaling_n_floor": 5}
        | {"initializer_range": 0.05}  # the passes of 0.2 amplify rounding to 2e-5
        | {"loop_layer_index_start": 1, "loop_layer_index_end": 2, "loop_gate_rank": 4}
        | {"unpadded_vocab_size": VOCABULARY},
    )

INDEX = {
    "index_topk": 5,
    "index_n_heads": 16,  # with few, many scores would be 0, and tie
    "index_head_dim": 8,
    "num_hidden_layers": 3,
}
SHARES = {"indexer_types": ["full", "shared", "full"]}
ROUTED_BY_TYPE = {"mlp_layer_types": ["dense", "sparse", "sparse"], "n_shared_experts": 1}
SELECTING: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-V3.2": ("DeepseekV32", LATENT | ROUTED | INDEX),
    "GLM-5": ("GlmMoeDsa", LATENT | ROUTED | INDEX | SHARES),
    "A.X K2": ("AXK2", LATENT | ROUTED | INDEX | ROUTED_BY_TYPE | {"gated_norm_rank": 4}),
    "Hy 4": (
        "HYV4",
        LATENT | ROUTED | INDEX | ROUTED_BY_TYPE | SHARES | {"n_group": 1, "hc_mult": 2},
    ),
}
"""Layers whose index chooses the keys of each token."""

CHOOSES_BLOCKS: dict[str, tuple[str, dict[str, Any]]] = {
    "MiniMax M3": (
        "MiniMaxM3VL",
        HEAD_DIM
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4}
        | {"dense_intermediate_size": 24, "shared_intermediate_size": 12}
        | {"index_n_heads": 2, "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 2}
        | {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"], "num_hidden_layers": 3},
    )
}
"""Layers whose index chooses blocks of the row for each head of keys; rows are one document."""

COMPRESSED = "compressed_sparse_attention", "heavily_compressed_attention"
CHOOSES_POOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "GLM-5-Next": (
        "Glm5Next",
        LATENT
        | {"qk_rope_head_dim": 0}
        | ROUTED_BY_TYPE
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
        | {"index_n_heads": 16, "index_head_dim": 8, "index_topk": 8, "index_kpool": 4}
        | {"linear_head_dim": 4, "linear_num_heads": 4, "hc_mult": 2, "num_hidden_layers": 3}
        | {"layer_types": ["linear_attention", "indexed_attention", "indexed_attention"]}
        | {"indexer_types": ["full", "full", "shared"]}
        | {"initializer_range": 0.05},  # ten steps of 0.2 amplify rounding to 4e-4
    ),
    "Qwen4-Exp": (
        "Qwen4Exp",
        HEAD_DIM
        | EXPERTS
        | DELTA_NET
        | {"layer_types": ["linear_attention", "indexed_attention"], "hc_count": 2, "hc_lowrank": 4}
        | {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 8}
        | {"indexer_budget": 6, "indexer_compress_ratio": 3}
        | {"shared_expert_intermediate_size": 12},
    ),
}
"""Layers whose index chooses pools of the row, beside layers with a state."""

BESIDE_POOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-V4": (
        "DeepseekV4",
        HEAD_DIM
        | {"num_key_value_heads": 1, "q_lora_rank": 8, "o_groups": 2, "o_lora_rank": 6}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
        | {"num_hidden_layers": 3, "mlp_layer_types": ["hash_moe", "moe", "moe"], "hc_mult": 2}
        | {"index_n_heads": 16, "index_head_dim": 8, "index_topk": 2, "sliding_window": 6}
        | {"compress_rates": dict(zip(COMPRESSED, (3, 5), strict=True))}
        | {"layer_types": [COMPRESSED[1], COMPRESSED[0], "sliding_attention"]},
    )
}
"""Layers that see pools of the row beside a window of tokens."""

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "RecurrentGemma": (
        "RecurrentGemma",
        {"lru_width": 16, "attention_window_size": 8, "num_hidden_layers": 3}
        | {"block_types": ["recurrent", "attention"]},
    ),
    "xLSTM": ("xLSTM", {"num_heads": 2, "embedding_dim": 16, "num_blocks": 2}),
}
ENCODERS = ("ModernBERT", "BERT", "RoBERTa")
TEXT = (
    *("Gemma3", "Llama4", "Qwen3_5", "Inkling", "Inkling2", "Inkling2Loop", "MiniMaxM3VL"),
    *("Glm5Next", "Qwen4Exp"),
)
"""Their configs of language models are named so."""
WITH_IMAGES = ("Glm5Next",)
"""They have no head for language models alone."""
VISION = {"hidden_size": 16, "intermediate_size": 24, "depth": 1, "num_heads": 2}
VISION |= {"out_hidden_size": 16, "projection_intermediate_size": 24, "patch_size": 4}


def small_model(family: str, head: str = "", **changes: Any) -> Any:
    """The same weights at every call, attention as transformers writes it out."""
    of_rows = CHOOSES_BLOCKS | CHOOSES_POOLS | BESIDE_POOLS
    name, options = (FAMILIES | HYBRIDS | SELECTING | of_rows | REFUSED)[family]
    text = "Text" if name in TEXT else ""
    config = getattr(transformers, f"{name}{text}Config")(**SMALL | options | changes)
    head = head or ("ForMaskedLM" if family in ENCODERS else "ForCausalLM")
    if name in WITH_IMAGES:
        head = "ForConditionalGeneration"
        whole = getattr(transformers, f"{name}Config")
        config = whole(text_config=config, vision_config=VISION, pad_token_id=0)
    torch.manual_seed(0)
    model = getattr(transformers, name + head)(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases, norms and sinks would hide behind 0 and 1
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.set_attn_implementation("eager")
    return model.eval()


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """The model in another dtype, but for what its class wants in float32."""
    model.to(dtype)
    kept = re.compile("|".join(model._keep_in_fp32_modules_strict or ["$^"]))
    for name, x in model.named_parameters():
        x.data = x.data.float() if kept.search(name) else x.data
    model.set_experts_implementation("eager")  # the others take no float64, nor any width
    return model
