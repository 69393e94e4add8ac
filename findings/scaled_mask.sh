#!/bin/sh
# torch 2.15.0, CPU: causal attention with a scale of 0 or less is NaN, or zeros in bfloat16, where a query may not see all keys.
#
# `F.scaled_dot_product_attention(..., is_causal=True, scale=s)` runs the CPU's fused kernel, which puts -inf where a query may not
# look and multiplies by the scale after that: 0 makes NaN of it, and a negative scale +inf. A scale that a model learns, or that
# is annealed to 0, comes there. Nothing is said; the zeros look like an output. The math backend, and the same mask given as
# `attn_mask`, are right with any scale.
#
# Seen: 64 tokens with one-hot values, so that an output is a row of weights. Only the last query, which sees all keys, is
# right with scales of 0 and -0.1; the other 63 rows are NaN, or zeros for -0.1 in bfloat16. With 0.1 all three ways are equal.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 numpy==2.4.6
cat >"$folder/scale.py" <<'PROGRAM'
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.manual_seed(0)
query, key = torch.randn(2, 1, 1, 64, 64)
value = torch.eye(64)[None, None]
causal = torch.ones(64, 64, dtype=torch.bool).tril()
for dtype in (torch.float32, torch.bfloat16):
    inputs = [x.to(dtype) for x in (query, key, value)]
    for scale in (0.1, 0.0, -0.1):
        with sdpa_kernel(SDPBackend.MATH):
            right = F.scaled_dot_product_attention(*inputs, is_causal=True, scale=scale)
        masked = F.scaled_dot_product_attention(*inputs, attn_mask=causal, scale=scale)
        fused = F.scaled_dot_product_attention(*inputs, is_causal=True, scale=scale)
        print(
            f"{dtype}, {scale}: the mask equal {torch.allclose(masked, right, atol=0.02)},",
            f"is_causal equal {torch.allclose(fused, right, atol=0.02)},",
            f"rows with NaN {fused.isnan().any(-1).sum()},",
            f"rows of zeros {(fused == 0).all(-1).sum()}",
        )
PROGRAM
"$folder/venv/bin/python" "$folder/scale.py" 2>/dev/null >"$folder/seen"
cat "$folder/seen"
diff - "$folder/seen" <<'SEEN'
torch.float32, 0.1: the mask equal True, is_causal equal True, rows with NaN 0, rows of zeros 0
torch.float32, 0.0: the mask equal True, is_causal equal False, rows with NaN 63, rows of zeros 0
torch.float32, -0.1: the mask equal True, is_causal equal False, rows with NaN 63, rows of zeros 0
torch.bfloat16, 0.1: the mask equal True, is_causal equal True, rows with NaN 0, rows of zeros 0
torch.bfloat16, 0.0: the mask equal True, is_causal equal False, rows with NaN 63, rows of zeros 0
torch.bfloat16, -0.1: the mask equal True, is_causal equal False, rows with NaN 0, rows of zeros 63
SEEN
