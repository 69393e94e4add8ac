"""Ring attention in thirty lines: torchrun --nproc-per-node 2 examples/quickstart.py"""

import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import Mask, ring_attention, shard_sequence, unshard_sequence


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()  # none but --help
    if dist.is_torchelastic_launched():
        dist.init_process_group()
    else:  # one process, without torchrun
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))

    # Query, key and value of 1024 tokens, the same on every rank: (batch, heads, tokens, head dim).
    torch.manual_seed(0)
    whole = [torch.randn(2, 4, 1024, 32, device=device) for _ in range(3)]

    # Each rank keeps its tokens, sharded in an order that gives all ranks the same causal work.
    query, key, value = (shard_sequence(x, mesh, dim=2, layout="zigzag") for x in whole)

    # Unmodified PyTorch attention is now a ring, ...
    causal = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    expected = F.scaled_dot_product_attention(*whole, is_causal=True)
    torch.testing.assert_close(unshard_sequence(causal, dim=2), expected, atol=1e-4, rtol=1e-4)

    # ... and ring_attention takes more masks: here, a query sees the 100 tokens before it.
    sliding = ring_attention(query, key, value, mask=Mask.sliding(100))
    seen = torch.ones(1024, 1024, dtype=torch.bool, device=device).tril().triu(-100)
    expected = F.scaled_dot_product_attention(*whole, attn_mask=seen)
    torch.testing.assert_close(unshard_sequence(sliding, dim=2), expected, atol=1e-4, rtol=1e-4)

    if dist.get_rank() == 0:
        local = tuple(query.to_local().shape)
        print(f"world size {mesh.size()}, {local} each: causal and sliding match one device")
    time.sleep(0.2)  # Python aborts if it ends while gloo's threads let go of tensors
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
