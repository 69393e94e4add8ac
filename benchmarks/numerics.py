"""Measure how far results of the ring are from exact, for the tables in docs/rounding.md.

Run ``python -m benchmarks.numerics``: it starts its processes itself and prints the tables in
Markdown. With ``--write`` it replaces those in the page. It takes a minute or two on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from docs.marked import table_row, write_part
from dtensor_ring import (
    Balanced,
    Mask,
    SequenceAxis,
    TransferPolicy,
    ring_attention,
    sequence_runs,
    shard_sequence,
)

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "rounding.md"
MARKERS = "<!-- tables: written by numerics.py -->\n", "<!-- end of tables -->\n"
SUMMARY = DOCS / "numerics.md"
SUMMARY_MARKERS = "<!-- causal: written by benchmarks/numerics.py -->\n", "<!-- end of causal -->\n"
DTYPES = ("float64", "float32", "bfloat16", "float16")
LAYOUTS = ("contiguous", "striped", "zigzag", "balanced")
WORLD_SIZES = (1, 2, 4, 8)
RESULTS = ("out", "lse", "dq", "dk", "dv")
NUM_HEADS, NUM_KEY_HEADS, HEAD_DIM = 4, 2, 64
KERNEL = "aten kernel"
NARROW = "bfloat16"
"""What sums of gradients may travel as, beside the default."""


@dataclass(frozen=True)
class Problem:
    """An attention, causal if nothing else is said."""

    seq_len: int = 512
    window: int | None = None
    cu_seqlens: tuple[int, ...] | None = None
    sinks: tuple[float, ...] | None = None

    @property
    def mask(self) -> Mask:
        """What a query sees within its document."""
        return Mask(self.window, 0)

    def inputs(self, dtype: str) -> list[Tensor]:
        """Gradient of the output, query, key and value, of normal random numbers."""
        generator = torch.Generator().manual_seed(0)
        heads = NUM_HEADS, NUM_HEADS, NUM_KEY_HEADS, NUM_KEY_HEADS
        shapes = [(1, num, self.seq_len, HEAD_DIM) for num in heads]
        tensors = [torch.randn(shape, generator=generator) for shape in shapes]
        return [x.to(getattr(torch, dtype)) for x in tensors]

    def layout(self, name: str, world_size: int) -> str | Balanced:
        """The layout itself where it is made for the documents, else its name."""
        if name != Balanced.name:
            return name
        return Balanced(self.mask, self.seq_len, world_size, self.cu_seqlens, block=16)

    def bias(self) -> Tensor:
        """What to add to the scores; sinks are one more key, of zeros, with a bias of its own."""
        position = torch.arange(self.seq_len)
        lag = position.unsqueeze(1) - position
        hidden = lag < 0
        if self.window is not None:
            hidden |= lag > self.window
        if self.cu_seqlens is not None:
            document = torch.bucketize(position, torch.tensor(self.cu_seqlens), right=True)
            hidden |= document.unsqueeze(1) != document
        bias = torch.zeros(1, NUM_HEADS, *lag.shape, dtype=torch.float64)
        bias = bias.masked_fill(hidden, -torch.inf)
        if self.sinks is None:
            return bias
        sinks = torch.tensor(self.sinks, dtype=bias.dtype).view(1, -1, 1, 1)
        return torch.cat([bias, sinks.expand(*bias.shape[:3], 1)], -1)


PROBLEMS = {
    "Causal": Problem(),
    "Three documents, a window of 100 tokens, sinks": Problem(
        window=100, cu_seqlens=(0, 45, 210, 512), sinks=(0.5, -1.0, 2.0, 0.0)
    ),
}


@dataclass(frozen=True)
class Row:
    """Errors of one dtype, number of ranks and layout, in the order of `RESULTS`."""

    problem: str
    dtype: str
    ranks: int
    layout: str
    errors: list[float]
    grad_dtype: str | None = None


@cache
def dense(problem: Problem, dtype: str) -> list[Tensor]:
    """The results from attention written out in float64, of inputs that are rounded already."""
    grad_out, *inputs = (x.double().requires_grad_() for x in problem.inputs(dtype))
    query, *pair = inputs
    heads = NUM_HEADS // NUM_KEY_HEADS
    key, value = _padded(problem, [x.repeat_interleave(heads, 1) for x in pair])
    scores = query @ key.mT * HEAD_DIM**-0.5 + problem.bias()
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ value
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, grad_out.detach())]


def single_kernel(problem: Problem, dtype: str) -> list[float]:
    """The errors of aten's flash attention for CPUs on the whole sequence."""
    grad_out, query, *pair = problem.inputs(dtype)
    pair, causal = _padded(problem, pair), problem == Problem(problem.seq_len)
    options = {"attn_mask": None if causal else problem.bias().to(query.dtype)}
    aten = torch.ops.aten
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        query, *pair, 0.0, causal, **options
    )
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, *pair, out, lse, 0.0, causal, **options
    )
    grads = [x[:, :, : problem.seq_len] for x in grads]
    exact = dense(problem, dtype)
    return relative(errors([out, lse, *grads], exact), exact)


def _padded(problem: Problem, pair: Sequence[Tensor]) -> list[Tensor]:
    """Key and value, with a token of zeros after them where there are sinks."""
    extra = 0 if problem.sinks is None else 1
    return [torch.cat([x, x.new_zeros(*x.shape[:2], extra, HEAD_DIM)], 2) for x in pair]


def ring(
    problem: Problem,
    dtype: str,
    layout: str | Balanced,
    mesh: DeviceMesh,
) -> list[Tensor]:
    """The results of the ring for this rank's tokens."""
    shards = [shard_sequence(x, mesh, 2, layout).to_local() for x in problem.inputs(dtype)]
    grad_out, *inputs = (x.requires_grad_() for x in shards)
    out, lse = ring_attention(
        *inputs,
        mask=problem.mask,
        cu_seqlens=None if problem.cu_seqlens is None else torch.tensor(problem.cu_seqlens).int(),
        sinks=None if problem.sinks is None else torch.tensor(problem.sinks),
        runs=sequence_runs(layout) if isinstance(layout, Balanced) else None,
        mesh=mesh,
        return_lse=True,
    )
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, grad_out.detach())]


def measure(problem: Problem, dtype: str, layout: str, mesh: DeviceMesh) -> list[float]:
    """The errors of the ring over all ranks; it must give the same bits twice."""
    chosen = problem.layout(layout, mesh.size())
    results, again = (ring(problem, dtype, chosen, mesh) for _ in range(2))
    for name, x, y in zip(RESULTS, results, again, strict=True):
        if not torch.equal(x, y):
            raise AssertionError(f"{name} differs when computed twice: {dtype}, {layout}, {mesh}")
    exact = [shard_sequence(x, mesh, 2, chosen).to_local() for x in dense(problem, dtype)]
    worst = torch.tensor(errors(results, exact))
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=mesh.get_group())
    return relative(worst.tolist(), dense(problem, dtype))


def errors(results: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """The largest absolute error of each result."""
    pairs = zip(results, exact, strict=True)
    return [(x.double() - y).abs().max().item() for x, y in pairs]


def relative(largest: Sequence[float], exact: Sequence[Tensor]) -> list[float]:
    """The errors over the largest absolute entry of each result."""
    return [error / x.abs().max().item() for error, x in zip(largest, exact, strict=True)]


def work(rank: int, folder: str) -> None:
    """Measure every case; rank 0 leaves the rows in the folder."""
    torch.set_num_threads(1)
    rows = []
    axes = *product(LAYOUTS, [None]), ("zigzag", NARROW)
    for world_size, (layout, grad_dtype) in product(WORLD_SIZES, axes):
        if rank >= world_size:
            continue
        store = dist.FileStore(f"{folder}/{layout}{world_size}{grad_dtype}", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        mesh = init_device_mesh("cpu", (world_size,))  # a world's axis is configured once
        if grad_dtype is not None:
            policy = TransferPolicy(grad_dtype=getattr(torch, grad_dtype))
            SequenceAxis(mesh, layout, policy=policy)
        for (title, problem), dtype in product(PROBLEMS.items(), DTYPES):
            found = measure(problem, dtype, layout, mesh)
            rows.append(asdict(Row(title, dtype, world_size, layout, found, grad_dtype)))
        dist.destroy_process_group()
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))


def run() -> list[Row]:
    """The rows of the ring, in as many processes as the largest has ranks, then the kernel's."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (folder,), nprocs=max(WORLD_SIZES))
        rows = [Row(**row) for row in json.loads(Path(folder, "rows.json").read_text())]
    return rows + [
        Row(title, dtype, 1, KERNEL, single_kernel(problem, dtype))
        for (title, problem), dtype in product(PROBLEMS.items(), DTYPES)
    ]


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of all tables, in Markdown."""
    yield f"Measured with torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}."
    for title in PROBLEMS:
        here = [row for row in rows if row.problem == title and row.grad_dtype is None]
        yield from ("", f"### {title}", "")
        yield from ("The largest error of the ring over that of the kernel:", "")
        yield from summary(here)
        yield from ("", "All errors:", "", *_heading("dtype", "ranks", "layout"))
        for row in sorted(here, key=lambda row: (DTYPES.index(row.dtype), row.layout != KERNEL)):
            yield table_row(row.dtype, row.ranks, row.layout, *(f"{x:.1e}" for x in row.errors))
    yield from ("", f"### Sums of gradients that travel as {NARROW}", "")
    yield from ("Causal, zigzag; in brackets the errors where they travel as by default:", "")
    yield from _heading("dtype", "ranks", results=("dk", "dv"))
    yield from _narrow_lines([row for row in rows if row.problem == next(iter(PROBLEMS))])


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """The largest error of a problem's rings over that of the kernel, by dtype."""
    yield from _heading("dtype")
    for dtype in DTYPES:
        yield table_row(dtype, *(f"{x:.2f}" for x in _ratios(rows, dtype)))


def _narrow_lines(rows: Sequence[Row]) -> Iterator[str]:
    wide = {(row.dtype, row.ranks, row.layout): row for row in rows if row.grad_dtype is None}
    for row in rows:
        if row.grad_dtype == NARROW and row.ranks > 1 and row.dtype != "float64":
            pairs = zip(row.errors, wide[row.dtype, row.ranks, row.layout].errors, strict=True)
            cells = [f"{x:.1e} ({y:.1e})" for x, y in pairs]
            yield table_row(row.dtype, row.ranks, *cells[RESULTS.index("dk") :])


def _ratios(rows: Sequence[Row], dtype: str) -> Iterator[float]:
    """Largest error of the ring over that of the kernel, for each result."""
    mine = [row for row in rows if row.dtype == dtype]
    (kernel,) = (row.errors for row in mine if row.layout == KERNEL)
    ring_errors = zip(*(row.errors for row in mine if row.layout != KERNEL), strict=True)
    return (max(of) / error for of, error in zip(ring_errors, kernel, strict=True))


def _heading(*columns: str, results: Sequence[str] = RESULTS) -> Iterator[str]:
    yield table_row(*columns, *results)
    yield table_row(*["---"] * len(columns), *["---:"] * len(results))


def main() -> None:
    """Print the tables, or replace those of the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="replace the tables in the page")
    write = parser.parse_args().write
    rows = run()
    if not write:
        print(*tables(rows), sep="\n")
        return
    write_part(PAGE, *MARKERS, tables(rows))
    title = next(iter(PROBLEMS))
    causal = [row for row in rows if row.problem == title and row.grad_dtype is None]
    write_part(SUMMARY, *SUMMARY_MARKERS, summary(causal))


if __name__ == "__main__":
    main()
