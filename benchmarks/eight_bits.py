"""Measure the error of attention at keys and values of eight bits, for docs/numerics.md.

The experiment of flash attention 3's paper (Shah et al., 2024, arXiv 2407.08608): numbers from
N(0, 1) + N(0, 100) * Bernoulli(0.001), head dim 128. Errors are the root of the mean squared
error against float64. Run ``python -m benchmarks.eight_bits``; ``--write`` puts the table into the
page. It takes a minute or two on two cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from docs.marked import table_row, write_part
from dtensor_ring.quantised.block_scales import (
    FORMATS,
    Format,
    dequantise,
    quantise_keys,
    quantise_values,
)

PAGE = Path(__file__).parent.parent / "docs" / "numerics.md"
MARKERS = (
    "<!-- eight bits: written by benchmarks/eight_bits.py -->\n",
    "<!-- end of eight bits -->\n",
)
SHAPE = 1, 4, 2048, 128
CHANCES = {"outliers": 0.001, "normal": 0.0}
BLOCK_SIZES = 32, 64, 128

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
