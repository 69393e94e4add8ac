"""What a rank receives and holds of keys and values: rings against gathering them.

    python -m benchmarks.gathered --write

Runs a forward pass of torchtitan's Llama 3 debug model, once with its own FlexAttention, which
gathers, and once with rings, and counts the bytes of one layer on the rank that has most. What is
held does not count the rank's own keys and values. `--write` puts the table into
docs/torchtitan.md.
"""

import argparse
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from docs.marked import write_part
from dtensor_ring.transport import transport
from dtensor_ring.transport.transport import P2P, ProcessGroupTransport
from examples.torchtitan_assets import write_assets
from examples.torchtitan_cpu import sum_over_gloo, use_cpu
from tests.pool import Pool

SEQ_LEN = 8192
PAGE = Path("docs/torchtitan.md")
MARKERS = "<!-- table: written by benchmarks/gathered.py -->\n", "<!-- end of table -->\n"
TEXTS = {"one": SEQ_LEN, "16": SEQ_LEN // 16}
"""Tokens of a document, by how many fill a sequence."""


@dataclass
class Case:
    """A model on `world_size` ranks; `layout` is the ring's, `None` where keys are gathered."""

    world_size: int
    documents: str
    layout: str | None
    assets: str


@dataclass
class Bytes:
    """Bytes of the keys and values of one layer."""

    received: int = 0
    held: int = 0


def measure(case: Case) -> Bytes:
    """A forward pass; of the rank that has most."""
    with _quiet_torchtitan():
        trainer = sum_over_gloo(_config(case)).build()
        counted = Bytes()
        batch, labels = next(trainer.batch_generator(trainer.dataloader))
        inputs, labels, extra = trainer.post_dataloading_process(batch, labels)
        with trainer.train_context(), torch.no_grad(), _counting(trainer.model_parts[0], counted):
            trainer.model_parts[0](inputs, **extra)
        trainer.close()
    most = torch.tensor([counted.received, counted.held])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return Bytes(*most.tolist())


def _config(case: Case) -> Any:
    from torchtitan.config import ConfigManager

    ring = f'parallel_plans.torchtitan.ring_attention={{"layout":"{case.layout}"}}'
    flags = ["--module", "llama3", "--config", "llama3_debugmodel"]
    if case.layout:
        flags = ["--module", "parallel_plans.torchtitan", "--config", "llama3_debugmodel_ring"]
        flags += ["--override.imports", ring]
    flags += [
        f"--hf_assets_path={case.assets}/{case.documents}",
        "--dataloader.dataset=c4_test",
        f"--dataloader.dataset_path={case.assets}/{case.documents}/data",
        "--training.local_batch_size=1",
        f"--training.seq_len={SEQ_LEN}",
        "--training.mixed_precision_param=float32",
        "--training.disable_cuda_graphs",
        f"--parallelism.context_parallel_degree={case.world_size}",
        f"--dump_folder={case.assets}/outputs",
    ]
    config = ConfigManager().parse_args(flags)
    del config.model_spec.model.layers[1:]
    return config


@contextmanager
def _counting(model: torch.nn.Module, counted: Bytes) -> Iterator[None]:
    """Count in the inner attention of the layer, and nowhere else."""
    (attention,) = (x for name, x in model.named_modules() if name.endswith("inner_attention"))
    forward, take = attention.forward, transport.BUFFERS.take
    gather, start = dist.all_gather_into_tensor, ProcessGroupTransport.start

    def gathering(output: torch.Tensor, shard: torch.Tensor, **options: Any) -> Any:
        counted.received += output.nbytes - shard.nbytes
        counted.held += output.nbytes
        return gather(output, shard, **options)

    def starting(self: ProcessGroupTransport, receives: list[P2P], sends: list[P2P]) -> Any:
        counted.received += sum(x.flat.nbytes for x in receives)
        return start(self, receives, sends)

    def taking(num_bytes: int, device: torch.device) -> torch.Tensor:
        counted.held += num_bytes
        return take(num_bytes, device)

    def attend(*args: Any, **kwargs: Any) -> Any:
        with (
            patch.object(dist, "all_gather_into_tensor", gathering),
            patch.object(ProcessGroupTransport, "start", starting),
            patch.object(transport.BUFFERS, "take", taking),
        ):
            return forward(*args, **kwargs)

    with patch.object(attention, "forward", attend):
        yield


@contextmanager
def _quiet_torchtitan() -> Iterator[None]:
    places = {"LOCAL_RANK": "0", "RANK": str(dist.get_rank()), "HF_HUB_OFFLINE": "1"}
    places["WORLD_SIZE"] = str(dist.get_world_size())
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, places))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        use_cpu()
        yield


def rows(world_sizes: list[int]) -> Iterator[str]:
    """The table, in MiB of a layer."""
    yield "| ranks | documents | keys and values | received, MiB | held, MiB |"
    yield "| ---: | ---: | --- | ---: | ---: |"
    pool = Pool(max(world_sizes))
    with tempfile.TemporaryDirectory() as folder:
        for name, length in TEXTS.items():
            write_assets(Path(folder, name), ["a" * length] * (4 * SEQ_LEN // length))
        for case in (
            Case(world_size, name, layout, folder)
            for world_size in world_sizes
            for name in TEXTS
            for layout in (None, "contiguous", "zigzag")
        ):
            found = pool.run(case.world_size, measure, case, timeout=600)[0]
            how = f"ring, {case.layout}" if case.layout else "gathered"
            cells = f"{found.received / 2**20:.2f} | {found.held / 2**20:.2f}"
            yield f"| {case.world_size} | {case.documents} | {how} | {cells} |"
    pool.close()


def main() -> None:
    """Print the table, or replace that of the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--write", action="store_true", help="replace the table in the page")
    options = parser.parse_args()
    lines = list(rows(options.world))
    print(*lines, sep="\n")
    if options.write:
        write_part(PAGE, *MARKERS, lines)


if __name__ == "__main__":
    main()
