"""Findings and tables as commands print them, and the versions of what is installed."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Finding(NamedTuple):
    """A row of the report.

    Attributes:
        what: what was looked at.
        found: what was found.
        advice: what to do about it.
        is_bad: whether a ring cannot run, or is wrong.

    >>> print(written([Finding("torch", "2.15.0")]))
    {"torch": {"found": "2.15.0", "advice": "", "is_bad": false}}
    """

    what: str
    found: str
    advice: str = ""
    is_bad: bool = False


def written(findings: Sequence[Finding]) -> str:
    """Return all findings as a JSON object of objects; the keys are what was looked at."""
    fields = Finding._fields[1:]
    return json.dumps({what: dict(zip(fields, x, strict=True)) for what, *x in findings})


def show(findings: Sequence[Finding]) -> None:
    """Print the findings as a table."""
    marks = ("", "[red]wrong[/]")
    print_table((what, found, marks[is_bad], advice) for what, found, advice, is_bad in findings)


# The project, the packages it needs, and the packages it works with.
PACKAGES = (
    *("dtensor-ring", "torch", "triton", "flash-attn", "flash-attn-4", "nvidia-cudnn-frontend"),
    *("transformers", "accelerate", "trl", "torchtitan"),
)


def versions() -> list[Finding]:
    """Return the versions of Python, of the packages and of the GPUs' libraries."""
    found = [Finding("Python", platform.python_version())]
    found += [Finding(name, version_of(name)) for name in PACKAGES]
    if not torch.cuda.is_available():
        return [*found, Finding("GPU", "none that torch sees")]
    count, name = torch.cuda.device_count(), torch.cuda.get_device_name()
    return [
        *found,
        Finding("GPU", f"{count} x {name}"),
        Finding("CUDA", str(torch.version.cuda)),
        Finding("cuDNN", str(torch.backends.cudnn.version())),
        Finding("NCCL", ".".join(map(str, torch.cuda.nccl.version()))),
    ]


def version_of(package: str) -> str:
    """Return the version of a package, or that it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def refused(error: BaseException) -> int:
    """Print why a command cannot use what it was given, as one line, and return its exit status.

    Of the ranks of a launcher, the first of each host prints it.
    """
    if dist.get_node_local_rank(0) == 0:
        print(" ".join(str(error).split()), file=sys.stderr)
    return 2


# Yields items, and may show how many are done, under a name.
Track = Callable[[Sequence[T], str], Iterable[T]]


def untracked(items: Sequence[T], what: str) -> Iterable[T]:
    """Yield items and show nothing, as functions do that are no command."""
    return items


def tracked(items: Sequence[T], what: str) -> Iterator[T]:
    """Yield items, and show on a terminal how many are done, beside what is printed.

    Args:
        items: what a long command goes through.
        what: what is shown before the bar, such as "steps".
    """
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)  # stdout has the result, such as JSON
    # No thread refreshes it: one would run beside what is measured.
    shown: dict[str, Any] = {"console": console, "transient": True, "auto_refresh": False}
    yield from track(items, what, disable=not console.is_terminal, **shown)


def print_table(rows: Iterable[Sequence[str]], headings: Sequence[str] = ()) -> None:
    """Print rows as a table.

    Args:
        rows: the cells of each row.
        headings: of the columns; without them the table has no heading.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(*headings, show_header=bool(headings), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)
