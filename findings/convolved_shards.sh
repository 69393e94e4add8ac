#!/bin/sh
# torch 2.15.0: `F.conv1d` of a DTensor that is sharded along its length says it is replicated, and is another number on each rank.
#
# Each rank convolves its own columns. The result has the right shape as a DTensor, and `Replicate`; but its local tensor is short, as
# columns that need two ranks are missing (with padding, those at the seam take zeros), and ranks have different ones.
# `full_tensor()` returns this local tensor, another shape than the DTensor's. Nothing is raised. Along the batch it is right.
#
# Seen: for the numbers 0 to 7 and a kernel of two ones, on two ranks: a DTensor of 7 columns, `full_tensor()` of 3: 1 3 5 on the
# first rank and 9 11 13 on the second, for 1 3 5 7 9 11 13.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 numpy==2.4.6
cat >"$folder/conv.py" <<'PROGRAM'
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
x, weight = torch.arange(8.0).view(1, 1, 8).repeat(2, 1, 1), torch.ones(1, 1, 2)
for dim in (0, 2):
    sharded = distribute_tensor(x, mesh, [Shard(dim)])
    out = F.conv1d(sharded, distribute_tensor(weight, mesh, [Replicate()]))
    whole, placement = out.full_tensor(), type(out.placements[0]).__name__
    print(f"rank {dist.get_rank()}, dim {dim}: {placement} {tuple(out.shape)}:", *whole[0, 0].tolist(), flush=True)
dist.destroy_process_group()
PROGRAM
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
	"$folder/conv.py" 2>/dev/null | sort >"$folder/seen"
cat "$folder/seen"
diff - "$folder/seen" <<'SEEN'
rank 0, dim 0: Shard (2, 1, 7): 1.0 3.0 5.0 7.0 9.0 11.0 13.0
rank 0, dim 2: Replicate (2, 1, 7): 1.0 3.0 5.0
rank 1, dim 0: Shard (2, 1, 7): 1.0 3.0 5.0 7.0 9.0 11.0 13.0
rank 1, dim 2: Replicate (2, 1, 7): 9.0 11.0 13.0
SEEN
