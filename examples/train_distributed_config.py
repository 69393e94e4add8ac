"""Train a model of transformers whose sequence, batch and weights are sharded by one call.

torchrun --nproc-per-node 4 examples/train_distributed_config.py, or with --cp-size 1 on 2 ranks.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from parts.text import StandardLibrary
from torch.utils.data import DataLoader, DistributedSampler, Subset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from parallel_plans.huggingface import context_parallel_model


def train(options: argparse.Namespace, rows: Subset) -> None:
    config = DistributedConfig(fsdp_size=options.fsdp_size)
    degrees = {"cp_size": options.cp_size, "distributed_config": config}
    model = context_parallel_model(AutoModelForCausalLM, options.model, **degrees)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
    sampler = DistributedSampler(rows, shuffle=False, **model.context_parallel_replica)
    for step, tokens in enumerate(DataLoader(rows, 4 // options.fsdp_size, sampler=sampler)):
        loss = model(input_ids=tokens.to(model.device), labels=tokens.to(model.device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report(step, loss)
    model.save_pretrained(options.out)


def report(step: int, loss: torch.Tensor) -> None:
    """Print the mean over all ranks: those that share rows have the same loss."""
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item() / dist.get_world_size():.6f}")


def make_model(folder: Path) -> None:
    """Write a small model with random weights, unless the folder has a model."""
    if dist.get_rank() == 0 and not folder.exists():
        torch.manual_seed(0)
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
        config = LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes)
        LlamaForCausalLM(config).save_pretrained(folder)
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cp-size", type=int, default=2, help="ranks that share a sequence")
    parser.add_argument("--fsdp-size", type=int, default=2, help="ranks that differ in their rows")
    parser.add_argument("--seq-len", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=10, help="steps of 4 sequences")
    parser.add_argument("--model", type=Path, default=Path("out/small"), help="what is trained")
    parser.add_argument("--out", type=Path, default=Path("out/trained"), help="what is saved")
    options = parser.parse_args()
    dist.init_process_group()
    make_model(options.model)
    train(options, Subset(StandardLibrary(options.seq_len), range(4 * options.steps)))
    time.sleep(0.2)  # Python aborts if it ends while gloo's threads let go of tensors
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
