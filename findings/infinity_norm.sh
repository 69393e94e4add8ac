#!/bin/sh
# torch 2.15.0: the gradient of the infinity norm of a sharded DTensor is NaN.
#
# The norm of a sharded DTensor is right. Its backward raises nothing, and gives NaN on each rank but the one with the largest
# element, which gets an infinity where 1 is right: each shard divides by how many of its elements have the norm, none or some.
# `x.abs().max()`, the same number, has the gradient of one process. So has the norm of a replicated DTensor.
#
# Seen: for the numbers 0 to 3 on two ranks: the norm is 3.0, its gradient nan nan nan inf for 0 0 0 1.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 numpy==2.4.6
cat >"$folder/norm.py" <<'PROGRAM'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
norms = {
    "vector_norm": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "norm": lambda x: x.norm(float("inf")),
    "abs().max()": lambda x: x.abs().max(),
}
for name, norm in norms.items():
    for placement in (Shard(0), Replicate()):
        x = distribute_tensor(torch.arange(4.0), mesh, [placement]).requires_grad_()
        value = norm(x)
        value.backward()
        value, grad = value.detach().full_tensor(), x.grad.full_tensor()
        if dist.get_rank() == 0:
            print(f"{name} {type(placement).__name__}: {value.item()}", *grad.tolist(), flush=True)
dist.destroy_process_group()
PROGRAM
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
	"$folder/norm.py" 2>/dev/null >"$folder/seen"
cat "$folder/seen"
diff - "$folder/seen" <<'SEEN'
vector_norm Shard: 3.0 nan nan nan inf
vector_norm Replicate: 3.0 0.0 0.0 0.0 1.0
norm Shard: 3.0 nan nan nan inf
norm Replicate: 3.0 0.0 0.0 0.0 1.0
abs().max() Shard: 3.0 0.0 0.0 0.0 1.0
abs().max() Replicate: 3.0 0.0 0.0 0.0 1.0
SEEN
