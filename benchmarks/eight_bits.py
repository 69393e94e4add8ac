"""Measure the error of attention at keys and values of eight bits, for docs/numerics.md.

The experiment of flash attention 3's paper (Shah et al., 2024, arXiv 2407.08608): numbers from
N(0, 1) + N(0, 100) * Bernoulli(0.001), head dim 128; and keys and values of the demo's model after
300 steps. Errors are the root of the mean squared error against float64. Run ``python -m
benchmarks.eight_bits``; ``--write`` puts the tables into the page. With ``--train`` the model is
also trained with keys and values that travel in eight bits; then ``--write`` writes the card with
the losses, too, and runs that the card has are not repeated. A training takes a few minutes on two
cores, all else a minute; with ``--quick`` there are few steps of short sequences.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from benchmarks.harness import folder_of, origin, publish, spawn, table_of
from benchmarks.trained import NUM_LAST, WORLD_SIZE, Trained, Training, attended_by, train
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
SUM_MARKERS = (
    "<!-- sums of gradients: written by benchmarks/eight_bits.py -->\n",
    "<!-- end of sums of gradients -->\n",
)
LOSS_MARKERS = (
    "<!-- losses: written by benchmarks/eight_bits.py -->\n",
    "<!-- end of losses -->\n",
)
BLOCK_SIZES = 32, 64, 128
NUM_RANKS = 8
# What keys and values travel as, and the noise of the first weights.
RUNS = (None, 0.0), (None, 1e-3), ("bfloat16", 0.0), ("int8", 0.0), ("fp8", 0.0)
SEEDS = 0, 1, 2
COMPARED = "bfloat16"

Pair = tuple[Tensor, Tensor]


class Sample(NamedTuple):
    """What attends to what.

    Attributes:
        name: of the numbers.
        tensors: query, key and value `(B, N, S, H)` in float64.
        is_causal: whether the mask is causal, else there is none.
    """

    name: str
    tensors: list[Tensor]
    is_causal: bool = False

    def attend(self, key: Tensor, value: Tensor) -> Tensor:
        """Return the output with these keys and values."""
        options = {"is_causal": self.is_causal, "enable_gqa": True}
        return F.scaled_dot_product_attention(self.tensors[0], key, value, **options)


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


def table(trained: list[Tensor]) -> Iterator[str]:
    """Yield the lines of the table, in Markdown.

    Args:
        trained: query, key and value of the trained model.
    """
    yield table_row("numbers", "format", "rounded", "keys", "values", "both", "relative")
    yield table_row(*["---"] * 3, *["---:"] * 4)
    samples = [Sample(name, drawn(chance)) for name, chance in CHANCES.items()]
    for sample in (*samples, Sample("trained", trained, is_causal=True)):
        _, key, value = sample.tensors
        near = key.bfloat16().double(), value.bfloat16().double()
        yield _row(sample, "bfloat16", "", near)
        for format in FORMATS.values():
            for title, rounded in settings(format):
                yield _row(sample, format.name, title, rounded(key, value))


def _row(sample: Sample, format: str, title: str, rounded: Pair) -> str:
    _, key, value = sample.tensors
    near_key, near_value = rounded
    exact = sample.attend(key, value)
    pairs = (near_key, value), (key, near_value), rounded
    errors = [_rms(sample.attend(*pair) - exact) for pair in pairs]
    shown = (f"{x:.1e}" for x in (*errors, errors[-1] / _rms(exact)))
    return table_row(sample.name, format, title, *shown)


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def table_of_sums() -> Iterator[str]:
    """Yield the lines of a table: errors of gradient sums that are rounded at each hop."""
    yield table_row("numbers", "sums on the way", "dk", "dv")
    yield table_row("---", "---", "---:", "---:")
    for name, chance in CHANCES.items():
        shares, exact = gradient_shares(drawn(chance))
        for title, rounded in ways_of_sums():
            sums = summed(shares, rounded)
            errors = (_rms(x - y) / _rms(y) for x, y in zip(sums, exact, strict=True))
            yield table_row(name, title, *(f"{x:.1e}" for x in errors))


def ways_of_sums() -> Iterator[tuple[str, Callable[..., Pair]]]:
    """Each way to round sums of key and value gradients, with its name."""
    yield "float32", lambda *pair: pair
    yield "bfloat16", lambda *pair: tuple(x.bfloat16().float() for x in pair)
    for format in FORMATS.values():
        yield f"{format.name}, blocks of 64", partial(ours, format, 64)


def summed(shares: list[Pair], rounded: Callable[..., Pair]) -> Pair:
    """Return the sums over ranks: rounded at each hop but when the owner adds its own share."""
    own, *others = shares
    total = rounded(*(x.float() for x in others[0]))
    for share in others[1:]:
        total = rounded(*(x.float() + y for x, y in zip(total, share, strict=True)))
    key, value = (x.double() + y for x, y in zip(total, own, strict=True))
    return key, value


def gradient_shares(tensors: list[Tensor]) -> tuple[list[Pair], Pair]:
    """Return gradients of keys and values in bfloat16 by the rank of queries; their exact sums."""
    query, *given = tensors
    generator = torch.Generator().manual_seed(1)
    grad_out = torch.randn(query.shape, generator=generator).double()
    pair, length = [x.detach().requires_grad_() for x in given], query.shape[2]
    shares = []
    for begin, end in pairwise(range(0, length + 1, length // NUM_RANKS)):
        out = F.scaled_dot_product_attention(query[:, :, begin:end], *pair)
        shares.append(torch.autograd.grad(out, pair, grad_out[:, :, begin:end]))
    dk, dv = (torch.stack(x).sum(0) for x in zip(*shares, strict=True))
    # As kernels return them.
    return [(key.bfloat16(), value.bfloat16()) for key, value in shares], (dk, dv)


def table_of_losses(runs: list[Trained]) -> Iterator[str]:
    """Yield the lines of a table of `loss_rows`."""
    title, *numbers = loss_names(runs)
    yield table_row(title, *numbers)
    yield table_row("---", *["---:"] * len(numbers))
    for cells in loss_rows(runs):
        yield table_row(*cells)


def loss_names(runs: list[Trained]) -> list[str]:
    """Return the names of the columns of `loss_rows`."""
    seeds = sorted({run.training.seed for run in runs})
    by_seed = (f"seed {seed}" for seed in seeds)
    return ["keys and values travel as", *by_seed, "mean", f"beside {COMPARED}"]


def loss_rows(runs: list[Trained]) -> Iterator[list[str]]:
    """Yield for each format the losses at the end by seed, and their mean beside `COMPARED`'s."""
    by_title: dict[str, list[float]] = {}
    for run in runs:
        by_title.setdefault(run.training.title, []).append(run.last)
    for title, losses in by_title.items():
        difference = mean(losses) / mean(by_title.get(COMPARED, losses)) - 1
        yield [title, *(f"{x:.4f}" for x in (*losses, mean(losses))), f"{difference:+.2%}"]


def report(console: Console, runs: list[Trained]) -> None:
    """Print the losses, in Markdown."""
    asked = runs[0].training
    console.print(
        f"\nThe model of the demo in float32, {WORLD_SIZE} ranks of one thread, {asked.num_steps} "
        f"steps of two sequences of {asked.seq_len} bytes.\nLosses at the end, means of the last "
        f"{NUM_LAST} steps, in nats a byte, by the seed that draws the sequences.\n"
    )
    title, *numbers = loss_names(runs)
    table = table_of([title], numbers)
    for cells in loss_rows(runs):
        table.add_row(*cells)
    console.print(table)


def trainings(is_short: bool, is_only_first: bool, weights: Path, card: Path) -> list[Trained]:
    """Train, but for runs that the card has; the first one keeps its weights."""
    size = (NUM_LAST, 256) if is_short else (300, 1024)
    every = [Training(dtype, *size, noise, seed) for seed in SEEDS for dtype, noise in RUNS]
    known = json.loads(card.read_text())["runs"] if card.exists() and not is_short else []
    runs = {run.training: run for run in map(_run_of, known)}
    wanted = every[:1] if is_only_first else every[: len(RUNS)] if is_short else every
    for number, asked in enumerate(wanted):
        if asked not in runs or is_only_first:
            # In new processes each: an axis is configured once.
            kept = replace(asked, weights=None if number else str(weights))
            (found,) = spawn(WORLD_SIZE, train, [kept])
            runs[asked] = _run_of(found)
    return [runs[asked] for asked in wanted]


def _run_of(found: dict[str, Any]) -> Trained:
    asked = Training(**found["training"] | {"weights": None})
    return Trained(asked, found["losses"], found["seconds"])


def main() -> None:
    """Print the tables, or replace those of the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="replace the tables in the page")
    parser.add_argument("--train", action="store_true", help="train with eight bits, too")
    parser.add_argument("--quick", action="store_true", help="train little; writes nothing")
    arguments = parser.parse_args()
    command = " ".join(["python -m benchmarks.eight_bits", *sys.argv[1:]])
    about, write = origin() | {"command": command}, arguments.write and not arguments.quick
    card = folder_of(about["processor"]) / "eight_bits.json"
    parts: dict[tuple[str, str], Iterator[str]] = {SUM_MARKERS: table_of_sums()}
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.pt"
        runs = trainings(arguments.quick, not arguments.train, weights, card)
        if weights.exists():  # else the card had all runs, and the page has the table
            parts[MARKERS] = table(attended_by(weights, runs[0].training.seq_len))
    if arguments.train:
        parts[LOSS_MARKERS] = table_of_losses(runs)
        measured = {"runs": [asdict(run) for run in runs]}
        title = "Training with keys and values in eight bits"
        publish("eight_bits", title, not write, about, measured, partial(report, runs=runs))
    for markers, lines in parts.items():
        if write:
            write_part(PAGE, *markers, lines)
        else:
            print(*lines, sep="\n")


if __name__ == "__main__":
    main()
