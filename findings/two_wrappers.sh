#!/bin/sh
# torch 2.15.0: a compiled function that returns two DTensors made of one tensor raises, where autograd records it.
#
# Layers that return their last hidden states both by themselves and in a list of all states do so. The two outputs share one tensor
# in the graph. AOTAutograd keeps it once, but counts it for each of the two wrappers, and an assertion of its own fails. In eager
# mode, without gradients, or with a copy of the tensor in one of them, all is right. The error names neither output. Pytorch issue
# 172549 has the case of an output and the same one detached.
#
# Seen: eager (3, 4) twice; compiled "expected 4 wrapped outputs, got 5"; compiled without gradients, and with a copy, (3, 4) twice.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 numpy==2.4.6
cat >"$folder/wrappers.py" <<'PROGRAM'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
weight = torch.ones(4, 4, requires_grad=True)


def outputs(x, copies):
    y = x @ weight
    return [DTensor.from_local(z, mesh, [Shard(0)]) for z in (y, y.clone() if copies else y)]


compiled = torch.compile(outputs, backend="aot_eager")
for name, call, copies, records in (
    ("eager", outputs, False, True),
    ("compiled", compiled, False, True),
    ("without gradients", compiled, False, False),
    ("with a copy", compiled, True, True),
):
    with torch.set_grad_enabled(records):
        try:
            print(name, *(tuple(out.shape) for out in call(torch.ones(3, 4), copies)))
        except AssertionError as error:
            print(name, error)
dist.destroy_process_group()
PROGRAM
"$folder/venv/bin/python" "$folder/wrappers.py" 2>/dev/null >"$folder/seen"
cat "$folder/seen"
printf '%s\n' 'eager (3, 4) (3, 4)' 'compiled expected 4 wrapped outputs, got 5' 'without gradients (3, 4) (3, 4)' \
	'with a copy (3, 4) (3, 4)' | diff - "$folder/seen"
