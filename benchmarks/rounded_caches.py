"""Measure what a cache of eight bits costs a model, for docs/numerics.md.

The small Llama of the examples is trained, reads texts that it has not seen byte by byte, with
caches in each format, and says the next byte. Run ``python -m benchmarks.rounded_caches``;
``--write`` puts the table into the page. It takes some minutes on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from docs.marked import table_row, write_part
from dtensor_ring.quantised.block_scales import FORMATS
from examples.parts.small_models import small_model
from examples.parts.text import read_standard_library
from parallel_plans.huggingface import ContextParallelCache, context_parallel_plan

PAGE = Path(__file__).parent.parent / "docs" / "numerics.md"
MARKERS = (
    "<!-- rounded caches: written by benchmarks/rounded_caches.py -->\n",
    "<!-- end of rounded caches -->\n",
)
TRAINING_STEPS, BATCH, TRAINED_LENGTH = 300, 8, 512
PROMPT, READ = 256, 256


def trained(text: Tensor) -> Any:
    """Return the small Llama after some steps, always the same."""
    model = small_model("llama", PROMPT + READ)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(TRAINING_STEPS):
        tokens = _rows(text, TRAINED_LENGTH, step)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def _rows(text: Tensor, length: int, seed: int) -> Tensor:
    """Draw sequences of a text, `(BATCH, length)`."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - length, (BATCH,), generator=generator)
    return torch.stack([text[start : start + length] for start in starts]).long()


class Reading(NamedTuple):
    """What a model says of the next bytes.

    Attributes:
        logits: of each byte after the prompt, `(BATCH, READ, 256)`.
        num_bytes: what its cache keeps in the end.
    """

    logits: Tensor
    num_bytes: int


@torch.no_grad()
def read(model: Any, mesh: DeviceMesh, tokens: Tensor, kv_dtype: str | None) -> Reading:
    """Read a prompt at once, and then the given bytes one by one."""
    plan = context_parallel_plan(model, cache_dtype=kv_dtype)
    ours: Any = parallelize_module(model, mesh, plan)
    cache = ContextParallelCache(ours)
    found = [ours(tokens[:, :PROMPT], logits_to_keep=1, cache=cache).logits]
    for position in range(PROMPT, PROMPT + READ - 1):
        found.append(ours(tokens[:, position : position + 1], cache=cache).logits)
    return Reading(torch.cat(found, 1), cache.usage().used[0])


def table() -> Iterator[str]:
    """The lines of the table, in Markdown."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    text = read_standard_library()
    seen, unseen = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    model, tokens = trained(seen), _rows(unseen, PROMPT + READ, 0)
    following = tokens[:, PROMPT:]
    yield table_row("cache", "bytes", "same greedy byte", "perplexity", "change")
    yield table_row("---", *["---:"] * 4)
    exact = read(deepcopy(model), mesh, tokens, None)

    def perplexity(logits: Tensor) -> float:
        return F.cross_entropy(logits.flatten(0, 1).double(), following.flatten()).exp().item()

    before = perplexity(exact.logits)
    yield table_row("float32", f"{exact.num_bytes:,}", "", f"{before:.4f}", "")
    for kv_dtype in FORMATS:
        found = read(deepcopy(model), mesh, tokens, kv_dtype)
        same = (found.logits.argmax(-1) == exact.logits.argmax(-1)).double().mean().item()
        now = perplexity(found.logits)
        change = f"{100 * (now / before - 1):+.3f} %"
        yield table_row(
            kv_dtype, f"{found.num_bytes:,}", f"{100 * same:.2f} %", f"{now:.4f}", change
        )


def main() -> None:
    """Print the table, or replace that of the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="replace the table in the page")
    if parser.parse_args().write:
        write_part(PAGE, *MARKERS, table())
    else:
        print(*table(), sep="\n")


if __name__ == "__main__":
    main()
