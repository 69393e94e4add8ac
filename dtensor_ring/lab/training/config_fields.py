"""The entries of a model's config that are read: their types and ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from dtensor_ring.lab.fields import Range, check_entries

# The largest size that is read: kernels count in int32.
MAX_SIZE = 2**31 - 1

# The largest number of layers: a time line has spans of each.
MAX_LAYERS = 4096

_Size = Annotated[int, Range(1, MAX_SIZE)]
_Count = Annotated[int, Range(0, MAX_SIZE)]


@dataclass(frozen=True)
class ConfigFields:
    """Entries by the names that transformers has for them; any may be left out of a config."""

    hidden_size: _Size
    n_embd: _Size
    d_model: _Size
    num_hidden_layers: Annotated[int, Range(1, MAX_LAYERS)]
    n_layer: Annotated[int, Range(1, MAX_LAYERS)]
    num_layers: Annotated[int, Range(1, MAX_LAYERS)]
    vocab_size: _Size
    num_attention_heads: _Size | None
    n_head: _Size | None
    num_key_value_heads: _Size | None
    head_dim: _Size | None
    intermediate_size: _Size | tuple[_Size, ...] | None
    intermediate_size_mlp: _Size | None
    n_inner: _Size | None
    ffn_dim: _Size | None
    layer_types: tuple[str, ...] | None
    sliding_window: _Count | None
    attention_chunk_size: _Size | None
    kv_lora_rank: _Size | None
    q_lora_rank: _Size | None
    qk_rope_head_dim: _Count | None
    qk_nope_head_dim: _Count | None
    v_head_dim: _Size | None
    num_experts_per_tok: _Count | None
    moe_intermediate_size: _Size | tuple[_Size, ...] | None
    shared_expert_intermediate_size: _Count | None
    num_local_experts: _Count | None
    n_routed_experts: _Count | None
    num_experts: _Count | None
    num_experts_per_token: _Count | None
    n_shared_experts: _Count | None
    num_shared_experts: _Count | None
    first_k_dense_replace: _Count | None
    decoder_sparse_step: _Size | None
    mlp_only_layers: tuple[_Count, ...] | None
    moe_layers: tuple[_Count, ...] | None
    sliding_window_pattern: _Size | None
    linear_num_value_heads: _Size | None
    linear_num_key_heads: _Size | None
    linear_key_head_dim: _Size | None
    linear_value_head_dim: _Size | None
    linear_conv_kernel_dim: _Size | None
    linear_num_heads: _Size | None
    linear_head_dim: _Size | None
    mamba_d_conv: _Size | None
    mamba_n_heads: _Size | None
    mamba_num_heads: _Size | None
    mamba_n_groups: _Size | None
    mamba_d_state: _Size | None
    mamba_head_dim: _Size | None
    mamba_d_ssm: _Size | None
    mamba_expand: _Size | None
    mamba_chunk_size: _Size | None
    ssm_state_size: _Size | None
    conv_kernel: _Size | None
    conv_L_cache: _Size | None
    n_groups: _Size | None
    chunk_size: _Size | None
    shared_intermediate_size: _Size | None
    moe_shared_expert_intermediate_size: _Size | None
    attn_layer_indices: tuple[_Count, ...] | None
    layers_block_type: tuple[str, ...] | None
    mlp_layer_types: tuple[str, ...] | None
    block_multiple_of: _Size | None


def check_config(config: Mapping[str, Any]) -> None:
    """Check the entries of a config that are read, those of its text model, too.

    Raises:
        ValueError: if one is of another type, or out of range.

    >>> check_config({"hidden_size": None})
    Traceback (most recent call last):
        ...
    ValueError: hidden_size of model must be a whole number from 1 to 2,147,483,647, got None
    """
    text = config.get("text_config")
    for entries in (config, *([text] if isinstance(text, Mapping) else [])):
        check_entries(ConfigFields, entries, str(entries.get("model_type") or "model"))
