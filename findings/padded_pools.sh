#!/bin/sh
# transformers 5.24.0, torch 2.15.0: padding on the left changes what DeepSeek-V4 computes for all tokens of a row.
#
# A batch of prompts is padded on the left, with an attention mask, and `position_ids` that count real tokens. A Llama then gives
# each token the logits that it has in the row alone. DeepSeek-V4 pools tokens from the first slot of the row on, padding included,
# and a query sees pools by its position. So pools have other tokens, those of padding among them, and pools are seen too early.
# Padding of whole pools does not help. Nothing is said. Prompts of one length, or one at a time, are right.
#
# Seen: with 3 and 8 tokens of padding, the largest difference of logits is below 1e-5 in a Llama. In a DeepSeek-V4 of two layers,
# with pools of 4 and 8 tokens, it is 3.3 and 3.4, where the largest logit is 2.5.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 numpy==2.4.6 transformers==5.24.0
cat >"$folder/padded.py" <<'PROGRAM'
import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, LlamaConfig, LlamaForCausalLM

SIZES = dict(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.2)


def deepseek(pool):
    config = DeepseekV4Config(
        **SIZES, head_dim=8, num_key_value_heads=1, q_lora_rank=8, o_groups=2, o_lora_rank=6,
        n_routed_experts=2, num_experts_per_tok=1, moe_intermediate_size=12,
        mlp_layer_types=["moe", "moe"], hc_mult=2, index_n_heads=4, index_head_dim=8, index_topk=8,
        sliding_window=6,
        compress_rates={"compressed_sparse_attention": pool, "heavily_compressed_attention": 2 * pool},
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
    )
    return DeepseekV4ForCausalLM(config)


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=24))


def moved(model, pads):
    """How far logits of a row move when `pads` tokens of padding stand before it."""
    ids = torch.arange(2, 34).reshape(1, -1)
    padded = torch.cat([torch.zeros(1, pads, dtype=torch.long), ids], 1)
    mask = (torch.arange(padded.shape[1]) >= pads).long()[None]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        alone = model(ids, use_cache=False).logits
        beside = model(padded, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return (alone - beside[:, pads:]).abs().max().item()


for name, make in {"Llama": llama, "DeepSeek-V4": lambda: deepseek(4)}.items():
    torch.manual_seed(0)
    model = make().eval()
    for pads in (3, 8):
        found = moved(model, pads)
        print(name, pads, "moved" if found > 1 else "same" if found < 1e-5 else found)
PROGRAM
"$folder/venv/bin/python" "$folder/padded.py" 2>/dev/null >"$folder/seen"
cat "$folder/seen"
printf 'Llama 3 same\nLlama 8 same\nDeepSeek-V4 3 moved\nDeepSeek-V4 8 moved\n' | diff - "$folder/seen"
