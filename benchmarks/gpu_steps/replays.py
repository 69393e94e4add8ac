"""What CUDA graphs replay, bit by bit: packings forward and backward, and a decoded token.

And a planned model whose graphs `torch.compile(mode="reduce-overhead")` makes.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from dtensor_ring import DocumentRoom, SequenceAxis
from gpu_steps.graphs import captured
from gpu_steps.inference import decoded
from gpu_steps.machine import Finding, Machine, compared, failed
from gpu_steps.public import LARGEST, TOKENS, Call, documents
from gpu_steps.serving import llama

PACKINGS = 100
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""A model with a head dim of 64."""
ALONE = 4
"""Steps without documents: one warms up, one is captured, and the others are replayed."""


def replays(machine: Machine) -> Iterator[Finding]:
    """A graph is for one packing, or has room for the documents of all."""
    with machine.connected() as mesh:
        SequenceAxis(mesh, "zigzag")
        number = 2 if machine.is_dry else PACKINGS
        for what, way in {
            f"{number} packings, forward and backward": partial(_packings, number),
            f"{number} packings by one graph that has room": partial(_one_graph, number),
            "a token of some requests, by the paged kernel of choice": _decoded,
        }.items():
            try:
                num_different, num_tensors = way(machine, mesh)
            except Exception as problem:  # the other one is still worth a row
                yield failed(what, problem)
                continue
            found = f"{num_different} of {num_tensors} tensors differ from eager"
            yield Finding(what, found, is_wrong=num_different > 0)
        yield _of_model(machine, mesh, number)


def _of_model(machine: Machine, mesh: DeviceMesh, number: int) -> Finding:
    """One compiled model has them all: attention of packed documents runs between its graphs."""
    from parallel_plans.tested import too_old

    what = f'a model by "reduce-overhead", {ALONE} steps and {number} packings, next to "default"'
    if reason := too_old("transformers"):
        return Finding(what, f"left out: {reason}")
    return compared(what, partial(_error_of_model, number, machine, mesh), LARGEST)


def _error_of_model(number: int, machine: Machine, mesh: DeviceMesh) -> float:
    """The largest error of a loss or gradient, next to the largest entry."""
    from parallel_plans.huggingface import context_parallel_plan

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 1024, (ALONE + number, 1, TOKENS), generator=generator)
    batches = [{"input_ids": x.to(machine.device)} for x in tokens]
    for seed, batch in enumerate(batches[ALONE:]):
        batch["position_ids"] = _positions(documents(seed)).to(machine.device)
    found = []
    for mode in ("default", "reduce-overhead"):
        model = llama(machine, SIZES)
        parallelize_module(model, mesh, context_parallel_plan(model))
        how = {"backend": machine.compiler} if machine.is_dry else {"mode": mode}
        compiled = torch.compile(model, **how)
        found.append([x for batch in batches for x in _stepped(model, compiled, batch)])
    pairs = zip(*found, strict=True)
    return max(float((x - y).abs().max() / x.abs().max().clamp(min=1e-6)) for x, y in pairs)


def _positions(cuts: Tensor) -> Tensor:
    """Position ids `(1, S)` of packed documents."""
    return torch.cat([torch.arange(x) for x in cuts.diff().tolist()]).unsqueeze(0)


def _stepped(
    model: nn.Module, compiled: Callable[..., Any], batch: dict[str, Tensor]
) -> list[Tensor]:
    """The loss and the gradients; a next step overwrites what a graph returned."""
    torch.compiler.cudagraph_mark_step_begin()
    model.zero_grad()
    loss = compiled(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    return [
        loss.detach().clone(),
        *(x.grad.clone() for x in model.parameters() if x.grad is not None),
    ]


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


def _one_graph(number: int, machine: Machine, mesh: DeviceMesh) -> tuple[int, int]:
    """How many results differ, of how many."""
    call, room = Call(machine, mesh, machine.dtype), DocumentRoom(mesh, TOKENS, 16)

    def run() -> list[Tensor]:
        call(room.cu_seqlens)
        return call.results

    graph, results = captured(run)
    differ = []
    for seed in range(number):
        room.fill(documents(seed))
        eager = [x.clone() for x in run()]
        graph.replay()
        torch.cuda.synchronize()
        differ += [not torch.equal(x, y) for x, y in zip(results, eager, strict=True)]
    return sum(differ), len(differ)


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
