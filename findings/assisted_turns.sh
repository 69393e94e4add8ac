#!/bin/sh
# transformers 5.24.0, torch 2.15.0: `generate` with prompt lookup or an assistant, and a cache of earlier turns, appends the cached
# tokens a second time.
#
# A second turn is given whole, with the cache of the first, as in a chat. Greedy decoding then runs the model on the tokens that the
# cache has not seen. With `prompt_lookup_num_tokens` or `assistant_model`, whose tokens should be those of greedy decoding, the
# first forward runs on all tokens of the conversation: those of the first turn are in the cache twice, at other positions, and
# all later ones see both. Nothing is said. Without a cache, the tokens are those of greedy decoding.
#
# Seen: a first turn of 12 tokens and 6 new ones, of which the cache keeps 17; a second one of 4 tokens and 12 new ones. The cache
# has 33 tokens after greedy decoding and 50, which is 17 more, with either option; the new tokens differ. Without the cache of the
# first turn they are equal.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 numpy==2.4.6 transformers==5.24.0
cat >"$folder/turns.py" <<'PROGRAM'
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
config = LlamaConfig(**sizes, **heads, **tokens, initializer_range=0.5)
torch.manual_seed(0)
model, assistant = (LlamaForCausalLM(config).eval() for _ in range(2))
prompt, question = torch.randint(3, 32, (1, 12)), torch.randint(3, 32, (1, 4))
first = model.generate(prompt, max_new_tokens=6, do_sample=False)
both = torch.cat([first, question], 1)


def second_turn(has_cache, **how):
    cache = DynamicCache(config=config)
    if has_cache:
        model.generate(prompt, max_new_tokens=6, do_sample=False, past_key_values=cache)
    how |= {"max_new_tokens": 12, "do_sample": False, "past_key_values": cache}
    return model.generate(both, **how)[0, both.shape[1] :], cache.get_seq_length()


greedy, length = second_turn(True)
print("greedy decoding: cached", length)
for name, how in (
    ("prompt lookup", {"prompt_lookup_num_tokens": 3}),
    ("an assistant", {"assistant_model": assistant}),
):
    found, length = second_turn(True, **how)
    print(f"{name}: cached {length}, equal", torch.equal(found, greedy))
    found, length = second_turn(False, **how)
    print(f"{name}, a new cache: cached {length}, equal", torch.equal(found, greedy))
PROGRAM
"$folder/venv/bin/python" "$folder/turns.py" 2>/dev/null >"$folder/seen"
cat "$folder/seen"
diff - "$folder/seen" <<'SEEN'
greedy decoding: cached 33
prompt lookup: cached 50, equal False
prompt lookup, a new cache: cached 33, equal True
an assistant: cached 50, equal False
an assistant, a new cache: cached 33, equal True
SEEN
