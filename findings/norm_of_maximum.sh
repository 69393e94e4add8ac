#!/bin/sh
# torch 2.15.0: the infinity norm of a maximum of a sharded DTensor is that of a number which is no maximum.
#
# `x.amax(0)` of a sharded DTensor is `Partial("max")`: each rank has the maximum of its shard. `torch.linalg.vector_norm(_, inf)` takes
# absolute values of these, and then the largest: a rank's maximum that is far below zero wins, though it is no maximum of the whole.
# Nothing is raised. Other norms, and `.abs().amax()` of the same tensor, make it whole first and are right. With `amin` it is right, too.
#
# Seen: for the numbers -10 to -3 in four rows, on two ranks: the maxima -4 and -3, their infinity norm 8.0, by `abs().amax()` 4.0.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 numpy==2.4.6
cat >"$folder/maximum.py" <<'PROGRAM'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
x = distribute_tensor(torch.arange(8.0).view(4, 2) - 10, mesh, [Shard(0)])
largest = x.amax(0)
norm = torch.linalg.vector_norm(largest, float("inf")).full_tensor().item()
right = largest.abs().amax().full_tensor().item()
least = torch.linalg.vector_norm(x.amin(0), float("inf")).full_tensor().item()
print(dist.get_rank(), largest.full_tensor().tolist(), norm, right, least, flush=True)
dist.destroy_process_group()
PROGRAM
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
	"$folder/maximum.py" 2>/dev/null | sort >"$folder/seen"
cat "$folder/seen"
printf '%s [-4.0, -3.0] 8.0 4.0 10.0\n' 0 1 | diff - "$folder/seen"
