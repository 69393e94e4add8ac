"""Measure what eight bits of keys and values cost in accuracy, for docs/numerics.md.

The experiment of flash attention 3's paper (Shah et al., 2024, arXiv 2407.08608): numbers from
N(0, 1) + N(0, 100) * Bernoulli(0.001), head dim 128. Errors are the root of the mean squared
error against float64. Run ``python -m benchmarks.eight_bits``; ``--write`` puts the table into the
page. It takes a minute or two on two cores.

With ``--generate``, the small Llama of the examples is trained, reads texts that it has not seen
byte by byte, with caches in each format, and says the next byte. It takes some minutes on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from docs.marked import table_row, write_part
from dtensor_ring.quantised.block_scales import (
    FORMATS,
    Format,
    dequantise,
    quantise_keys,
    quantise_values,
)
from examples.small_models import small_model
from examples.text import read_standard_library
from parallel_plans.huggingface import ContextParallelCache, context_parallel_plan

PAGE = Path(__file__).parent.parent / "docs" / "numerics.md"
MARKERS = (
    "<!-- eight bits: written by benchmarks/eight_bits.py -->\n",
    "<!-- end of eight bits -->\n",
)
SHAPE = 1, 4, 2048, 128
CHANCES = {"outliers": 0.001, "normal": 0.0}
BLOCK_SIZES = 32, 64, 128
GENERATED = (
    "<!-- eight bits generate: written by benchmarks/eight_bits.py -->\n",
    "<!-- end of eight bits generate -->\n",
)
TRAINING_STEPS, BATCH, TRAINED_LENGTH = 300, 8, 512
PROMPT, READ = 256, 256

Pair = tuple[Tensor, Tensor]


def drawn(chance: float) -> list[Tensor]:
    """Query, key and value in float64; an entry is an outlier with the given chance."""
    generator = torch.Generator().manual_seed(0)

    def one() -> Tensor:
        normal, large = (torch.randn(SHAPE, generator=generator).double() for _ in range(2))
        return normal + 10 * large * (torch.rand(SHAPE, generator=generator) < chance)

    return [one() for _ in range(3)]


def plain(x: Tensor, format: Format, block_size: int) -> Tensor:
    """Round with one scale for a block of tokens of a head; neither rotation nor means."""
    blocks = x.unflatten(2, (-1, block_size))
    return _with_scales(blocks, blocks.abs().amax((3, 4), keepdim=True), format).flatten(2, 3)


def per_tensor(x: Tensor, format: Format) -> Tensor:
    """Round with one scale for the whole tensor."""
    return _with_scales(x, x.abs().amax(), format)


def _with_scales(x: Tensor, largest: Tensor, format: Format) -> Tensor:
    scaled = (x * format.largest / largest).clamp(-format.largest, format.largest)
    whole = scaled if format.dtype.is_floating_point else scaled.round()
    return whole.to(format.dtype).double() * largest / format.largest


def settings(format: Format) -> Iterator[tuple[str, Callable[[Tensor, Tensor], Pair]]]:
    """Each way to round keys and values, with its name."""
    yield "one scale per tensor", lambda k, v: (per_tensor(k, format), per_tensor(v, format))
    yield (
        "blocks of 64, as they are",
        lambda k, v: (plain(k, format, 64), plain(v, format, 64)),
    )
    for block_size in BLOCK_SIZES:
        yield f"`kv_dtype`, blocks of {block_size}", partial(ours, format, block_size)


def ours(format: Format, block_size: int, key: Tensor, value: Tensor) -> Pair:
    """Round as `TransferPolicy(kv_dtype=...)` does, but for the size of the blocks."""
    keys, values = (
        quantise_keys(key, format, block_size),
        quantise_values(value, format, block_size),
    )
    return dequantise(keys, torch.float64), dequantise(values, torch.float64)


def table() -> Iterator[str]:
    """The lines of the table, in Markdown."""
    yield table_row("numbers", "format", "rounded", "keys", "values", "both")
    yield table_row(*["---"] * 3, *["---:"] * 3)
    for name, chance in CHANCES.items():
        query, key, value = drawn(chance)
        exact = F.scaled_dot_product_attention(query, key, value)

        def error(*pair: Tensor, query: Tensor = query, exact: Tensor = exact) -> str:
            found = F.scaled_dot_product_attention(query, *pair)
            return f"{(found - exact).square().mean().sqrt().item():.1e}"

        near = key.bfloat16().double(), value.bfloat16().double()
        yield _row(name, "bfloat16", "", error, (key, value), near)
        for format in FORMATS.values():
            for title, rounded in settings(format):
                yield _row(name, format.name, title, error, (key, value), rounded(key, value))


def _row(
    name: str, format: str, title: str, error: Callable[..., str], exact: Pair, rounded: Pair
) -> str:
    (key, value), (near_key, near_value) = exact, rounded
    errors = error(near_key, value), error(key, near_value), error(near_key, near_value)
    return table_row(name, format, title, *errors)


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


def generated() -> Iterator[str]:
    """The lines of the table of `--generate`, in Markdown."""
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
    """Print a table, or replace that of the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="replace the table in the page")
    parser.add_argument("--generate", action="store_true", help="read texts with rounded caches")
    options = parser.parse_args()
    lines, markers = (generated(), GENERATED) if options.generate else (table(), MARKERS)
    if options.write:
        write_part(PAGE, *markers, lines)
    else:
        print(*lines, sep="\n")


if __name__ == "__main__":
    main()
