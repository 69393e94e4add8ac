#!/bin/sh
# transformers 5.24.0 with torch 2.15.0: a model of float64 with eager attention gives NaN for a row with padding on the left.
#
# The mask hides a key by the least number of the model's dtype. `eager_attention_forward` computes the softmax in float32, where the
# least float64 is minus infinity: a padding token, which sees no key at all, has NaN, and in the next layer its NaN reaches all
# tokens of the row, as 0 * NaN is NaN. In float32 the same token has finite numbers. Nothing is said. With `sdpa` all is finite.
#
# Seen: whether the logits of real tokens are finite: eager float32 True, eager float64 False, sdpa float64 True.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 transformers==5.24.0 numpy==2.4.6
cat >"$folder/doubles.py" <<'PROGRAM'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
tokens, mask = torch.arange(8)[None], torch.ones(1, 8, dtype=torch.int64)
mask[0, :3] = 0
for kind, dtype in (("eager", torch.float32), ("eager", torch.float64), ("sdpa", torch.float64)):
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(dtype).eval()
    model.set_attn_implementation(kind)
    logits = model(tokens, attention_mask=mask, use_cache=False).logits
    print(kind, dtype, logits[0, 3:].isfinite().all().item())
PROGRAM
"$folder/venv/bin/python" "$folder/doubles.py" 2>/dev/null >"$folder/seen"
cat "$folder/seen"
printf 'eager torch.float32 True\neager torch.float64 False\nsdpa torch.float64 True\n' | diff - "$folder/seen"
