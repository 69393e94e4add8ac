"""What `torch.compile(mode="reduce-overhead")` makes CUDA graphs of, on tensors without content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dtensor_ring import Mask, ZigZag
from dtensor_ring.ops.options import Batch, flatten
from dtensor_ring.ops.ring_op import ring_backward_op, ring_op
from tests.graphs import not_replayed
from tests.pool import on_ranks
from tests.rings import Case, Ring, fake_group

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None, reason="builds for CPUs make no fake CUDA tensors"
)

OPS = ["ring_attention", "ring_attention_backward"]


@on_ranks(1)
def test_rings_are_replayed_unless_their_documents_are_on_the_cpu() -> None:
    found = {}
    with fake_group(8, rank=3):
        for name, documents in (("without", None), ("with", ((0, 30, 64),))):
            case = Case(Ring(ZigZag(), 8, 64, Mask.causal(), documents), torch.float32)
            options = case.call()

            def both(*inputs: Tensor, options: Any = options) -> Any:
                given = *inputs[:3], *flatten(options._replace(batch=Batch(*inputs[3:])))
                out, lse = ring_op(*given)
                return ring_backward_op(out, None, *given[:3], out, lse, *given[3:])

            with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
                inputs = [torch.empty_like(x, device="cuda") for x in case.shards(3)]
                found[name] = not_replayed(make_fx(both)(*inputs, *_boundaries(documents)))
    assert found == {"without": [], "with": OPS}


def _boundaries(documents: Any) -> list[Tensor]:
    return [] if documents is None else [torch.empty(3, dtype=torch.int32)]


def test_inductor_leaves_ops_of_two_devices_out() -> None:
    """Or all of ours, which say it themselves."""
    is_tagged = torch.Tag.cudagraph_unsafe in ring_op.tags
    assert hasattr(utils, "fx_node_crosses_devices") != is_tagged


UNFIT: dict[str, tuple[Callable[[Tensor], Any], list[str]]] = {
    "copies to the host": (lambda x: x.cpu(), ["_to_copy"]),
    "a constant": (lambda x: x * torch.tensor(3.0), ["_tensor_constant0 is a constant"]),
    "writes to its input": (lambda x: x.add_(1), ["add_"]),
    "counts": (lambda x: x.nonzero(), ["nonzero"]),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_no_graph_can_have_is_found(name: str) -> None:
    run, expected = UNFIT[name]
    with FakeTensorMode(shape_env=ShapeEnv()):
        x = torch.empty(4, device="cuda")
    found = not_replayed(make_fx(run, tracing_mode="fake")(x))
    assert found[: len(expected)] == expected
