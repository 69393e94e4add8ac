"""What all runs on a GPU found: one file, to which each run adds the steps that it took."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness import origin, publish
from rich.console import Console

from gpu_steps.card import Card
from gpu_steps.machine import Finding
from gpu_steps.tables import Overlap, Row, draw, report

FILE = "gpu"
"""Name of the files, without what says their kind."""


@dataclass
class Taken:
    """A step, as far as it was taken."""

    findings: dict[str, Finding] = field(default_factory=dict)
    """By what was looked at."""
    has_ended: bool = False
    commit: str = ""
    seconds: float = 0.0

    def add(self, found: Finding) -> None:
        self.findings[found.what] = found

    @property
    def is_done(self) -> bool:
        """Whether the next run need not take it: it ended, and left nothing out for time."""
        return self.has_ended and not any(x.is_left_out for x in self.findings.values())

    def begun_again(self, from_scratch: bool) -> "Taken":
        """What a further run starts from: that which was found, and was right."""
        kept = {
            what: x
            for what, x in self.findings.items()
            if not (from_scratch or x.is_left_out or x.is_wrong)
        }
        return Taken(kept)


class Findings:
    """All steps that were taken on a GPU, by name, and the rows of its card."""

    def __init__(self, folder: Path, steps: dict[str, Taken], card: Card) -> None:
        self._folder, self.steps, self.card = folder, steps, card

    @classmethod
    def of_folder(cls, folder: Path, earlier: Path | None = None) -> "Findings":
        """Those of earlier runs, if there were some; the file is written to `folder`.

        Args:
            folder: where they are.
            earlier: where they are if not there.
        """
        card = Card()
        files = [x / f"{FILE}.json" for x in (folder, earlier) if x is not None]
        file = next((x for x in files if x.exists()), None)
        if file is None:
            return cls(folder, {}, card)
        kept = json.loads(file.read_text())
        card.rows = [Row(**x) for x in kept["rows"]]
        card.overlaps = [Overlap(**x) for x in kept["overlaps"]]
        steps = {name: _taken(**x) for name, x in kept["steps"].items()}
        return cls(folder, steps, card)

    @property
    def is_wrong(self) -> bool:
        return any(x.is_wrong for _, x in self._all())

    def _all(self) -> Iterator[tuple[str, Finding]]:
        for name, taken in self.steps.items():
            yield from ((name, x) for x in taken.findings.values())

    def keep(self) -> None:
        """Write the file: whoever ends this process, what was found is there."""
        self._folder.mkdir(parents=True, exist_ok=True)
        new = self._folder / f"{FILE}.json.new"
        new.write_text(json.dumps(self._written()) + "\n")
        new.replace(self._folder / f"{FILE}.json")

    def publish(self, gpu: str) -> None:
        """Write and show the page, too, and draw the picture if there is what draws it."""
        about = origin() | {"GPU": gpu}
        where = False, about, self._written(), self._show, self._folder
        publish(FILE, "A GPU, checked and measured", *where)
        if self.card.rows:
            try:
                draw(self._folder / f"{FILE}.png", self.card.rows)
            except ImportError as error:
                print(f"no picture: {error}")

    def _written(self) -> dict[str, Any]:
        return {
            "steps": {
                name: asdict(taken) | {"findings": [list(x) for x in taken.findings.values()]}
                for name, taken in self.steps.items()
            },
            "rows": [asdict(x) for x in self.card.rows],
            "overlaps": [asdict(x) for x in self.card.overlaps],
        }

    def _show(self, console: Console) -> None:
        wrong = [f"{name}: {x.what}: {x.found}" for name, x in self._all() if x.is_wrong]
        missed = [f"{name}: {x.what}: {x.found}; aim: {x.aim}" for name, x in self._all() if x.aim]
        for title, lines in (("Wrong", wrong), ("Aims missed", missed)):
            _list(console, title, lines or ["nothing"])
        for name, taken in self.steps.items():
            title = f"{name.capitalize()}{'' if taken.is_done else ', not finished'}"
            when = f"commit {taken.commit}, {taken.seconds:.0f} s"
            _list(console, title, [when, *_lines(taken)])
        if self.card.rows:
            report(console, self.card.rows, self.card.overlaps)


def _taken(findings: list[list[Any]], **others: Any) -> Taken:
    return Taken({x[0]: Finding(*x) for x in findings}, **others)


def _lines(taken: Taken) -> list[str]:
    return [f"{x.what}: {x.found}" for x in taken.findings.values()]


def _list(console: Console, title: str, lines: list[str]) -> None:
    console.print(f"\n## {title}\n")
    for line in lines:
        console.print(f"- {line}", highlight=False, markup=False)
