#!/bin/sh
# torch 2.15.0: what is written into a row of a sharded DTensor is lost, and nothing is raised.
#
# `x[0] = 5.0`, `x[1:3] = 5.0`, `x[0] += 1` and `x[0].zero_()` of a DTensor that is sharded along its rows leave it as it was: a row is no
# view of the shards but a tensor of its own, made of all of them. Along a dimension that is not sharded the same lines write. A mask
# (`x[x > 0] = 5.0`), lists of rows and `scatter_` write, or raise.
#
# So `nn.Embedding(..., padding_idx=0)`, whose weight is sharded by rows as FSDP2 shards it, has no row of zeros after
# `reset_parameters()`, the usual call after `to_empty()`: it writes the row by its index.
#
# Seen, on two ranks: four rows of ones have the sums 2 2 2 2 after `x[0] = 5.0` and `x[1:3] += 1.0`, and 6 6 6 6 after `x[:, 0] = 5.0`.
# The row of padding has only zeros: False when the weight is sharded, True when it is not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 numpy==2.4.6
cat >"$folder/writes.py" <<'PROGRAM'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
rows = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
rows[0] = 5.0
rows[1:3] += 1.0
seen = [rows.full_tensor().sum(1).tolist()]
rows[:, 0] = 5.0
seen.append(rows.full_tensor().sum(1).tolist())
for is_sharded in (True, False):
    with torch.device("meta"):
        embedding = nn.Embedding(4, 2, padding_idx=0)
    if is_sharded:
        fully_shard(embedding, mesh=mesh)
    embedding.to_empty(device="cpu")
    embedding.reset_parameters()
    weight = embedding.weight.detach()
    whole = weight.full_tensor() if is_sharded else weight
    seen.append(bool((whole[0] == 0).all()))
print(dist.get_rank(), *seen, flush=True)
dist.destroy_process_group()
PROGRAM
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
	"$folder/writes.py" 2>/dev/null | sort >"$folder/seen"
cat "$folder/seen"
for rank in 0 1; do
	echo "$rank [2.0, 2.0, 2.0, 2.0] [6.0, 6.0, 6.0, 6.0] False True"
done | diff - "$folder/seen"
