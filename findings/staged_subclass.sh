#!/bin/sh
# torch 2.15.0: `async_save` of an instance of a subclass of DTensor without fields of its own saves memory that nobody wrote.
#
# `torch.distributed.checkpoint.async_save` copies a state before it returns. Of a DTensor it copies what `x.__slots__` names. In a
# subclass with `__slots__ = ()`, as Python recommends where no field is added, these are none: fields of the base class are not
# looked for. So the copy is `x.new_empty(...)`, and that is saved. Nothing is raised. `save`, and a subclass without
# `__slots__`, are right.
#
# Seen: whether the numbers 1 to 8 on two ranks are read again: DTensor True and True by `save` and `async_save`, a subclass without
# `__slots__` True and True, one with `__slots__ = ()` True and False.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 numpy==2.4.6
cat >"$folder/staged.py" <<'PROGRAM'
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


class Open(DTensor):
    pass


class Slotted(DTensor):
    __slots__ = ()


dist.init_process_group("gloo")
mesh, numbers = init_device_mesh("cpu", (2,)), torch.arange(1.0, 9)
for kind in (DTensor, Open, Slotted):
    x = distribute_tensor(numbers, mesh, [Shard(0)])
    x.__class__ = kind
    found = []
    for is_async in (False, True):
        where = f"{sys.argv[1]}/{kind.__name__}{is_async}"
        if is_async:
            dcp.async_save({"x": x}, checkpoint_id=where).result()
        else:
            dcp.save({"x": x}, checkpoint_id=where)
        read = torch.zeros(8)
        dcp.load({"x": read}, checkpoint_id=where)
        found.append(torch.equal(read, numbers))
    if dist.get_rank() == 0:
        print(kind.__name__, *found, flush=True)
dist.barrier()
PROGRAM
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
	"$folder/staged.py" "$folder/saved" 2>/dev/null >"$folder/seen"
cat "$folder/seen"
diff - "$folder/seen" <<'SEEN'
DTensor True True
Open True True
Slotted True False
SEEN
