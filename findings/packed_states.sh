#!/bin/sh
# transformers 5.24.0, torch 2.15.0: packed documents that `position_ids` mark are apart in a Llama, and not in Granite 4.
#
# `DataCollatorWithFlattening` marks packed documents by `position_ids` that start anew. A Llama makes its mask of them. Granite 4
# (`GraniteMoeHybrid`) takes no notice: the states of its Mamba 2 layers run on from one document to the next, its attention layers
# see the documents before, and nothing is said.
#
# Seen: the loss of three documents in one row is that of the three alone in a Llama, to 1e-5. In Granite 4 it differs by 0.49
# with a Mamba 2 layer and one of attention, and by 0.19 with two of attention.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 numpy==2.4.6 transformers==5.24.0
cat >"$folder/packed.py" <<'PROGRAM'
import torch
from transformers import (
    DataCollatorWithFlattening,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

SIZES = dict(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)


def granite(*layer_types):
    config = GraniteMoeHybridConfig(
        **SIZES, intermediate_size=24, shared_intermediate_size=24, num_key_value_heads=2,
        num_local_experts=2, layer_types=[*layer_types], mamba_n_heads=4, mamba_d_head=8,
        mamba_d_state=6, mamba_n_groups=1, mamba_chunk_size=4, mamba_expand=2, initializer_range=0.5,
    )
    return GraniteMoeHybridForCausalLM(config)


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=24, initializer_range=0.5))


def difference(make, *layer_types):
    """Of the loss of documents in one row, and the mean of theirs alone."""
    torch.manual_seed(0)
    model = make(*layer_types).eval()
    documents = [torch.randint(2, 64, (length,)) for length in (7, 9, 8)]
    rows = [{"input_ids": x.tolist(), "labels": x.tolist()} for x in documents]
    batch = DataCollatorWithFlattening()(rows)
    assert batch["position_ids"].tolist()[0][7] == 0  # the second document starts anew
    with torch.no_grad():
        packed = model(**batch, use_cache=False).loss
        alone = sum(model(x[None], labels=x[None], num_items_in_batch=21).loss for x in documents)
    return abs(packed - alone).item()


print("Llama, equal:", difference(llama) < 1e-5)
print("Granite 4 with a Mamba 2 layer, equal:", difference(granite, "mamba", "attention") < 0.1)
print("Granite 4 with attention, equal:", difference(granite, "attention", "attention") < 0.1)
PROGRAM
"$folder/venv/bin/python" -W ignore "$folder/packed.py" 2>/dev/null | tee "$folder/seen"
cat >"$folder/expected" <<'EXPECTED'
Llama, equal: True
Granite 4 with a Mamba 2 layer, equal: False
Granite 4 with attention, equal: False
EXPECTED
diff "$folder/expected" "$folder/seen"
