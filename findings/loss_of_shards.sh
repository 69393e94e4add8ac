#!/bin/sh
# torch 2.15.0: the gradient of `F.mse_loss` of a sharded DTensor is as many times too large as there are shards.
#
# `mse_loss`, `smooth_l1_loss` and `huber_loss` with their default, the mean, divide the gradient by the number of elements of a
# rank's shard. The value is right, if shards are equally long, so nothing shows it. Where they are not, the value is the mean of the
# ranks' means: another number. `l1_loss`, and the same mean written as `(x - y).square().mean()`, are right in both.
#
# Seen: for the numbers 0 to 3 on two ranks against 0, a loss of 3.5, and the gradient of 3 is 3.0 for 1.5. For 0 to 4, a loss of
# 7.083333 for 6.0, and the gradient of 4 is 4.0 for 1.6.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 numpy==2.4.6
cat >"$folder/loss.py" <<'PROGRAM'
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
losses = {
    "mse_loss": F.mse_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "l1_loss": F.l1_loss,
    "by hand": lambda x, y: (x - y).square().mean(),
}
for length in (4, 5):
    for name, loss in losses.items():
        found = []
        for is_sharded in (True, False):
            x = torch.arange(float(length))
            if is_sharded:
                x = distribute_tensor(x, mesh, [Shard(0)])
            x.requires_grad_()
            value = loss(x, torch.zeros_like(x))
            value.backward()
            value, grad = value.detach(), x.grad
            if is_sharded:
                value, grad = value.full_tensor(), grad.full_tensor()
            found.append(f"{value.item():.6f} {grad[-1].item():.6f}")
        if dist.get_rank() == 0:
            print(f"{length} {name}: {found[0]} for {found[1]}", flush=True)
dist.destroy_process_group()
PROGRAM
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
	"$folder/loss.py" 2>/dev/null >"$folder/seen"
cat "$folder/seen"
diff - "$folder/seen" <<'SEEN'
4 mse_loss: 3.500000 3.000000 for 3.500000 1.500000
4 smooth_l1_loss: 1.125000 0.500000 for 1.125000 0.250000
4 huber_loss: 1.125000 0.500000 for 1.125000 0.250000
4 l1_loss: 1.500000 0.250000 for 1.500000 0.250000
4 by hand: 3.500000 1.500000 for 3.500000 1.500000
5 mse_loss: 7.083333 4.000000 for 6.000000 1.600000
5 smooth_l1_loss: 1.833333 0.500000 for 1.600000 0.200000
5 huber_loss: 1.833333 0.500000 for 1.600000 0.200000
5 l1_loss: 2.000000 0.200000 for 2.000000 0.200000
5 by hand: 6.000000 1.600000 for 6.000000 1.600000
SEEN
