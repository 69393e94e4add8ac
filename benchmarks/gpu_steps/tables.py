"""Tables and a picture of what rings on one GPU take."""

from dataclasses import dataclass
from pathlib import Path

from harness import STAGES, table_of
from rich.console import Console

from gpu_steps.alone import Attention

AIMS = (0.95, 0.96)
"""Aims, as parts of the speed of one launch: forward, and with backward."""


@dataclass(frozen=True)
class Row:
    """Seconds by stage: of one launch on everything, and of all ranks together."""

    kernel: str
    name: str
    flops: list[float]
    single: list[float]
    ours: list[float]
    there: list[float]
    """Ours, if all messages are there already."""
    torch: list[float] | None
    merges: float

    def speed(self, stage: int) -> float:
        """Speed of the ring over that of one launch, apart from copies that stand for messages."""
        return self.single[stage] / self.there[stage]


@dataclass(frozen=True)
class Overlap:
    """Seconds by stage: of a rank without links and with one, and what its messages take."""

    name: str
    rate: float
    free: list[float]
    linked: list[float]
    transfers: list[float]


def report(console: Console, rows: list[Row], overlaps: list[Overlap]) -> None:
    """Print what was measured, in Markdown."""
    console.print(
        "\nMilliseconds of all ranks together, which run one after the other; what they receive is "
        "copied on the GPU,\nor `there` already. `one launch` is the same kernel on the whole "
        "sequence; speeds are relative to it, ours\nwith all messages there. TFLOP/s count visible "
        "pairs. `merges` is their part of our forward.\n"
    )
    left = ("kernel", "ranks x tokens, layout, attention", "with backward")
    right = ("one launch", "ours", "there", "torch", "our speed", "torch's", "TFLOP/s", "merges")
    table = table_of(left, right)
    for row in rows:
        for stage, what in enumerate(("", "yes")):
            theirs = row.torch[stage] if row.torch else None
            table.add_row(
                *(row.kernel, row.name, what),
                *(_ms(row.single[stage]), _ms(row.ours[stage]), _ms(row.there[stage]), _ms(theirs)),
                *(_percent(row.speed(stage)), _percent(theirs and row.single[stage] / theirs)),
                *(f"{row.flops[stage] / row.there[stage] / 1e12:.0f}", _percent(row.merges)),
            )
    console.print(table)
    if overlaps:
        console.print("\nOne rank whose messages come over a link; exposed is relative to them.\n")
        table = table_of(
            ("GB/s", "what"), ("without link ms", "with link ms", "messages", "exposed")
        )
        for found in overlaps:
            for stage, what in enumerate(STAGES):
                free, linked = found.free[stage], found.linked[stage]
                exposed = (linked - free) / found.transfers[stage]
                times = _ms(free), _ms(linked), _ms(found.transfers[stage])
                table.add_row(f"{found.rate / 1e9:.0f}", what, *times, _percent(exposed))
        console.print(table)


def name_of(attention: Attention) -> str:
    """Ranks and tokens, layout, mask and documents."""
    window = attention.mask.left
    names = [f"{attention.world_size} x {attention.shard:,}", attention.layout.name]
    names.append("causal" if window is None else f"window {window + 1:,}")
    return ", ".join(
        names + ([f"{len(attention.cu_seqlens) - 1} documents"] if attention.cu_seqlens else [])
    )


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.1f}"


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * ratio:.1f} %"


def draw(path: Path, rows: list[Row]) -> None:
    """The speed of rings, by kernel, next to one launch."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 0.5 + 0.35 * len(rows)), layout="constrained")
    names = [f"{row.kernel}, {row.name}" for row in rows]
    for stage, what in enumerate(STAGES):
        places = [place + 0.4 * stage for place in range(len(rows))]
        axes.barh(places, [100 * row.speed(stage) for row in rows], 0.38, label=what)
        axes.axvline(100 * AIMS[stage], color=f"C{stage}", linestyle=":", linewidth=1)
    axes.set_yticks([place + 0.2 for place in range(len(rows))], names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("% of the speed of one launch (dotted: aims)")
    axes.legend(loc="lower left")
    figure.savefig(path, dpi=150)
    plt.close(figure)
