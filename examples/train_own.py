"""Train a GPT of your own over a ring: torchrun --nproc-per-node 2 examples/train_own.py"""

import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parts.text import StandardLibrary
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dtensor_ring import ContextParallel, SequenceAxis, next_token_labels

SEQ_LEN, WIDTH, HEADS, LAYERS, WORDS = 512, 64, 4, 2, 256


class Attention(nn.Module):
    """The one part that sees other tokens, as a module: the plan finds it by its arguments."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Block(nn.Module):
    """Attention and a feed-forward part; L tokens in, L tokens out."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = Attention()
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inputs(self.norms[0](x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        attended = self.attention(*parts.chunk(3, 1)).transpose(1, 2).flatten(2)
        x = x + self.output(attended)
        return x + self.feed(self.norms[1](x))


class GPT(nn.Module):
    """A decoder that takes the positions of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(SEQ_LEN, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        for embedding in (self.words, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.words.weight.T


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()  # none but --help
    dist.init_process_group()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    torch.manual_seed(0)  # the same weights on every rank
    model = GPT().to(device)

    # 1. Attention runs over the ring, and an axis says how tokens are sharded over its ranks.
    plan = {f"blocks.{i}.attention": ContextParallel("zigzag") for i in range(LAYERS)}
    parallelize_module(model, mesh["cp"], plan)
    axis = SequenceAxis(mesh["cp"], "zigzag")
    positions = axis.positions(SEQ_LEN).to(device)
    replicas = DistributedDataParallel(model)  # averages gradients over the ranks

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(StandardLibrary(SEQ_LEN), batch_size=2, shuffle=True)  # alike on all ranks
    for step, whole in zip(range(10), loader, strict=False):
        # 2. Labels are shifted while the sequence is whole, then both are sharded.
        tokens, labels = (
            axis.shard(x.to(device), 1).to_local() for x in (whole, next_token_labels(whole))
        )
        logits = replicas(tokens, positions)
        # 3. All ranks have one loss: the sum over all tokens by the number of all labels.
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = axis.sum(total) / (whole.numel() - len(whole))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.6f}")
    time.sleep(0.2)  # Python aborts if it ends while gloo's threads let go of tensors
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
