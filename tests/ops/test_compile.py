"""What torch.compile sees of attention, and makes of it: nodes, and graphs of CUDA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import getitem
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves

from dtensor_ring import (
    Balanced,
    Mask,
    Slices,
    ZigZag,
    ring_attention,
    sequence_runs,
    sequence_slices,
    shard_sequence,
    sum_over_sequence,
    unshard_sequence,
)
from dtensor_ring.compute.kernels import Scores
from dtensor_ring.ops.options import Batch, Call, Place, default_scale, flatten
from dtensor_ring.ops.ring_op import ring_backward_op, ring_op
from dtensor_ring.transport.transport import DEFAULT_POLICY
from tests.dense import dense_attention, largest
from tests.graphs import not_replayed
from tests.ops.test_transforms import Whole, close
from tests.pool import Pool, on_ranks
from tests.rings import Case, Ring, fake_group
from tests.slices import shown

CAUSAL, FULL = Mask.causal(), Mask.full()
BLOCK = Slices([(0, 3), (3, 8)], [(0, 3), (0, 8)], [(None, None), (None, 0)])
DOCUMENTS = ((0, 30, 64),)


class ThreeAttentions(nn.Module):
    """Causal, windowed and full attention over local shards, with projections around them."""

    def __init__(self, features: int = 32) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(features, 2 * features) for _ in range(3))

    def forward(
        self, x: Tensor, cu_seqlens: Tensor | None = None, runs: Tensor | None = None
    ) -> Tensor:
        """`x` is `(B, L, features)`: four query and two key heads."""
        for project, mask in zip(self.projections, (CAUSAL, Mask.sliding(5), FULL), strict=True):
            query, key, value = (
                part.unflatten(-1, (-1, 8)).transpose(1, 2)
                for part in project(x).split((x.shape[-1], x.shape[-1] // 2, x.shape[-1] // 2), -1)
            )
            seq_len = x.shape[1] * dist.get_world_size()
            group_name = dist.group.WORLD.group_name
            call = Call(
                Batch(cu_seqlens, runs=runs),
                Scores(mask, default_scale(8)),
                Place("zigzag", "ring", seq_len, seq_len, group_name, DEFAULT_POLICY),
            )
            out, _ = ring_op(query, key, value, *flatten(call))
            x = out.transpose(1, 2).flatten(2)
        return x


def test_three_attentions_are_three_nodes_forward_and_backward(pool: Pool) -> None:
    """Boundaries of documents and runs are inputs of the graph: in0 and in4."""
    forward, backward = pool.run(1, _graphs)[0]
    assert_expected_inline(
        forward,
        """\
x0 = dtensor_ring.ring_attention.default(in1, in2, in3, in0, in4)
x1 = dtensor_ring.ring_attention.default(x0[0], in2, in3, in0, in4)
x2 = dtensor_ring.ring_attention.default(x1[0], in2, in3, in0, in4)
return x2[0]""",
    )
    assert_expected_inline(
        backward,
        """\
x0 = dtensor_ring.ring_attention_backward.default(in13, in8, in2, in3, in11, in12, in0, in4)
x1 = dtensor_ring.ring_attention_backward.default(x0[0], in5, in2, in3, in9, in10, in0, in4)
x2 = aten.add.Tensor(x0[1], x1[1])
x3 = aten.add.Tensor(x0[2], x1[2])
x4 = dtensor_ring.ring_attention_backward.default(x1[0], in1, in2, in3, in6, in7, in0, in4)
x5 = aten.add.Tensor(x2, x4[1])
x6 = aten.add.Tensor(x3, x4[2])
return x4[0]""",
    )


def _graphs() -> list[str]:
    """The forward and the backward graph of three attentions in a row, on rank 3 of 8."""
    graphs: list[str] = []
    layout = Balanced(CAUSAL, 64, 8, DOCUMENTS, block=2)
    case = Case(Ring(layout, 8, 64, CAUSAL, DOCUMENTS), torch.float32)

    def capture(module: GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(printed(module))
        return make_boxed_func(module.forward)

    @torch.compile(fullgraph=True, backend=aot_autograd(fw_compiler=capture, bw_compiler=capture))
    def three_attentions(query: Tensor, key: Tensor, value: Tensor, **data: Tensor) -> Tensor:
        call = options._replace(batch=Batch(**data))
        for _ in range(3):
            query, _ = ring_op(query, key, value, *flatten(call))
        return query

    with fake_group(8, rank=3):
        options = case.call()
        data = {"cu_seqlens": options.batch.cu_seqlens, "runs": options.batch.runs}
        three_attentions(*case.shards(3), **data).sum().backward()
    return graphs


def printed(module: GraphModule) -> str:
    """The calls with their tensor arguments, and the first output; all but detach and getitem."""
    names: dict[Node, str] = {}
    lines: list[str] = []
    for node in module.graph.nodes:
        leaves = tree_leaves(node.args)  # an op may take a list of tensors
        arguments = [names[x] for x in leaves if isinstance(x, Node) and x in names]
        if node.op == "placeholder":
            names[node] = f"in{len(names)}"
        elif node.op == "call_function" and node.target is getitem:
            names[node] = f"{arguments[0]}[{node.args[1]}]"
        elif node.op == "call_function" and node.target is torch.ops.aten.detach.default:
            names[node] = arguments[0]
        elif node.op == "call_function":
            names[node] = f"x{len(lines)}"
            lines.append(f"{names[node]} = {node.target}({', '.join(arguments)})")
    (output,) = module.graph.find_nodes(op="output")
    first = next(x for x in output.args[0] if x is not None)  # no gradient of the data
    return "\n".join([*lines, f"return {names[first]}"])


@on_ranks(2, timeout=300)
def test_inductor_equals_eager() -> None:
    module, x, results = ThreeAttentions(), torch.randn(2, 6, 32, requires_grad=True), []
    cu_seqlens = torch.tensor([0, 4, 9], dtype=torch.int32)
    for attend in (module, torch.compile(module, fullgraph=True)):
        out = attend(x, cu_seqlens)
        grads = torch.autograd.grad(out.square().sum(), [x, *module.parameters()])
        results.append([out, *grads])
    errors = [relative_error(*pair) for pair in zip(*results, strict=True)]
    assert largest(errors) < 1e-5, errors


def relative_error(eager: Tensor, compiled: Tensor) -> float:
    """Relative to the largest entry."""
    return ((eager - compiled).abs().max() / eager.abs().max()).item()


@on_ranks(2)
def test_five_batches_of_documents_compile_once() -> None:
    """Whatever their boundaries, and the runs that balance them."""
    counter = CompileCounterWithBackend("aot_eager")
    module, layouts, errors = ThreeAttentions(), set(), []
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for end in (6, 10, 13, 22, 32):
        x = torch.randn(2, 16, 32, requires_grad=True)
        layout = Balanced(CAUSAL, 32, 2, (0, end, 32), block=2)
        layouts.add(tuple(layout.positions(0, 2, 32)))
        data = torch.tensor([0, end, 32]), sequence_runs(layout)
        outputs = module(x, *data), compiled(x, *data)
        grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in outputs]
        errors += [relative_error(*outputs), relative_error(*grads)]
    assert (counter.frame_count, len(layouts)) == (1, 5)
    assert largest(errors) < 1e-6, errors


MASKS = {
    "prefix": Slices.prefix([[0, 10, 16], [0, 16, 16]], [[4, 2], [7, 0]]),
    "image": Slices.blocks([0, 16], [3, 9], [7, 12], Mask.sliding(4)),
    "diffusion": Slices.block_diffusion([3, 5]),
    "sinks": Slices.global_tokens([0, 16], 2, 3),
    "answers": Slices.shared_prefix(6, [4, 6]),
    "continued": Slices.bottom_right([0, 5], [0, 16]),
}


@on_ranks(2)
def test_slices_of_one_shape_compile_once() -> None:
    """And are right, in eager mode as they are."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ring_attention, backend=counter, fullgraph=True)
    torch.manual_seed(0)
    mesh, whole = init_device_mesh("cpu", (2,)), torch.randn(4, 2, 2, 16, 8)
    inputs = [shard_sequence(x, mesh, 2, "zigzag").requires_grad_() for x in whole[:3]]
    grad_out, errors = shard_sequence(whole[3], mesh, 2), []
    for slices in MASKS.values():
        seen = np.stack([shown(table, (16, 16)) > 0 for table in slices])
        dense = dense_attention(*whole[:3], FULL, seen=torch.tensor(seen).expand(2, -1, -1))
        expected = dense.out, *dense.backward(whole[3])
        rows = slices if len(slices) > 1 else Slices.batched([slices, slices])
        for attend, given in ((ring_attention, slices), (compiled, sequence_slices(rows, 8))):
            out = attend(*inputs, slices=given)
            found = out, *torch.autograd.grad(out, inputs, grad_out)
            pairs = zip(expected, found, strict=True)
            errors += [relative_error(x, unshard_sequence(y, 2)) for x, y in pairs]
    assert counter.frame_count == 1
    assert largest(errors) < 1e-5, errors


@on_ranks(1)
def test_slices_that_are_no_tensor_do_not_compile() -> None:
    x = shard_sequence(torch.randn(1, 2, 16, 8), init_device_mesh("cpu", (1,)), 2)
    compiled = torch.compile(ring_attention, backend="eager", fullgraph=True)
    reported = (
        r"slices must be a tensor in a compiled function, .*by sequence_slices\(slices, num_slices"
    )
    with pytest.raises(torch._dynamo.exc.Unsupported, match=reported):
        compiled(x, x, x, slices=BLOCK)


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
@on_ranks(2)
def test_compiled_autograd(strategy: str) -> None:
    """It takes a graph of our ops. It would trace messages of what ran eagerly, and is refused."""
    case = Whole(strategy)
    inputs = [x.requires_grad_() for x in (case.query, case.key, case.value)]
    compiled = torch.compile(case.loss, backend="aot_eager")
    for attend, refused in ((case.loss, True), (compiled, False)):
        loss = attend(*inputs, case.weight)
        if refused:
            for result in (loss, sum_over_sequence(case.query, case.mesh).sum()):
                with pytest.raises(NotImplementedError, match=r"eagerly .* torch\.compile"):
                    backward(result)
            loss.backward()  # nothing was sent
        else:
            backward(loss)
        close([x.grad for x in inputs], case.dense()[1])
        for x in inputs:
            x.grad = None


def backward(loss: Tensor) -> None:
    """By compiled autograd."""
    with compiled_autograd._enable(partial(torch.compile, backend="eager")):
        loss.backward()


# What `torch.compile(mode="reduce-overhead")` makes CUDA graphs of, on tensors without content.

needs_fake_cuda = pytest.mark.skipif(
    torch.version.cuda is None, reason="builds for CPUs make no fake CUDA tensors"
)

OPS = ["ring_attention", "ring_attention_backward"]


@needs_fake_cuda
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


@needs_fake_cuda
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


@needs_fake_cuda
@pytest.mark.parametrize("name", UNFIT)
def test_what_no_graph_can_have_is_found(name: str) -> None:
    run, expected = UNFIT[name]
    with FakeTensorMode(shape_env=ShapeEnv()):
        x = torch.empty(4, device="cuda")
    found = not_replayed(make_fx(run, tracing_mode="fake")(x))
    assert found[: len(expected)] == expected
