#!/bin/sh
# transformers 5.24.0, torch 2.15.0: `is_causal = False` of an attention module holds in batches without padding only.
#
# A causal model is made an encoder by `layer.self_attn.is_causal = False`. With `sdpa` a batch without padding then sees both ways.
# In one with padding the model makes a mask, which is causal still, and the module is not asked: a row has other logits as soon as
# another row of the batch is padded. With `eager` it never sees both ways. Nothing is said. `config.is_causal = False` holds always.
#
# Seen: with `sdpa` the logits of a row's first token depend on its last one (by 1.8) while the row is alone, and not at all beside a
# padded row. With `eager` they never do. By the config they do in all four.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 numpy==2.4.6 transformers==5.24.0
cat >"$folder/both_ways.py" <<'PROGRAM'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, initializer_range=0.2)
tokens = torch.arange(2, 14).view(2, 6)
is_token = torch.ones_like(tokens)
is_token[1, 4:] = 0


def of_first(model, rows, mask):
    """Return how much the logits of the first token of row 0 change with its last token."""
    other = rows.clone()
    other[0, -1] += 1
    first, second = (model(x, attention_mask=mask, use_cache=False).logits[0, 0] for x in (rows, other))
    return (first - second).abs().max().item()


for implementation in ("sdpa", "eager"):
    for where in ("module", "config"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(attn_implementation=implementation, **SIZES))
        if where == "config":
            model.config.is_causal = False
        for layer in model.model.layers:
            layer.self_attn.is_causal = False
        with torch.no_grad():
            alone, beside = of_first(model, tokens[:1], is_token[:1]), of_first(model, tokens, is_token)
        print(f"{implementation}, {where}: sees the last token alone: {alone > 1e-3}, beside padding: {beside > 1e-3}")
PROGRAM
"$folder/venv/bin/python" "$folder/both_ways.py" 2>/dev/null >"$folder/seen"
cat "$folder/seen"
diff - "$folder/seen" <<'SEEN'
sdpa, module: sees the last token alone: True, beside padding: False
sdpa, config: sees the last token alone: True, beside padding: True
eager, module: sees the last token alone: False, beside padding: False
eager, config: sees the last token alone: True, beside padding: True
SEEN
