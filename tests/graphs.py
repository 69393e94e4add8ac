"""What a compiler makes graphs of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule


def capturing(graphs: list[list[str]]) -> Any:
    """A compiler that keeps the names of our ops in each graph."""

    def capture(module: GraphModule, _: Any) -> Callable[..., Any]:
        names = [getattr(node.target, "_opname", "") for node in module.graph.nodes]
        graphs.append([x for x in names if x.startswith(("ring", "exchange", "block_mask"))])
        return make_boxed_func(module.forward)

    return aot_autograd(fw_compiler=capture, bw_compiler=capture)
