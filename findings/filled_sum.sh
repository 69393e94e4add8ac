#!/bin/sh
# torch 2.15.0: a number that is written into a sum of a sharded DTensor comes back as many times larger as there are ranks.
#
# `y = x.sum(0)` of a sharded DTensor is `Partial`: each rank has the sum of its shard. `y[0] = 5.0` and `y.fill_(5.0)` write 5 on each rank,
# and the sum of the ranks is then no 5. Nothing is raised. `y.zero_()` is right, and so is `torch.full_like(y, 5.0)`. `add_`, `clamp_` and
# `masked_fill_`, which have the same trouble, refuse a `Partial` tensor, and `mul_` makes it whole first.
#
# Seen: for the numbers 0 to 7 in four rows, on two ranks: the sums 12 and 16; after `y[0] = 5.0` 10 and 16, after `fill_(5.0)` 10 and
# 10, and 6 and 6 after `torch.nn.init.constant_(y, 3.0)`; `full_like` has 5 and 5.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 numpy==2.4.6
cat >"$folder/filled.py" <<'PROGRAM'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
x = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
written = x.sum(0)
written[0] = 5.0
results = [x.sum(0), written, x.sum(0).fill_(5.0), torch.nn.init.constant_(x.sum(0), 3.0)]
results.append(torch.full_like(x.sum(0), 5.0))
print(dist.get_rank(), *(y.full_tensor().tolist() for y in results), flush=True)
dist.destroy_process_group()
PROGRAM
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
	"$folder/filled.py" 2>/dev/null | sort >"$folder/seen"
cat "$folder/seen"
for rank in 0 1; do
	echo "$rank [12.0, 16.0] [10.0, 16.0] [10.0, 10.0] [6.0, 6.0] [5.0, 5.0]"
done | diff - "$folder/seen"
