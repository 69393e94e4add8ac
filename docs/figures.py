"""Writes figures of pages, from the cards of benchmarks/results and from docs/models.md.

    python -m docs.figures --write

Without the option they are printed. A test compares them with the pages.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "README.md", ROOT / "docs" / "measured.md"
CARDS = ROOT / "benchmarks" / "results"
MODELS = ROOT / "docs" / "models.md"

FORWARD, BOTH = 0, 1
"""Stages of a measurement; the second is forward and backward."""
SLOW = 15
"""How much longer a message takes than a step computes, on the slowest links that are measured."""

WIDTH = 115
"""Of lines of the pages."""

Measurement = dict[str, Any]


class Machine(NamedTuple):
    """The measurements of one kind of machine."""

    name: str
    rings: list[Measurement]
    hosts: list[Measurement]


class Row(NamedTuple):
    """A row of the table: what is measured, and which measurements it is about."""

    title: str
    of_hosts: bool
    wanted: Measurement
    ours: str
    theirs: str

    def cells(self, machine: Machine) -> list[str]:
        """Both stages of a machine, or nothing where it was not measured."""
        found = [
            m["seconds"]
            for m in (machine.hosts if self.of_hosts else machine.rings)
            # Cases of a ring are described apart from their times.
            if self.wanted.items() <= m.get("case", m).items()
        ]
        if not found:
            return ["", ""]
        (seconds,) = found
        return [f"{ratio(seconds, self.ours, self.theirs, stage):.2f}" for stage in (FORWARD, BOTH)]


def machines() -> list[Machine]:
    """All on which rings were measured."""
    found = []
    for path in sorted(CARDS.glob("*/ring.json")):
        card, hosts = json.loads(path.read_text()), path.with_name("hosts.json")
        measured = json.loads(hosts.read_text())["measurements"] if hosts.exists() else []
        name = re.sub(r"^\d+ x |\(\w+\)| Processor", "", card["about"]["processor"])
        found.append(Machine(name, card["measurements"], measured))
    return found


def rows(found: list[Machine]) -> Iterator[Row]:
    """Whole attentions, rings without kernels, and hosts on a slow link."""
    cases = [m["case"] for machine in found for m in machine.rings]
    for seq_len, dtype in dict.fromkeys((c["seq_len"], c["dtype"]) for c in cases if not c["stub"]):
        wanted = {"stub": False, "seq_len": seq_len, "dtype": dtype}
        yield Row(f"2 ranks, {seq_len:,} tokens, {dtype}", False, wanted, "ours", "torch")
    for ranks, seq_len in dict.fromkeys(
        (c["world_size"], c["seq_len"]) for c in cases if c["stub"]
    ):
        # The order of a model's projections: tokens before heads.
        wanted = {"stub": True, "world_size": ranks, "seq_len": seq_len, "order": "B, L, N, H"}
        title = f"{ranks} ranks, {seq_len:,} tokens, kernels that take no time"
        yield Row(title, False, wanted, "ours", "torch")
    title = f"2 hosts, a message takes {SLOW} times as long as the kernels of a step"
    yield Row(title, True, {"world_size": 2, "slowness": SLOW}, "ring", "gather")


def ratio(seconds: dict[str, list[list[float]]], ours: str, theirs: str, stage: int) -> float:
    """The median of the ratios of neighbouring times, as the cards have it."""
    return median(a / b for a, b in zip(seconds[ours][stage], seconds[theirs][stage], strict=True))


def comparison() -> Iterator[str]:
    """The table: what our ring takes, over what PyTorch's takes."""
    found = machines()
    heads = [f"{x.name}, {what}" for x in found for what in ("forward", "forward + backward")]
    yield _row(["attention", *heads])
    yield _row(["---", *["---:"] * len(heads)])
    for row in rows(found):
        yield _row([row.title, *(cell for machine in found for cell in row.cells(machine))])


def single() -> Iterator[str]:
    """A sentence: what two ranks take, over one process with as many threads."""
    parts = []
    for machine in machines():
        whole = [m["seconds"] for m in machine.rings if not m["case"]["stub"]]
        ratios = [ratio(x, "ours", "single", stage) for x in whole for stage in (FORWARD, BOTH)]
        parts.append(f"{min(ratios):.2f} to {max(ratios):.2f} ({machine.name})")
    yield from wrap(
        f"For the same attentions two ranks of one thread take {' and '.join(parts)} of the time "
        "of *one* process with two threads.",
        WIDTH,
    )


def census() -> Iterator[str]:
    """How many of transformers' model types train under the plan, by docs/models.md."""
    text = MODELS.read_text()
    (version,) = re.findall(r"model type of transformers (\d+\.\d+)", text)
    table = re.findall(r"^\| ([\w-]+) \| (\d+) \| (\d+) \| (\d+) \|", text, re.MULTILINE)
    equal = [f"{equal} of {total} {kind}" for kind, total, equal, _ in table]
    unpacked = sum(int(count) for *_, count in table)
    packed = f"; {unpacked} of these without packed documents" if unpacked else ""
    yield from wrap(
        f"Of the model types of transformers {version}, {', '.join(equal)} ones give the loss and "
        "all gradients of one process, as small random models on plain, padded and packed batches"
        f"{packed}. The others are refused with the reason, or could not be made small: see "
        "[models](docs/models.md).",
        WIDTH,
    )


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "comparison": comparison,
    "single": single,
    "census": census,
}
"""What pages have, by the name between their markers."""


def written(page: Path) -> str:
    """A page with the figures that it has a place for."""
    text = page.read_text()
    for name in re.findall(r"^<!-- (\w+): written by docs/figures.py -->$", text, re.MULTILINE):
        begin, end = f"<!-- {name}: written by docs/figures.py -->\n", f"<!-- end of {name} -->\n"
        before, rest = text.split(begin)
        _, after = rest.split(end)
        lines = "".join(f"{line}\n" for line in PARTS[name]())
        text = f"{before}{begin}{lines}{end}{after}"
    return text


def main() -> None:
    """Write the figures, or print them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="replace those of the pages")
    if parser.parse_args().write:
        for page in PAGES:
            page.write_text(written(page))
        return
    for lines in PARTS.values():
        print(*lines(), sep="\n", end="\n\n")


if __name__ == "__main__":
    main()
