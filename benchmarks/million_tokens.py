"""Measure a passkey in a million tokens, and a training step on them, on CPU ranks.

Run ``python benchmarks/million_tokens.py``: it runs both parts of ``examples/million.py`` on two
ranks of one thread, the step also on four, and writes tables and numbers to ``benchmarks/results``.
It takes three quarters of an hour on two cores; leave the machine alone meanwhile. With ``--quick``
there are 2,048 tokens, and the results go to ``out``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness import ROOT, is_quick, origin, publish, table_of
from rich.console import Console

WORLD, OTHER = 2, 4
QUICK = ("--tokens", "2048", "--compared", "512", "--seconds", "5")
EXAMPLE = ROOT / "examples" / "million.py"
Results = dict[str, list[dict[str, Any]]]


def run(folder: Path, *options: str) -> Results:
    """Run the example, and return what it has written, by the part and its number of ranks."""
    command = [sys.executable, str(EXAMPLE), "--out", str(folder), f"--world={WORLD}"]
    subprocess.run([*command, f"--other={OTHER}", *options], check=not options)
    files = sorted(folder.glob("*.json"))
    return {file.stem: json.loads(file.read_text()) for file in files}


def report(console: Console, results: Results) -> None:
    """Print what was measured, in Markdown."""
    (taught,), (stock,) = results["taught-1"], results["stock-1"]
    short, long = results[f"passkey-{WORLD}"]
    steps = [results[f"step-{num_ranks}"][0] for num_ranks in (WORLD, OTHER)]
    console.print(
        f"\nAfter {taught['seconds']:.0f} s of training, greedy answers to a prompt that has a "
        "passkey of six digits.\nRanks have one thread each, stock transformers as many in one "
        "process. MiB of the rank with most: keys and values,\ntensors that were alive at once, "
        "and growth of the process.\n"
    )
    memory = "cache", "tensors", "process"
    times = "tokens/s", "prompt, s", "ms/token"
    table = table_of(("run",), ("tokens", "answer", *times, *memory))
    for name, found in (("stock", stock), *((f"{WORLD} ranks", x) for x in (short, long))):
        speed = found["num_tokens"] / found["seconds"]
        cells = (
            f"{speed:,.0f}",
            f"{found['seconds']:,.1f}",
            f"{found['milliseconds_per_token']:.0f}",
        )
        answer = ascii(bytes(found["answer"]).decode("latin-1"))[1:-1]
        table.add_row(name, f"{found['num_tokens']:,}", answer, *cells, *mebibytes(found))
    console.print(table)
    console.print("\nA training step, forward and backward, with checkpointing of the layers.\n")
    table = table_of((), ("ranks", "tokens", "loss", "gradients", *times[:1], "s", *memory[1:]))
    for step in steps:
        cells = f"{step['num_tokens']:,}", f"{step['loss']:.7f}", f"{step['gradient_norm']:.6f}"
        speed = f"{step['num_tokens'] / step['seconds']:,.0f}", f"{step['seconds']:,.1f}"
        table.add_row(str(step["num_ranks"]), *cells, *speed, *mebibytes(step))
    console.print(table)


def mebibytes(result: dict[str, Any]) -> list[str]:
    """Of the rank with most: each kind of memory that a result has."""
    kinds = [name for name in result if name.endswith("_bytes")]
    return [f"{max(result[name]) / 2**20:,.1f}" for name in kinds]


def main() -> None:
    quick = is_quick(__doc__, "take a minute")
    about = origin()
    with TemporaryDirectory() as folder:
        results = run(Path(folder), *(QUICK if quick else ()))
    show = partial(report, results=results)
    publish("million_tokens", "A million tokens on CPUs", quick, about, results, show)


if __name__ == "__main__":
    main()
