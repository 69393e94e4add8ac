"""The ways of calls in ARCHITECTURE.md, compared with what is really called, and in which order.

    python -m tests.architecture --write

An item of a way begins with the file and the name of a function. `--write` runs the ways on two
processes and writes the files and the order again: a function that has moved is found by its name.
Edit the page by hand to add, rename or remove an item, and to say why.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.pool import Pool
from tests.profiled import OURS, ROOT, Profile, attention, token, training_step

PAGE = ROOT / "ARCHITECTURE.md"
WAY = re.compile(r"(?<=<!-- way: )(\w+) -->\n(.*?)(?=<!-- end of way -->)", re.DOTALL)
ITEM = re.compile(r"\d+\. `([^`:]+):([^`]+)`(.*)", re.DOTALL)


class Function(NamedTuple):
    """A function of ours, such as `"dtensor_ring/ring.py"`, `"ring_forward"`."""

    file: str
    name: str


class Calls(Profile):
    """Notes our functions, by the order of their first calls.

    A name has no `<locals>`: a function within `outer` is `outer.inner`.
    """

    def __init__(self) -> None:
        self.found: dict[Function, None] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS):
            file = Path(code.co_filename).relative_to(ROOT).as_posix()
            self.found.setdefault(Function(file, code.co_qualname.replace(".<locals>", "")))


def _with_backward(forward: Callable[[], Tensor]) -> Calls:
    with Calls() as calls:
        out = forward()
    total = out.sum()
    with calls:
        total.backward()
    return calls


WAYS: dict[str, Callable[[DeviceMesh], Calls]] = {
    "attention": lambda mesh: _with_backward(attention(mesh)),
    "training_step": lambda mesh: _with_backward(training_step(mesh)),
    "token": lambda mesh: token(mesh, Calls),
}


def _run() -> dict[str, list[Function]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    return {name: [*way(mesh).found] for name, way in WAYS.items()}


def called() -> dict[str, list[Function]]:
    """What is called on the first of two ranks, in fresh processes: nothing is planned yet."""
    pool = Pool(2)
    try:
        return pool.run(2, _run)[0]
    finally:
        pool.close()


def listed(page: str) -> dict[str, list[Function]]:
    """The functions that the page lists, by way."""
    items = {name: _items(text) for name, text in WAY.findall(page)}
    return {way: [Function(*item[:2]) for item in found] for way, found in items.items()}


def mended(page: str, calls: dict[str, list[Function]]) -> str:
    """The page with the files of its functions, and their order, as they are called."""

    def way(match: re.Match[str]) -> str:
        name, text = match.groups()
        items = [(_place(Function(*item[:2]), calls[name]), item[2]) for item in _items(text)]
        numbered = (
            f"{number}. `{':'.join(calls[name][place])}`{why.rstrip()}\n"
            for number, (place, why) in enumerate(sorted(items), 1)
        )
        return f"{name} -->\n{''.join(numbered)}"

    return WAY.sub(way, page)


def _items(text: str) -> list[tuple[str, str, str]]:
    """File, function and words of each item of a way."""
    items = re.split(r"(?m)^(?=\d+\. )", text)[1:]
    return [ITEM.fullmatch(item).groups() for item in items]


def _place(function: Function, calls: list[Function]) -> int:
    """The place of a function among the calls; if it has moved, its name must be the only one."""
    named = [x for x in calls if x.name == function.name]
    same = [x for x in named if Path(x.file).name == Path(function.file).name] or named
    if len(same) != 1:
        beside = [x.name for x in calls if x.file == function.file and "<" not in x.name]
        raise LookupError(f"no single call of {function}; found {same}, in its file {beside}")
    return calls.index(same[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the page again")
    parser.add_argument("--all", action="store_true", help="print all that is called")
    options = parser.parse_args()
    calls = called()
    if options.all:
        for way, functions in calls.items():
            print(f"\n{way}", *(f"{x.file}:{x.name}" for x in functions), sep="\n")
    if options.write:
        PAGE.write_text(mended(PAGE.read_text(), calls))


if __name__ == "__main__":
    main()
