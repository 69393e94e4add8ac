"""How many calls of our functions what users call takes.

    python benchmarks/frames.py

Two processes count the calls of functions of `dtensor_ring` and of `parallel_plans`, after three
calls that fill the caches: of an attention, of a training step of a Llama of one layer, of a
generated token, and of the sum of a loss. A generator that goes on counts as a call, as
`sys.setprofile` has it. Counts do not depend on other work on the machine. With ``--quick`` the
card is written to ``out``.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType

import torch
from harness import ROOT, is_quick, origin, publish, spawn, table_of
from rich.console import Console
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring import sum_over_sequence
from tests.profiled import OURS, Profile, attention, token, training_step

WORLD_SIZE = 2
WARM_UP = 3
"""Calls before the one that is counted."""
KERNELS = str(ROOT / "dtensor_ring" / "compute" / "kernels")


@dataclass(frozen=True)
class Count:
    """What a call goes through.

    Attributes:
        name: of the call.
        calls: of our functions.
        files: that these functions are in.
        at_kernel: our functions that are open where one of them calls an op of torch as a kernel.
        by_file: calls of the functions of each file.
    """

    name: str
    calls: int
    files: int
    at_kernel: int
    by_file: dict[str, int]


class Counter(Profile):
    """Counts the calls of our functions."""

    def __init__(self) -> None:
        self._by_file: dict[str, int] = {}
        self._open = self._at_kernel = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        file, caller = frame.f_code.co_filename, frame.f_back
        is_op = event == "call" and file == torch._ops.__file__ and caller is not None
        if is_op and caller.f_code.co_filename.startswith(KERNELS):
            self._at_kernel = max(self._at_kernel, self._open)
        if event not in ("call", "return") or not file.startswith(OURS):
            return
        if event == "return":
            self._open -= 1
            return
        self._open += 1
        self._by_file[file] = self._by_file.get(file, 0) + 1

    def count(self, name: str) -> Count:
        """What was counted, by the names of the files."""
        calls = {str(Path(file).relative_to(ROOT)): n for file, n in sorted(self._by_file.items())}
        return Count(name, sum(calls.values()), len(calls), self._at_kernel, calls)


@dataclass(frozen=True)
class Case:
    """The name of a function of this file that counts."""

    name: str


@dataclass(frozen=True)
class Measurement:
    """What a case has found."""

    counts: list[Count]


def count_attention(mesh: DeviceMesh) -> list[Count]:
    """Count an attention of DTensors."""
    return _both("scaled_dot_product_attention on DTensors", attention(mesh))


def count_loss_sum(mesh: DeviceMesh) -> list[Count]:
    """Count the sum of a loss."""
    loss = torch.tensor(1.0, requires_grad=True)
    return _both("sum_over_sequence of a loss", lambda: sum_over_sequence(loss, mesh))


def count_steps(mesh: DeviceMesh) -> list[Count]:
    """Count two steps of a language model with labels.

    The fourth step compares the weights of the ranks, as steps 1, 2, 4, 8, ... do.
    """
    loss = training_step(mesh)
    fourth = _both("Hugging Face model, step 4, which compares weights", loss)
    return fourth + _both("Hugging Face model, step 5", loss, warm_up=0)


def count_token(mesh: DeviceMesh) -> list[Count]:
    """Count the third forward of `generate`, that of the second token after the prompt's."""
    return [token(mesh, Counter).count("Hugging Face model, a generated token")]


def _both(name: str, forward: Callable[[], Tensor], warm_up: int = WARM_UP) -> list[Count]:
    """Count a forward and its backward, after some that are not counted."""
    for _ in range(warm_up):
        forward().sum().backward()
    with Counter() as of_forward:
        result = forward()
    total = result.sum()
    with Counter() as of_backward:
        total.backward()
    return [of_forward.count(name), of_backward.count(f"{name}, backward")]


COUNTED: dict[str, Callable[[DeviceMesh], list[Count]]] = {
    count.__name__: count for count in (count_attention, count_steps, count_token, count_loss_sum)
}


def measure(case: Case, mesh: DeviceMesh) -> Measurement:
    """Count the calls of a case."""
    with torch.enable_grad():
        return Measurement(COUNTED[case.name](mesh))


def report(console: Console, counts: list[Count]) -> None:
    """Print what was counted, in Markdown."""
    console.print(f"\nCalls of our functions on rank 0 of {WORLD_SIZE}.\n")
    table = table_of(("what",), ("calls", "files", "open at the kernel"))
    for x in counts:
        table.add_row(x.name, str(x.calls), str(x.files), str(x.at_kernel or "-"))
    console.print(table)


def main() -> None:
    quick = is_quick(__doc__, "write to out")
    about = origin()
    results = spawn(WORLD_SIZE, measure, [Case(name) for name in COUNTED])
    counts = [Count(**x) for result in results for x in result["counts"]]
    measured = {"counts": [asdict(x) for x in counts]}
    show = partial(report, counts=counts)
    publish("frames", "Calls of our functions", quick, about, measured, show)


if __name__ == "__main__":
    main()
