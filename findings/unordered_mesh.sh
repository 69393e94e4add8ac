#!/bin/sh
# torch 2.15.0: a mesh with its ranks out of order gives back another tensor than the one that was sharded.
#
# `DeviceMesh("cpu", [1, 2, 0])` says that rank 1 comes first, and `get_coordinate()` agrees. Its process group has the ranks in ascending
# order, and so has `get_local_rank()`. `redistribute` cuts a replicated tensor by the coordinate, and `full_tensor()` joins the shards
# by the group: they come back in another order, and where shards are not equally long, zeros of padding stand for numbers that are
# lost. Nothing is raised. `distribute_tensor` of a plain tensor sends shards by the group, and gives back what it got.
#
# Seen: 0 1 2 3 4 5 on three ranks come back as 4 5 0 1 2 3 on each, and by `distribute_tensor` as they were. The place of rank 1 on
# the mesh is 0, and its local rank is 1.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 numpy==2.4.6
cat >"$folder/unordered.py" <<'PROGRAM'
import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = DeviceMesh("cpu", [1, 2, 0])
numbers = torch.arange(6.0)
cut = distribute_tensor(numbers, mesh, [Replicate()]).redistribute(mesh, [Shard(0)])
sent = distribute_tensor(numbers, mesh, [Shard(0)])
place = mesh.get_coordinate()[0], mesh.get_local_rank()
print(dist.get_rank(), *place, *cut.full_tensor().tolist(), *sent.full_tensor().tolist(), flush=True)
dist.destroy_process_group()
PROGRAM
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 3 \
	"$folder/unordered.py" 2>/dev/null | sort >"$folder/seen"
cat "$folder/seen"
for rank in '0 2 0' '1 0 1' '2 1 2'; do
	echo "$rank 4.0 5.0 0.0 1.0 2.0 3.0 0.0 1.0 2.0 3.0 4.0 5.0"
done | diff - "$folder/seen"
