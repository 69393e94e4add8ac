#!/bin/sh
# transformers 5.24.0, torch 2.15.0: a second call of several tokens with a cache begins Mamba 1 layers without their state.
#
# A prompt that is given in two calls with one cache, as in a chat, or by `generate(prefill_chunk_size=...)`, has the logits of one call
# in a Llama and in Mamba 2. In Mamba, FalconMamba and Jamba the second call reads neither the state of the scan nor the last columns of
# the convolution, though the cache has both: it reads them where the call has a single token. Nothing is said. One token at a
# time is right.
#
# Seen: whether the last logits of 23 tokens are those of one call: 12 and then 11 tokens False, 22 and then 1 True; in Mamba 2
# True and True. In Jamba, `generate` in chunks of 8 tokens differs from `generate` without: equal False.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 numpy==2.4.6 transformers==5.24.0
cat >"$folder/turns.py" <<'PROGRAM'
import torch
from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.2}
tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
attention = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
layers = {"num_experts": 2, "mamba_d_state": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
scan = {"state_size": 4, "time_step_rank": 4}
heads = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1}
MODELS = [
    (MambaForCausalLM, MambaConfig(**sizes, **tokens, **scan)),
    (FalconMambaForCausalLM, FalconMambaConfig(**sizes, **tokens, **scan)),
    (
        JambaForCausalLM,
        JambaConfig(**sizes, **tokens, **attention, **layers, use_mamba_kernels=False),
    ),
    (Mamba2ForCausalLM, Mamba2Config(**sizes, **tokens, **heads)),
]
ids = torch.randint(3, 64, (2, 23), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def in_two_calls(model, first):
    cache = model(ids[:, :first], use_cache=True).cache
    return model(ids[:, first:], cache=cache, use_cache=True).logits[:, -1]


for kind, config in MODELS:
    torch.manual_seed(0)
    model = kind(config).eval()
    whole = model(ids).logits[:, -1].detach()
    same = [torch.allclose(in_two_calls(model, n), whole, atol=1e-4) for n in (12, 22)]
    print(kind.__name__, *same)
    if kind is JambaForCausalLM:
        how = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
        plain = model.generate(ids, do_sample=False, **how).logits[0]
        chunks = model.generate(ids, do_sample=False, prefill_chunk_size=8, **how).logits[0]
        print("generate in chunks: equal", torch.allclose(plain, chunks, atol=1e-4))
PROGRAM
"$folder/venv/bin/python" "$folder/turns.py" 2>/dev/null >"$folder/seen"
cat "$folder/seen"
diff - "$folder/seen" <<'SEEN'
MambaForCausalLM False True
FalconMambaForCausalLM False True
JambaForCausalLM False True
generate in chunks: equal False
Mamba2ForCausalLM True True
SEEN
