#!/bin/sh
# transformers 5.24.0, torch 2.15.0: Dory takes a cache as `past_key_values` and begins anew without a word.
#
# This version calls the argument `cache` and takes the earlier name until 5.40: Llama, Jamba, Nemotron-H and all others of 150
# decoders with attention go on from a cache given by either name. Dory, new in this version, knows `cache` alone and drops other
# names with its `**kwargs`. A decoding loop that passes `past_key_values`, as most do, runs each token at position 0 without the
# tokens before it. `generate` uses the new name and is right.
#
# Seen: ten tokens, then one token with their cache. By `cache`, the logits are those of all eleven tokens at once and the cache then
# has 11 tokens, in both models. By `past_key_values` that holds for Llama; Dory's logits are another row's and its cache has 1.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 numpy==2.4.6 transformers==5.24.0
cat >"$folder/cache.py" <<'PROGRAM'
import torch
from transformers import DoryConfig, DoryForCausalLM, LlamaConfig, LlamaForCausalLM

sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
sizes |= {"num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 4, "bos_token_id": None}
sizes |= {"eos_token_id": None, "pad_token_id": None}
parts = {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1}
models = {
    "Llama": (LlamaForCausalLM, LlamaConfig(**sizes, initializer_range=0.2)),
    "Dory": (DoryForCausalLM, DoryConfig(**sizes, **parts, initializer_range=0.2)),
}
for name, (make, config) in models.items():
    torch.manual_seed(0)
    model = make(config).eval()
    tokens = torch.randint(0, 64, (1, 11))
    with torch.no_grad():
        whole = model(input_ids=tokens, use_cache=False).logits[:, -1]
        for argument in ("cache", "past_key_values"):
            cache = model(input_ids=tokens[:, :10], use_cache=True).cache
            step = model(input_ids=tokens[:, 10:], use_cache=True, **{argument: cache})
            equal = torch.allclose(step.logits[:, -1], whole, atol=1e-4)
            print(f"{name}, {argument}: equal {equal}, cached {step.cache.get_seq_length()}")
PROGRAM
"$folder/venv/bin/python" "$folder/cache.py" 2>/dev/null >"$folder/seen"
cat "$folder/seen"
diff - "$folder/seen" <<'SEEN'
Llama, cache: equal True, cached 11
Llama, past_key_values: equal True, cached 11
Dory, cache: equal True, cached 11
Dory, past_key_values: equal False, cached 1
SEEN
