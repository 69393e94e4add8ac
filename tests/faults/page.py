"""The tables of docs/failures.md: what each failure looks like, as the suite provokes it.

    python -m tests.faults.page --write

Without the option they are printed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from docs.marked import parts, table_row
from tests.faults.calls import make
from tests.faults.decoding import DECODED, Decoding, decode_as
from tests.faults.differences import DIFFERENCES
from tests.faults.nccl_alone import alone
from tests.faults.test_faults import FAULTS, VICTIM, suffer
from tests.faults.test_nccl_alone import SUITED
from tests.faults.worlds import Failure, Fate, Worlds

PAGE = Path(__file__).parent.parent.parent / "docs" / "failures.md"
MARKERS = "<!-- {}: written by tests/faults/page.py -->\n", "<!-- end of {} -->\n"

RIGHT, SAME, NOT_TRIED = "right", "the same", "not tried"
ALONE = "NCCL alone"
SHOWN = (
    "killed, forward",
    "kernel, caught",
    "kernel, uncaught",
    "exit, uncaught",
    "stopped, forward",
    "killed, decoding",
    "kernel, caught, decoding",
    "kernel, uncaught, decoding",
    "stopped, decoding",
    "append, caught",
    "append, uncaught",
)
"""The faults that the page has; the others look alike."""
BEGINNING = "the ranks of a ring must make the same call, they differ in "
LONGEST = 300
"""Characters that a cell quotes."""


def tables(worlds: Worlds) -> dict[str, str]:
    """Each table in Markdown."""
    return {
        "faults": _table(
            ["what happens to rank 1", "rank 1", "the others", ALONE], _faults(worlds)
        ),
        "differences": _table(
            ["rank 0, the others", "training", "inference", ALONE], _differences(worlds)
        ),
        "decoding": _table(["rank 0, the others", "what rank 1 raises", ALONE], _decoding(worlds)),
    }


def _differences(worlds: Worlds) -> Iterator[list[str]]:
    """What the last of two ranks is told."""
    for name, difference in DIFFERENCES.items():
        cells = [name]
        for training in (True, False):
            calls = difference.calls("contiguous", 2)
            fates = worlds.run(2, make, calls, ("plain",) * 2, training)
            cells.append(_cell(fates[-1].value.failure))
        cells[2] = cells[2] if cells[1] != cells[2] else SAME
        if name in SUITED:
            calls = difference.calls("contiguous", 2)
            fates = worlds.run(2, alone, make, calls, ("plain",) * 2, True)
            cells.append(_alone(fates[-1].value.failure, difference.reported))
        yield cells if name in SUITED else [*cells, NOT_TRIED]


def _decoding(worlds: Worlds) -> Iterator[list[str]]:
    """What the last of two ranks is told."""
    for name, difference in DECODED.items():
        cases = difference.by_rank(Decoding(), 2)
        cells = [name, _cell(worlds.run(2, decode_as, cases)[-1].value.failure)]
        if name in SUITED:
            failure = worlds.run(2, alone, decode_as, cases)[-1].value.failure
            reported = "rank 0" if difference.spares_rank_0 else difference.reported
            cells.append(_alone(failure, reported))
        yield cells if name in SUITED else [*cells, NOT_TRIED]


def _faults(worlds: Worlds) -> Iterator[list[str]]:
    for name in SHOWN:
        fault = FAULTS[name]
        fates = worlds.run(fault.world_size, suffer, fault, terms=fault.terms)
        cells = [name, _victim(fates[VICTIM]), _cell(fates[0].value.first)]
        fates = worlds.run(fault.world_size, alone, suffer, fault, terms=fault.terms)
        yield [*cells, _alone(fates[0].value.first, fault.reported)]


def _alone(failure: Failure | None, reported: str | None) -> str:
    """What a rank is told if its group has NCCL alone: the same, with the call in place of a step.

    Which rank is first, and so whose words all ranks quote, is different from run to run.
    """
    is_same = failure is not None and re.search(reported or "", failure.text)
    return SAME if is_same and failure.kind == "RingError" else _cell(failure)


def _victim(fate: Fate) -> str:
    if fate.ended == "returned":
        return _cell(fate.value.first)
    return "ends with its error" if fate.ended == "raised" else f"ends by {fate.ended}"


def _cell(failure: Failure | None) -> str:
    """What a rank is told, without what all errors say."""
    if failure is None:
        return RIGHT
    text = failure.text.replace(BEGINNING, "").partition(". The group of the ring")[0]
    text = re.sub(r" \(\[/.*?\)", "", text)  # gloo's own words
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    kind = "" if failure.kind == "RingError" else f"`{failure.kind}`: "
    return (kind + text).replace("|", "\\|")


def _table(heading: list[str], rows: Iterator[list[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "".join(f"{table_row(*cells)}\n" for cells in lines)


def _markers(name: str) -> list[str]:
    return [marker.format(name) for marker in MARKERS]


def rows(name: str) -> list[list[str]]:
    """The cells of a table of the page, without its heading."""
    _, table, _ = parts(PAGE.read_text(), *_markers(name))
    lines = table.splitlines()[2:]
    return [re.split(r" (?<!\\)\| ", line.strip("| ")) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="replace the tables in the page")
    write, worlds = parser.parse_args().write, Worlds()
    try:
        made = tables(worlds)
    finally:
        worlds.close()
    text = PAGE.read_text()
    for name, table in made.items():
        before, _, after = parts(text, *_markers(name))
        text = before + table + after
    if write:
        PAGE.write_text(text)
    else:
        print("\n".join(made.values()))


if __name__ == "__main__":
    main()
