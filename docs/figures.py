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
from statistics import mean, median
from textwrap import wrap
from typing import Any, NamedTuple

from docs.marked import parts, table_row

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "README.md", ROOT / "docs" / "measured.md", ROOT / "docs" / "strategies.md"
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
        card = json.loads(path.read_text())
        rings = card["measurements"] + _beside(path, "around")
        found.append(Machine(_name(card), rings, _beside(path, "hosts")))
    return found


def _beside(path: Path, name: str) -> list[dict[str, Any]]:
    """The measurements of another card of the same machine; none if it has no such card."""
    card = path.with_name(f"{name}.json")
    return json.loads(card.read_text())["measurements"] if card.exists() else []


def _name(card: dict[str, Any]) -> str:
    """Of the processor that a card is about."""
    return re.sub(r"^\d+ x |\(\w+\)| Processor", "", card["about"]["processor"])


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
    yield table_row("attention", *heads)
    yield table_row("---", *["---:"] * len(heads))
    for row in rows(found):
        yield table_row(row.title, *(cell for machine in found for cell in row.cells(machine)))


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


class Place(NamedTuple):
    """Where strategies were measured."""

    ranks: int
    rate: int | None
    """MB/s of a host's link, 0 without a limit; `None` on one machine."""
    seq_len: int

    @property
    def title(self) -> str:
        """The first cells of its row."""
        rate = f", {self.rate} MB/s" if self.rate else ""
        where = f"{self.ranks} hosts{rate}" if self.rate is not None else f"{self.ranks} ranks"
        return f"{where}, {self.seq_len // self.ranks:,} tokens each"


def places() -> Iterator[tuple[str, dict[Place, list[Measurement]]]]:
    """By machine and place, the measurements of all masks and heads."""
    for path in sorted(CARDS.glob("*/strategies.json")):
        card = json.loads(path.read_text())
        by_place: dict[Place, list[Measurement]] = {}
        for m in card["measurements"]:
            place = Place(*(m["case"][name] for name in ("world_size", "rate", "seq_len")))
            by_place.setdefault(place, []).append(m["seconds"])
        yield _name(card), by_place


def over_ring(measured: list[Measurement], pattern: str, stage: int = BOTH) -> str:
    """The least and the greatest time of the strategies of a pattern, over that of our ring."""
    ratios = [
        ratio(seconds, name, "ring", stage)
        for seconds in measured
        for name in seconds
        if re.fullmatch(pattern, name)
    ]
    ends = sorted({f"{min(ratios):.2f}", f"{max(ratios):.2f}"}) if ratios else []
    return " to ".join(ends)


COMPARED = {
    "`all_gather`": "all_gather",
    "`ulysses`": "ulysses",
    "`ulysses` in groups": r"ulysses:\d+",
    "PyTorch's ring": "torch all-to-all",
    "PyTorch's gather": "torch all-gather",
}
"""Patterns of strategies, by what a table calls them."""


def strategies() -> Iterator[str]:
    """The table: what other strategies take, over our ring."""
    for machine, by_place in places():
        yield table_row(machine, *COMPARED)
        yield table_row("---", *["---:"] * len(COMPARED))
        for place, measured in by_place.items():
            cells = (over_ring(measured, pattern) for pattern in COMPARED.values())
            yield table_row(place.title, *cells)


def winners() -> Iterator[str]:
    """Sentences: how strategies compare on most ranks, with few and with more tokens each."""
    for machine, by_place in places():
        most = max(place.ranks for place in by_place if place.rate is None)
        parts = [
            f"with {place.seq_len // most:,} tokens each {over_ring(measured, 'all_gather')} and "
            f"{over_ring(measured, 'ulysses')}"
            for place, measured in by_place.items()
            if (place.ranks, place.rate) == (most, None)
        ]
        yield from wrap(
            f"On {most} ranks of one machine ({machine}) `all_gather` and `ulysses` take, over the "
            f"time of the ring, forward and backward: {'; '.join(parts)}. The range is that of "
            "masks and heads.",
            WIDTH,
        )


MESHES = {
    "dp x cp": "dp x cp, zigzag",
    "dp x cp, balanced": "dp x cp, balanced",
    "one axis, balanced": "one axis, balanced",
}
"""What benchmarks/packed.py calls ways to shard documents, by what a table calls them."""


def packed_documents() -> list[Measurement]:
    """The card of benchmarks/packed.py, which is the same on every machine."""
    return json.loads(min(CARDS.glob("*/packed.json")).read_text())["packed"]


def packed() -> Iterator[str]:
    """The table: documents of every length on a fixed mesh, and on one axis of all ranks."""
    card = packed_documents()
    busiest = (f"busiest, {name}" for name in MESHES)
    gains = (f"step of {name}, over one axis" for name in list(MESHES)[:-1])
    yield table_row("lengths", "ranks", "cp", *busiest, *gains)
    yield table_row("---", *["---:"] * (1 + 2 * len(MESHES)))
    for lengths, ranks in dict.fromkeys((m["lengths"], m["world_size"]) for m in card):
        of = [m for m in card if (m["lengths"], m["world_size"]) == (lengths, ranks)]
        ways = [[m for m in of if m["way"] == way] for way in MESHES.values()]
        loads = (f"{mean(m['imbalance'] for m in way):.2f}" for way in ways)
        steps = [[m["step"] for m in way] for way in ways]
        over = (f"{mean(x / y for x, y in zip(way, steps[-1], strict=True)):.2f}" for way in steps)
        yield table_row(lengths, str(ranks), str(ways[0][0]["cp"]), *loads, *list(over)[:-1])


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


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "comparison": comparison,
    "single": single,
    "strategies": strategies,
    "winners": winners,
    "packed": packed,
    "census": census,
}
"""What pages have, by the name between their markers."""


def written(page: Path) -> str:
    """A page with the figures that it has a place for."""
    text = page.read_text()
    for name in re.findall(r"^<!-- (\w+): written by docs/figures.py -->$", text, re.MULTILINE):
        begin, end = f"<!-- {name}: written by docs/figures.py -->\n", f"<!-- end of {name} -->\n"
        before, _, after = parts(text, begin, end)
        text = before + "".join(f"{line}\n" for line in PARTS[name]()) + after
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
