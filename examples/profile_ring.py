"""Traces of a ring to look at in Perfetto: torchrun --nproc-per-node 2 examples/profile_ring.py

Each rank writes one, of two steps of causal attention forward and backward. Open them at
https://ui.perfetto.dev: the spans that begin with "ring" say what a step of the ring does.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import ProfilerActivity, profile

from dtensor_ring import ring_attention, shard_sequence


def write_trace(mesh: DeviceMesh, seq_len: int, folder: Path) -> Path:
    """Profile two steps, after one that warms up; the trace of this rank."""
    device = mesh.device_type
    torch.manual_seed(0)
    whole = [torch.randn(1, 8, seq_len, 64, device=device) for _ in range(3)]
    inputs = [shard_sequence(x, mesh, 2, "zigzag").requires_grad_() for x in whole]
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device == "cuda" else []
    ring_attention(*inputs).to_local().sum().backward()
    with profile(activities=activities) as profiler:
        for _ in range(2):
            ring_attention(*inputs).to_local().sum().backward()
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / f"ring-rank{dist.get_rank()}.json"
    profiler.export_chrome_trace(str(trace))
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens of the whole sequence")
    parser.add_argument("--folder", type=Path, default=Path("out/traces"))
    arguments = parser.parse_args()
    if dist.is_torchelastic_launched():
        dist.init_process_group()
    else:  # one process, without torchrun
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    print(f"wrote {write_trace(mesh, arguments.seq_len, arguments.folder)}")
    time.sleep(0.2)  # Python aborts if it ends while gloo's threads let go of tensors
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
