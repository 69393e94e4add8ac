#!/bin/sh
# transformers 5.24.0, torch 2.15.0: an attention mask that numbers packed documents is taken as true or false.
#
# Some collators mark packed documents in the attention mask, 1 1 2 2 3 3 0. A Llama takes any number but 0 as "a token", so
# documents see one another, and nothing is said: the logits are those of the mask 1 1 1 1 1 1 0, to the last bit.
# `position_ids` that start anew, without a mask, keep documents apart.
#
# Seen: "equal to ones: True", "equal to documents apart: False", and True for `position_ids`.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 numpy==2.4.6 transformers==5.24.0
cat >"$folder/mask.py" <<'PROGRAM'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
model = LlamaForCausalLM(config).eval()
tokens = torch.randint(0, 64, (1, 7))
numbered = torch.tensor([[1, 1, 2, 2, 3, 3, 0]])
with torch.no_grad():
    seen = model(tokens, attention_mask=numbered).logits[:, :6]
    ones = model(tokens, attention_mask=numbered.clamp(max=1)).logits[:, :6]
    alone = torch.cat([model(tokens[:, i : i + 2]).logits for i in (0, 2, 4)], 1)
    positions = torch.tensor([[0, 1, 0, 1, 0, 1]])
    packed = model(tokens[:, :6], position_ids=positions, use_cache=False).logits
print("equal to ones:", torch.equal(seen, ones))
print("equal to documents apart:", torch.allclose(seen, alone, atol=1e-5))
print("by position_ids:", torch.allclose(packed, alone, atol=1e-5))
PROGRAM
"$folder/venv/bin/python" -W ignore "$folder/mask.py" 2>/dev/null | tee "$folder/seen"
printf 'equal to ones: True\nequal to documents apart: False\nby position_ids: True\n' | diff - "$folder/seen"
