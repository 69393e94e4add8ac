"""The ways of calls in ARCHITECTURE.md, compared with what is really called, and in which order.

    python -m tests.architecture --write

An item of a way begins with the file and the name of a function. `--write` runs the ways on two
processes and writes the files and the order again: a function that has moved is found by its name.
Edit the page by hand to add, rename or remove an item, and to say why.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

from dtensor_ring import SequenceAxis, shard_sequence
from parallel_plans.huggingface import context_parallel_plan
from tests.pool import Pool

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "ARCHITECTURE.md"
OURS = tuple(f"{ROOT / package}/" for package in ("dtensor_ring", "parallel_plans"))
WAY = re.compile(r"(?<=<!-- way: )(\w+) -->\n(.*?)(?=<!-- end of way -->)", re.DOTALL)
ITEM = re.compile(r"\d+\. `([^`:]+):([^`]+)`(.*)", re.DOTALL)


class Function(NamedTuple):
    """A function of ours, such as `"dtensor_ring/ring.py"`, `"ring_forward"`."""

    file: str
    name: str


class Calls:
    """A context that notes our functions, by the order of their first calls.

    A name has no `<locals>`: a function within `outer` is `outer.inner`.
    """

    def __init__(self) -> None:
        self.found: dict[Function, None] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS):
            file = Path(code.co_filename).relative_to(ROOT).as_posix()
            self.found.setdefault(Function(file, code.co_qualname.replace(".<locals>", "")))

    def __enter__(self) -> Self:
        sys.setprofile(self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)


def attention(mesh: DeviceMesh) -> Iterable[Function]:
    """Run an attention of DTensors, and its backward."""
    SequenceAxis(mesh, "zigzag")
    inputs = [shard_sequence(torch.randn(1, 4, 64, 8), mesh, 2) for _ in range(3)]
    query, key, value = (x.requires_grad_() for x in inputs)
    with Calls() as calls:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    total = out.sum()
    with calls:
        total.backward()
    return calls.found


def training_step(mesh: DeviceMesh) -> Iterable[Function]:
    """Run a forward of a language model with labels, and its backward."""
    model, tokens = _llama(mesh), torch.arange(64)[None]
    with Calls() as calls:
        model(input_ids=tokens, labels=tokens).loss.backward()
    return calls.found


def token(mesh: DeviceMesh) -> Iterable[Function]:
    """Run the third forward of `generate`, after the prompt and the first token."""
    model, forwards = _llama(mesh).eval(), []

    def begin(*_: object) -> None:
        forwards.append(Calls())
        sys.setprofile(forwards[-1])

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(lambda *_: sys.setprofile(None))
    model.generate(torch.arange(64)[None], max_new_tokens=4, do_sample=False)
    return forwards[2].found


def _llama(mesh: DeviceMesh) -> Any:
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**small, **heads, num_hidden_layers=1))
    return parallelize_module(model, mesh, context_parallel_plan(model))


WAYS: dict[str, Callable[[DeviceMesh], Iterable[Function]]] = {
    way.__name__: way for way in (attention, training_step, token)
}


def _run() -> dict[str, list[Function]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    return {name: [*way(mesh)] for name, way in WAYS.items()}


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
