"""What graphs of a planned model take, and what CUDA graphs are made of in "reduce-overhead"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.fx import GraphModule

from parallel_plans.huggingface import context_parallel_plan
from tests.families import small_model
from tests.graphs import not_replayed
from tests.huggingface.planned import under_plan
from tests.pool import Pool, on_ranks
from tests.rings import fake_group


@pytest.mark.skipif(torch.version.cuda is None, reason="builds for CPUs make no fake CUDA tensors")
def test_only_documents_are_outside_of_graphs(pool: Pool) -> None:
    """The copy of their boundaries to the host, and attention, which plans by them."""
    ((alone, packed),) = pool.run(1, _graphs)
    assert alone == []
    assert packed == ["_to_copy", "ring_attention"]


def _graphs() -> list[list[str]]:
    """Ops that no CUDA graph can have, of a batch without documents and of one with them."""
    with fake_group(2):
        model = small_model("Llama", num_hidden_layers=1)
        with on_gpus(2):
            mesh = DeviceMesh("cuda", [0, 1])
            parallelize_module(model, mesh, context_parallel_plan(model))
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            without_content(model)
            tokens = torch.empty(2, 32, dtype=torch.int64, device="cuda")
            batch = {"input_ids": tokens, "labels": tokens}
            packed = batch | {"position_ids": torch.empty_like(tokens)}
            return [not_replayed(_traced(model, given)) for given in (batch, packed)]


@on_ranks(1)
@torch.no_grad()
def test_the_rank_is_no_number_of_a_graph() -> None:
    """The rank is a constant of a graph with dynamic shapes, and the length is an input."""
    numbers: list[int] = []

    def compiled(graph: GraphModule, given: list[Any]) -> Any:
        numbers.extend(int(x) for x in given if isinstance(x, (int, torch.SymInt)))
        return graph.forward

    with fake_group(8, rank=5):
        model = under_plan(small_model("Llama", num_hidden_layers=1), "contiguous")
        tokens = torch.zeros(1, 64, dtype=torch.int64)
        torch.compile(model, backend=compiled, dynamic=True)(input_ids=tokens, use_cache=False)
    assert 64 in numbers
    assert 5 not in numbers


def on_gpus(number: int) -> Any:
    """What a mesh of GPUs asks of a machine."""
    return patch.multiple(
        torch.cuda,
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: number,
        current_device=lambda: 0,
        set_device=lambda device: None,
        get_device_capability=lambda *device: (9, 0),
    )


def without_content(model: nn.Module) -> None:
    """Put fake tensors of a GPU into a model."""
    for module in model.modules():
        for name, x in module._parameters.items():
            if x is not None:
                fake = torch.empty_like(x, device="cuda")
                module._parameters[name] = nn.Parameter(fake, requires_grad=False)
        for name, x in module._buffers.items():
            module._buffers[name] = None if x is None else torch.empty_like(x, device="cuda")


def _traced(model: nn.Module, batch: dict[str, Any]) -> GraphModule:
    graphs = []

    def keep(module: GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(module)
        return make_boxed_func(module.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, inference_compiler=keep)
    with patch.object(torch.cuda, "current_device", lambda: 0):
        torch.compile(model, backend=backend, fullgraph=True)(**batch)
    (graph,) = graphs
    return graph
