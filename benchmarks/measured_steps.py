"""Training steps of a Llama 3.2 1B that were measured on an H200, beside what the simulator says.

Each had one rank with FSDP2, bfloat16 in layers and float32 parameters, AdamW, a batch of one
sequence, the plan for transformers, PyTorch 2.11 and transformers 5.24, and attention by cuDNN.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from docs.marked import table_row, write_part
from dtensor_ring import simulate_step
from dtensor_ring.lab.training.step import SimulatedStep

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/simulator.md"
MACHINE = ROOT / "benchmarks/results/nvidia-h200/machine.json"
MARKERS = "<!-- steps: written by benchmarks/measured_steps.py -->\n", "<!-- end of steps -->"
LLAMA = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64}
LLAMA |= {"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA |= {"vocab_size": 128256, "tie_word_embeddings": True}
FAR = ("checkpoints",)


class MeasuredStep(NamedTuple):
    """A step that was measured: its settings, seconds, and the most MiB that tensors had."""

    seq_len: int
    checkpoint: str
    mlp_tile: int | None
    offload: tuple[str, ...]
    seconds: float
    mib: int

    def simulated(self) -> SimulatedStep:
        """Simulate the same step."""
        how = {"checkpoint": self.checkpoint, "mlp_tile": self.mlp_tile, "offload": self.offload}
        return simulate_step(LLAMA, self.seq_len, {"cp": 1}, str(MACHINE), kernel="cudnn", **how)


STEPS = (
    MeasuredStep(32_768, "full", None, (), 1.743, 23_755),
    MeasuredStep(32_768, "attention", None, (), 1.573, 24_146),
    MeasuredStep(131_072, "full", None, (), 15.374, 41_779),
    MeasuredStep(131_072, "attention", None, (), 12.934, 49_699),
    MeasuredStep(131_072, "attention", 4096, FAR, 13.910, 29_253),
    MeasuredStep(262_144, "attention", 4096, FAR, 47.820, 36_506),
)


def rows() -> Iterator[str]:
    """Yield the lines of the table, and of what it comes to."""
    yield table_row("tokens", "checkpoint", "s", "simulated", "MiB", "simulated")
    yield table_row("---:", "---", "---:", "---:", "---:", "---:")
    errors: list[tuple[float, float]] = []
    for step in STEPS:
        found = step.simulated()
        mib = found.memory["peak"] / 2**20
        errors.append((found.seconds / step.seconds - 1, mib / step.mib - 1))
        what = step.checkpoint + (", tiles, host copies" if step.offload else "")
        yield table_row(
            *(f"{step.seq_len:,}", what, f"{step.seconds:.3f}"),
            f"{found.seconds:.3f} ({errors[-1][0]:+.1%})",
            *(f"{step.mib:,}", f"{mib:,.0f} ({errors[-1][1]:+.1%})"),
        )
    yield ""
    for what, side in zip(("Seconds", "MiB"), zip(*errors, strict=True), strict=True):
        off = [*map(abs, side)]
        yield f"{what} are {median(off):.1%} off in the median, and {max(off):.1%} at worst."


def main() -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the table of the page")
    is_new, lines = parser.parse_args().write, [*rows()]
    if is_new:
        write_part(PAGE, *MARKERS, lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
