#!/bin/sh
# peft 0.21.2, torch 2.15.0: an adapter of the output projection of `nn.MultiheadAttention` does nothing until it is merged.
#
# `target_modules=["out_proj"]` matches the linear layer of that name within the module, and the number of trainable parameters
# says that it was adapted. But the module never calls this layer: it reads its weight, which the adapted layer passes on from the
# one below. So the adapter neither changes an output nor gets a gradient, while `merge_and_unload` writes it into that weight, and
# the merged model computes other numbers than the one that was tested. Nothing is said. An adapter of the whole module
# (`["mha"]`), or of a linear layer that is called, is the same before and after.
#
# Seen: weights of a LoRA are set by hand. With "out_proj" the outputs are those without an adapter, no gradient arrives, and
# merging changes them. With "mha" and "after" the outputs change, gradients arrive, and merging changes nothing. The same was seen
# by hand with DoRA, LoHa, LoKr, OFT, BOFT, IA3, VeRA, FourierFT, HRA and RandLora.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 numpy==2.4.6 transformers==5.24.0 peft==0.21.2
cat >"$folder/merged.py" <<'PROGRAM'
import torch
from peft import LoraConfig, get_peft_model
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mha, self.after = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 16)

    def forward(self, x):
        return self.after(self.mha(x, x, x, need_weights=False)[0])


for target in ("out_proj", "mha", "after"):
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 8, 16, requires_grad=True)
    without = model(x)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=[target]))
    weights = [(name, x) for name, x in model.named_parameters() if x.requires_grad]
    for _, weight in weights:
        nn.init.normal_(weight, std=0.5)
    before = model(x)
    before.square().sum().backward()
    has_grad = all(weight.grad is not None for _, weight in weights)
    after = model.merge_and_unload()(x)
    print(
        f"{target}: {sum(x.numel() for _, x in weights)} weights,",
        f"changes outputs {not torch.allclose(before, without, atol=1e-5)},",
        f"has gradients {has_grad}, merged equal {torch.allclose(before, after, atol=1e-5)}",
    )
PROGRAM
"$folder/venv/bin/python" "$folder/merged.py" 2>/dev/null >"$folder/seen"
cat "$folder/seen"
diff - "$folder/seen" <<'SEEN'
out_proj: 128 weights, changes outputs False, has gradients False, merged equal False
mha: 384 weights, changes outputs True, has gradients True, merged equal True
after: 128 weights, changes outputs True, has gradients True, merged equal True
SEEN
