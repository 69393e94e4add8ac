"""What a compiler makes graphs of, and which of it a CUDA graph could have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from tests.host_reads import READS


def capturing(graphs: list[list[str]]) -> Any:
    """A compiler that keeps the names of our ops in each graph."""

    def capture(module: GraphModule, _: Any) -> Callable[..., Any]:
        names = [getattr(node.target, "_opname", "") for node in module.graph.nodes]
        graphs.append([x for x in names if x.startswith(("ring", "exchange", "block_mask"))])
        return make_boxed_func(module.forward)

    return aot_autograd(fw_compiler=capture, bw_compiler=capture)


def not_replayed(module: GraphModule) -> list[str]:
    """The ops that no CUDA graph can have, or that make one wrong.

    They are of two devices, or of the CPU, or read the device, or write to what they get. A tensor
    that tracing made is a constant of the CPU.
    """
    found = [f"{x} is a constant" for x in module.graph.nodes if x.op == "get_attr"]
    for node in module.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        result = node.meta["val"]
        reads = node.target.overloadpacket in READS or free_unbacked_symbols(result)
        if reads or node.target._schema.is_mutable or _devices(node) != {"cuda"}:
            found.append(node.target._opname)
    return found


def _devices(node: Node) -> set[str]:
    """Where the tensors of an op are; a number of the CPU is an argument of a launch."""
    given = _tensors([x.meta.get("val") for x in node.all_input_nodes])
    return {x.device.type for x in (*_tensors(node.meta["val"]), *(x for x in given if x.ndim))}


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]
