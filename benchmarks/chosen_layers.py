"""Measure layers that choose or pool their keys on 4 ranks, next to one process of the stock code.

Run ``python benchmarks/chosen_layers.py``: it starts the processes itself, prints a table, and
writes it with every single time to ``benchmarks/results``. With ``--quick`` it takes few tokens and
writes to ``out`` instead. A model has one layer of a kind, and few heads, so that the stock code,
which makes masks and scores of all pairs, fits into memory. What is chosen is as in the large
models: 2,048 tokens, 512 pools of 4 tokens, all pools of 128, 16 blocks of 128. The longest have a
head of attention and one of an index, and run once, without a first run that plans. Every process
has one thread. Where there are fewer cores than ranks, compare CPU time: that of the slowest rank.
"""

import time
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import transformers
from harness import is_quick, origin, publish, spawn, table_of
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from parallel_plans.huggingface import context_parallel_plan

NUM_RANKS, VOCABULARY, REPEATS = 4, 64, 1
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64}
SIZES |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 1 << 16}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 1, "mlp_layer_types": ["dense"]}
LATENTS = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
LATENTS |= {"num_key_value_heads": 2, "index_n_heads": 4, "index_head_dim": 32}
OF_V4 = {"num_key_value_heads": 1, "head_dim": 64, "q_lora_rank": 64, "o_groups": 1}
OF_V4 |= {"o_lora_rank": 64, "n_routed_experts": 2, "num_experts_per_tok": 1, "hc_mult": 1}
OF_V4 |= {"moe_intermediate_size": 32, "mlp_layer_types": ["moe"], "sliding_window": 128}
OF_V4 |= {"index_n_heads": 4, "index_head_dim": 32, "index_topk": 512}
POOLED = "compressed_sparse_attention", "heavily_compressed_attention"
OF_V4 |= {"compress_rates": dict(zip(POOLED, (4, 128), strict=True))}
OF_M3 = {"num_key_value_heads": 2, "head_dim": 32, "rotary_dim": 16, "num_local_experts": 2}
OF_M3 |= {
    "dense_intermediate_size": 64,
    "shared_intermediate_size": 32,
    "mlp_layer_types": ["dense"],
}
OF_M3 |= {
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_block_size": 128,
    "num_experts_per_tok": 1,
}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-V3.2": ("DeepseekV32", LATENTS | {"qk_rope_head_dim": 16, "index_topk": 2048}),
    "DeepSeek-V4, pools chosen": ("DeepseekV4", OF_V4 | {"layer_types": [POOLED[0]]}),
    "DeepSeek-V4, all pools": ("DeepseekV4", OF_V4 | {"layer_types": [POOLED[1]]}),
    "MiniMax M3": ("MiniMaxM3VLText", OF_M3 | {"layer_types": ["minimax_m3_sparse"]}),
}
"""Class of the config, and its options."""
LONGEST = dict.fromkeys(KINDS, 32768) | {"DeepSeek-V4, pools chosen": 16384}
"""Tokens for which the stock code of one head needs some 20 GiB."""


@dataclass(frozen=True)
class Case:
    """A layer, stock in one process or under its plan on several."""

    kind: str
    seq_len: int
    world_size: int
    num_heads: int = 2


@dataclass(frozen=True)
class Measurement:
    """By repeat: CPU and wall seconds of a step on the slowest rank."""

    case: Case
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    loss: float = 0.0


def cases(quick: bool, world_size: int) -> list[Case]:
    """The stock code needs memory for all pairs."""
    lengths = (1024,) if quick else (4096, 8192)
    usual = [Case(kind, x, world_size) for kind in KINDS for x in lengths]
    longest = [Case(kind, x, world_size, num_heads=1) for kind, x in LONGEST.items()]
    return usual if quick else usual + longest


def model_of(kind: str, num_heads: int) -> nn.Module:
    """The same weights on each rank; attention as transformers chooses it."""
    name, options = KINDS[kind]
    options = SIZES | options
    if num_heads == 1:
        counts = "num_attention_heads", "num_key_value_heads", "index_n_heads"
        options |= {x: 1 for x in counts if x in options}
    config = getattr(transformers, f"{name}Config")(**options)
    torch.manual_seed(0)
    return getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)


def measure(case: Case, mesh: DeviceMesh) -> Measurement:
    model: Any = model_of(case.kind, case.num_heads)
    if case.world_size > 1:
        parallelize_module(model, mesh, context_parallel_plan(model))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, VOCABULARY, (1, case.seq_len), generator=generator)
    cpu, wall, loss = [], [], 0.0
    num_first = int(case.num_heads > 1)  # they plan
    for number in range(num_first + REPEATS):
        dist.barrier()
        began = time.process_time(), time.perf_counter()
        with torch.enable_grad():
            found = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            found.backward()
        took = torch.tensor([time.process_time() - began[0], time.perf_counter() - began[1]])
        dist.all_reduce(took, dist.ReduceOp.MAX)
        if number >= num_first:
            cpu.append(took[0].item())
            wall.append(took[1].item())
        loss = found.item()
    return Measurement(case, cpu, wall, loss)


def table(stock: list[Measurement], ours: list[Measurement]) -> Table:
    """A row for each layer and length."""
    numbers = "tokens", "heads", "stock, CPU s", "4 ranks, CPU s", "CPU ratio", "wall ratio"
    result = table_of(("layer",), numbers)
    for x, y in zip(stock, ours, strict=True):
        times = [f"{median(z.cpu):.2f}" for z in (x, y)]
        ratios = [f"{median(b) / median(a):.3f}" for a, b in ((x.cpu, y.cpu), (x.wall, y.wall))]
        sizes = f"{x.case.seq_len:,}", str(x.case.num_heads)
        result.add_row(x.case.kind, *sizes, *times, *ratios)
    return result


def report(console: Console, stock: list[Measurement], ours: list[Measurement]) -> None:
    """Print what was measured, in Markdown."""
    version = transformers.__version__
    console.print(
        "\nForward and backward of a model of one layer, batch 1, float32, gloo, zigzag, "
        f"one\nthread a process; {NUM_RANKS} ranks next to one process of transformers {version}.\n"
        "Seconds of CPU are those of the slowest rank; ratios are ours by stock.\n"
    )
    console.print(table(stock, ours))


def main() -> None:
    quick = is_quick(__doc__)
    about = origin()
    stock, ours = (
        [
            Measurement(Case(**x.pop("case")), **x)
            for x in spawn(world_size, measure, cases(quick, world_size))
        ]
        for world_size in (1, NUM_RANKS)
    )
    measured: dict[str, Any] = {"measurements": [asdict(m) for m in (*stock, *ours)]}
    show = partial(report, stock=stock, ours=ours)
    publish("chosen_layers", "Layers that choose or pool their keys", quick, about, measured, show)


if __name__ == "__main__":
    main()
