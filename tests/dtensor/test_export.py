"""`torch.export` of modules that attend: one node, with the values of the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from dtensor_ring import ContextParallel, SequenceAxis, ring_attention, shard_sequence
from tests.pool import on_ranks


class Calls(nn.Module):
    """A function of one tensor, and what it has of modules."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Any) -> Any:
        return self.function(x, **dict(self.named_children()))


class Attention(nn.Module):
    def forward(self, query: Any, key: Any, value: Any) -> Any:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


@on_ranks(2)
def test_export() -> None:
    mesh = init_device_mesh("cpu", (2,))
    SequenceAxis(mesh, "zigzag")
    heads = shard_sequence(torch.randn(1, 4, 8, 4), mesh, 2)
    multihead = nn.MultiheadAttention(4, 2, batch_first=True)
    parts = {"attend": parallelize_module(multihead, mesh, ContextParallel())}
    cases = {
        "local": (Calls(lambda x: ring_attention(x, x, x, mesh=mesh)), heads.to_local()),
        "traded": (
            Calls(lambda x: ring_attention(x, x, x, mesh=mesh, strategy="ulysses")),
            heads.to_local(),
        ),
        "DTensors": (Calls(lambda x: ring_attention(x, x, x)), heads),
        "SDPA": (Calls(lambda x: Attention()(x, x, x)), heads),
        "module": (
            Calls(lambda x, attend: attend(x, x, x, need_weights=False)[0], **parts),
            heads.to_local()[:, 0],
        ),
    }
    for name, (module, x) in cases.items():
        program = torch.export.export(module, (x,))
        nodes = [str(node.target) for node in program.graph.nodes]
        assert sum("attention.default" in node for node in nodes) == 1, name
        found, expected = (
            out.to_local() if isinstance(out, DTensor) else out
            for out in (program.module()(x), module(x))
        )
        torch.testing.assert_close(found, expected, msg=name)
    styled = parallelize_module(Attention(), mesh, ContextParallel())
    module = Calls(lambda x, attend: attend(x, x, x), attend=styled)
    for strict in (False, True):
        with pytest.raises(Exception, match="cannot make DTensors of local tensors"):
            torch.export.export(module, (heads.to_local(),), strict=strict)
