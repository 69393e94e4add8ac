#!/bin/sh
# transformers 5.24.0, torch 2.15.0: packed documents are apart only in a forward without a cache, and the default is with one.
#
# `position_ids` that start anew mark packed documents, as `DataCollatorWithFlattening` gives them. `model(ids, position_ids=...)` makes
# a cache, as `config.use_cache` is True by default, also in training mode and beside labels, and with a cache documents see one
# another. Nothing is said. `Trainer` turns the cache off; a loop of one's own does not. `use_cache=False` keeps
# documents apart. So documents leak into one another, or do not, by an option that names something else.
#
# Seen: whether the logits of the second document are those that it has alone: default False, `use_cache=False` True, in training
# mode and in evaluation mode.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 numpy==2.4.6 transformers==5.24.0
cat >"$folder/packing.py" <<'PROGRAM'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
tokens = torch.arange(3, 11)[None]
positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
with torch.no_grad():
    alone = model(tokens[:, 4:]).logits
    for mode in (True, False):
        model.train(mode)
        for options in ({}, {"use_cache": False}):
            found = model(tokens, position_ids=positions, labels=tokens, **options).logits[:, 4:]
            print("training" if mode else "evaluation", options, torch.allclose(found, alone, atol=1e-5))
PROGRAM
"$folder/venv/bin/python" "$folder/packing.py" 2>/dev/null >"$folder/seen"
cat "$folder/seen"
diff - "$folder/seen" <<'SEEN'
training {} False
training {'use_cache': False} True
evaluation {} False
evaluation {'use_cache': False} True
SEEN
