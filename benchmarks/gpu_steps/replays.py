"""What CUDA graphs replay, bit by bit: packings forward and backward, and a decoded token."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring import SequenceAxis
from gpu_steps.graphs import captured
from gpu_steps.inference import decoded
from gpu_steps.machine import Finding, Machine, failed
from gpu_steps.public import Call, documents

PACKINGS = 100


def replays(machine: Machine) -> Iterator[Finding]:
    """A graph is for one packing: its launches are those of its documents."""
    with machine.connected() as mesh:
        SequenceAxis(mesh, "zigzag")
        number = 2 if machine.is_dry else PACKINGS
        for what, way in {
            f"{number} packings, forward and backward": partial(_packings, number),
            "a token of some requests, by the paged kernel of choice": _decoded,
        }.items():
            try:
                num_different, num_tensors = way(machine, mesh)
            except Exception as problem:  # the other one is still worth a row
                yield failed(what, problem)
                continue
            found = f"{num_different} of {num_tensors} tensors differ from eager"
            yield Finding(what, found, is_wrong=num_different > 0)


def _packings(number: int, machine: Machine, mesh: DeviceMesh) -> tuple[int, int]:
    """How many results differ, of how many."""
    found = [_of_packing(machine, mesh, documents(seed)) for seed in range(number)]
    return sum(x for x, _ in found), sum(x for _, x in found)


def _of_packing(machine: Machine, mesh: DeviceMesh, cuts: Tensor) -> tuple[int, int]:
    call = Call(machine, mesh, machine.dtype)

    def run() -> list[Tensor]:
        call(cuts)
        return call.results

    return _replayed(run)


def _decoded(machine: Machine, mesh: DeviceMesh) -> tuple[int, int]:
    return _replayed(decoded(machine, mesh))


def _replayed(run: Callable[[], list[Tensor]]) -> tuple[int, int]:
    """How many results of a replay differ from those of an eager call, of how many."""
    eager = [x.clone() for x in run()]
    graph, results = captured(run)
    for x in results:
        x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    differ = [not torch.equal(x, y) for x, y in zip(results, eager, strict=True)]
    return sum(differ), len(differ)
