#!/bin/sh
# torch 2.15.0: the value of a sum, a norm or a maximum of a sharded DTensor is that of one rank.
#
# `x.sum()` of a sharded DTensor is a DTensor that is `Partial`: each rank has the sum of its shard. `.item()` and `float()`
# return this part and raise nothing, so ranks that decide by it (a loss that is logged, a norm that is clipped) differ. `mean()` is
# right, as its parts of unequal shards are summed at once. `full_tensor()` before `item()` is right for all of them.
#
# Seen: 0 1 2 3 4 on two ranks: sum 3.0 and 7.0 for 10.0, maximum 2.0 and 4.0 for 4.0, mean 2.0 and 2.0.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 numpy==2.4.6
cat >"$folder/item.py" <<'PROGRAM'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
x = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
values = [x.sum().item(), float(x.sum()), x.max().item(), x.mean().item(), x.sum().full_tensor().item()]
print(dist.get_rank(), *values, flush=True)
dist.destroy_process_group()
PROGRAM
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
	"$folder/item.py" 2>/dev/null | sort >"$folder/seen"
cat "$folder/seen"
printf '0 3.0 3.0 2.0 2.0 10.0\n1 7.0 7.0 4.0 2.0 10.0\n' | diff - "$folder/seen"
