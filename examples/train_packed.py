"""Train on documents of every length: short ones stay whole on a rank, long ones span several.

torchrun --nproc-per-node 4 examples/train_packed.py --cp 2

All ranks of the mesh (dp, cp) are one axis, and share each packed batch. A layout is made for the
documents of each batch.
"""

import argparse
import time

import torch
import torch.distributed as dist
from parts.text import read_documents
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from dtensor_ring import Mask, describe_schedule
from parallel_plans.huggingface import context_parallel_plan

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


class PackedLibrary(Dataset[dict[str, Tensor]]):
    """The functions and classes of Python's standard library, some 2,600 from 14 bytes on.

    Documents longer than `longest` are cut. A batch is one row of documents, one after the other;
    where the row ends, a document is cut, too.
    """

    def __init__(self, num_tokens: int, longest: int) -> None:
        documents = [part for document in read_documents() for part in document.split(longest)]
        order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(0))
        documents = [documents[index] for index in order.tolist()]
        self.text, self.num_tokens = torch.cat(documents), num_tokens
        self.ends = torch.tensor([len(document) for document in documents]).cumsum(0)

    def __len__(self) -> int:
        return len(self.text) // self.num_tokens

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        first, last = index * self.num_tokens, (index + 1) * self.num_tokens
        inside = self.ends[(self.ends > first) & (self.ends < last)] - first
        ends = torch.cat([torch.tensor([0]), inside, torch.tensor([self.num_tokens])])
        begins = ends[:-1].repeat_interleave(ends.diff())
        tokens = self.text[first:last].long()
        labels = tokens.clone()
        labels[ends[:-1]] = -100  # nothing before the first token of a document predicts it
        # Positions begin again with each document: that is how the model knows them.
        positions = torch.arange(self.num_tokens) - begins
        return {"input_ids": tokens, "labels": labels, "position_ids": positions, "ends": ends}


def main() -> None:
    options = parse_options()
    dist.init_process_group()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = dist.get_world_size() // options.cp, options.cp
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)  # the same weights on every rank, until they are sharded
    config = LlamaConfig(
        vocab_size=256,
        num_attention_heads=4,
        max_position_embeddings=options.tokens,
        **SIZES,
    )
    model = sharded(LlamaForCausalLM(config).to(device), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # All ranks read the same batch: they are one axis, and each takes its tokens.
    batches = DataLoader(PackedLibrary(options.tokens, options.longest), batch_size=1)
    for step, batch in zip(range(options.steps), batches, strict=False):
        ends = batch.pop("ends")[0]
        # The mean over all labels of the batch, whichever rank has them.
        loss = model(**{name: x.to(device) for name, x in batch.items()}).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        norm = norm.full_tensor().item()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.6f}, gradient norm {norm:.5f}; {spread(ends)}")
    time.sleep(0.2)  # Python aborts if it ends while gloo's threads let go of tensors
    dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cp", type=int, default=2, help="ranks of cp; the others are those of dp")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of a batch, of all ranks")
    parser.add_argument("--longest", type=int, default=4096, help="tokens of a document, at most")
    parser.add_argument("--steps", type=int, default=10, help="steps in all")
    return parser.parse_args()


def sharded(model: LlamaForCausalLM, mesh: DeviceMesh) -> LlamaForCausalLM:
    """One axis of all ranks, for the plan and for FSDP2."""
    everyone = mesh["dp", "cp"]._flatten("dp_cp")
    parallelize_module(model, everyone, context_parallel_plan(model, "balanced"))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=everyone)
    if mesh.device_type == "cpu":  # gloo has no means, so FSDP2 sums and divides
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return model


def spread(ends: Tensor) -> str:
    """How the documents of a batch lie on the ranks."""
    num_tokens, num_ranks = int(ends[-1]), dist.get_world_size()
    found = describe_schedule("balanced", Mask.causal(), num_tokens, num_ranks, ends)
    ranks_of = torch.zeros(len(ends) - 1, dtype=torch.int64)
    for rank in range(num_ranks):
        held = torch.tensor(found.layout.positions(rank, num_ranks, num_tokens))
        ranks_of[torch.bucketize(held, ends, right=True).unique() - 1] += 1
    return (
        f"{len(ranks_of)} documents, {int((ranks_of == 1).sum())} of them whole on a rank, the "
        f"longest on {int(ranks_of.max())}; busiest rank over mean {found.imbalance:.2f}"
    )


if __name__ == "__main__":
    main()
