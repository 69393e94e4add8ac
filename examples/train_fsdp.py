"""Train a Hugging Face model by FSDP2 over data-parallel and context-parallel ranks.

torchrun --nproc-per-node 4 examples/train_fsdp.py --cp 2, once more with --resume to go on.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parts.text import StandardLibrary
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

from parallel_plans.huggingface import context_parallel_plan, ring_checkpoint_contexts

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}


def main() -> None:
    options = parse_options()
    dist.init_process_group()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = dist.get_world_size() // options.cp, options.cp
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)  # the same weights on every rank, until they are sharded
    config = LlamaConfig(vocab_size=256, num_attention_heads=4, **SIZES)
    model = sharded(LlamaForCausalLM(config).to(device), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    data = StandardLibrary(options.seq_len)
    # Ranks of dp get different rows, those of cp the same.
    places = {"num_replicas": mesh["dp"].size(), "rank": mesh["dp"].get_local_rank()}
    loader = DataLoader(data, options.batch, sampler=DistributedSampler(data, **places, seed=0))
    first = load(model, optimizer, options.folder) if options.resume else 0
    for step, rows in enumerate(loader):
        if not first <= step < options.steps:
            continue
        tokens = rows.to(device)
        loss = model(input_ids=tokens, labels=tokens).loss  # that of all ranks of the axis
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss, group=mesh["dp"].get_group())
        mean, norm = loss.item() / mesh["dp"].size(), norm.full_tensor().item()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean:.6f}, gradient norm {norm:.4f}")
    save(model, optimizer, options.steps, options.folder)
    time.sleep(0.2)  # Python aborts if it ends while gloo's threads let go of tensors
    dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cp", type=int, default=2, help="ranks that share a sequence")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=2, help="sequences for each rank of dp")
    parser.add_argument("--steps", type=int, default=10, help="steps in all")
    parser.add_argument("--folder", type=Path, default=Path("out/fsdp"), help="for checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    return parser.parse_args()


def sharded(model: LlamaForCausalLM, mesh: DeviceMesh) -> LlamaForCausalLM:
    """The plan, then checkpointing that keeps the ring's outputs, then FSDP2 over all ranks."""
    parallelize_module(model, mesh["cp"], context_parallel_plan(model, "zigzag"))
    how = {"use_reentrant": False, "context_fn": ring_checkpoint_contexts}
    model.activation_checkpointing_enable(how)
    everyone = mesh["dp", "cp"]._flatten("dp_cp")
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=everyone)
    if mesh.device_type == "cpu":  # gloo has no means, so FSDP2 sums and divides
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return model


def save(model, optimizer, step: int, folder: Path) -> None:
    """All ranks write their parts; any other number of ranks can read them."""
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save({**states, "step": step}, checkpoint_id=folder)


def load(model, optimizer, folder: Path) -> int:
    """Read what `save` wrote; the step to go on from."""
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    everything = {**states, "step": 0}
    dcp.load(everything, checkpoint_id=folder)
    parts = {"model_state_dict": states["model"], "optim_state_dict": states["optimizer"]}
    set_state_dict(model, optimizer, **parts)
    return everything["step"]


if __name__ == "__main__":
    main()
