"""ContextParallel makes the attention modules of a plan ring, on local tensors in and out."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from dtensor_ring import Balanced, ContextParallel, Mask, RingError, ring_attention, sequence_layout
from dtensor_ring.dtensor.style import _positions
from dtensor_ring.ops.checks import CALLER
from dtensor_ring.ops.ring_op import ring_backward_op, ring_op
from dtensor_ring.planning.run_table import as_layout
from tests.dense import dense_attention
from tests.meshes import random_inputs
from tests.pool import Pool, on_ranks

NUM_LAYERS, WIDTH, HEADS, SEQ_LEN = 2, 16, 2, 12


class Attention(nn.Module):
    """What ContextParallel asks for, and more: an argument and an output that stay as they are."""

    def forward(
        self, query: Any, key: Any, value: Any, bias: Any = 0.0, *, name: str = ""
    ) -> tuple[Any, str]:
        assert isinstance(query, DTensor) == isinstance(value, DTensor)
        assert not isinstance(bias, DTensor)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True), name


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        out, _ = self.attention(query, key, value=value, name="layer")
        return x + out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def ring_model(layout: str, seq_len: int | None = None) -> tuple[nn.Module, Model, list[int]]:
    """A model that rings, one that does not, and the tokens of this rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    ringing, whole = Model(), Model()
    whole.load_state_dict(ringing.state_dict())
    plan = {"layers.*.attention": ContextParallel(layout, seq_len=seq_len)}
    parallelize_module(ringing, mesh, plan)
    assert sequence_layout(mesh) == as_layout(layout)
    mine = as_layout(layout).positions(dist.get_rank(), mesh.size(), seq_len or SEQ_LEN)
    return ringing, whole, mine


MODELS: list[Any] = [
    *product((1, 2, 3), ("contiguous", "striped", "zigzag"), (None,), (None,)),
    *product((2,), ("contiguous", "zigzag"), (None,), (63,)),
    *product((3,), ("contiguous", "zigzag"), (None,), (64, 2)),
    *product((2,), ("zigzag",), ("aot_eager",), (None, 63)),
    pytest.param(2, "zigzag", "inductor", None, marks=pytest.mark.repeats),
]
"""Ranks, layouts, compilers, and lengths that the ranks do not divide."""


@pytest.mark.parametrize(("world_size", "layout", "backend", "seq_len"), MODELS)
@on_ranks()
def test_model(layout: str, backend: str | None, seq_len: int | None) -> None:
    ringing, whole, mine = ring_model(layout, seq_len)
    x, grad = torch.randn(2, 2, seq_len or SEQ_LEN, WIDTH)
    expected = whole(x)
    expected.backward(grad)
    model: Any = ringing
    if backend is not None:
        model = torch.compile(ringing, backend=backend, fullgraph=True)
    out = model(x[:, mine])
    out.backward(grad[:, mine])
    assert type(out) is Tensor
    torch.testing.assert_close(out, expected[:, mine], atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(ringing.parameters(), whole.parameters(), strict=True):
        assert type(ours.grad) is Tensor
        dist.all_reduce(ours.grad)
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-4, rtol=1e-4)


@on_ranks(2)
def test_lengths_that_nobody_told() -> None:
    """The error says how to tell them; a told one that no shard has is refused by each rank."""
    mesh = init_device_mesh("cpu", (2,))
    for seq_len, error, message in (
        (64, ValueError, "holds 3[12] tokens, but its shard of seq_len 64 has 32"),
        (None, RingError, r"tokens of keys: .*ContextParallel\(\.\.\., seq_len=\.\.\.\)"),
    ):
        module = parallelize_module(Attention(), mesh, ContextParallel("zigzag", seq_len=seq_len))
        inputs = torch.randn(3, 1, 2, 31 if seq_len else 32 - dist.get_rank(), 4)
        with pytest.raises(error, match=message) as caught:
            module(*inputs)
        assert not hasattr(caught.value, "__notes__")  # each says what to write
    for wrong in (0, 1.5):
        with pytest.raises((TypeError, ValueError), match="seq_len"):
            ContextParallel(seq_len=wrong)  # pyrefly: ignore[bad-argument-type]


class Mixes(nn.Module):
    """Does something with the result of attention."""

    def __init__(self, then: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.then = then

    def forward(self, query: Any, key: Any, value: Any) -> Any:
        return [self.then(ring_attention(query, key, value), value)]


@on_ranks(2)
def test_whole_results() -> None:
    """One that has all tokens on each rank is refused, also compiled; parts of tokens are not."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    inputs = torch.randn(3, 1, 2, 6, 4)
    whole = Mixes(lambda out, _: out.redistribute(placements=[Replicate()]))
    mean = Mixes(lambda out, x: out + x.mean(2, keepdim=True))
    for module in (whole, mean):
        parallelize_module(module, mesh["cp"], ContextParallel())
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        message = r"Mixes got shards of 12 tokens and returned all of them, \(1, 2, 12, 4\)"
        if module is mean:
            assert mean(*inputs)[0].shape == (1, 2, 6, 4)
            torch.testing.assert_close(compiled(*inputs), mean(*inputs))
            continue
        for called in (whole, compiled):
            with pytest.raises(Exception, match=message):
                called(*inputs)


@on_ranks(2)
def test_one_node_per_attention() -> None:
    ringing, _, mine = ring_model("zigzag")
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    x = torch.randn(2, len(mine), WIDTH, requires_grad=True)
    torch.compile(ringing, fullgraph=True, backend=backend)(x).sum().backward()
    forward, backward = graphs
    for graph, op in ((forward, ring_op), (backward, ring_backward_op)):
        targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        assert targets.count(str(op)) == NUM_LAYERS
        others = {target for target in targets if target != str(op)}
        assert not [target for target in others if "attention" in target or "c10d" in target]


@on_ranks(2)
def test_batch_sizes_recompile_twice_at_most() -> None:
    ringing, _, mine = ring_model("zigzag")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ringing, fullgraph=True, backend=counter)
    for batch in (2, 3, 5, 4, 7):
        x = torch.randn(batch, len(mine), WIDTH, requires_grad=True)
        compiled(x).sum().backward()
    assert 1 <= counter.frame_count <= 3
    counter = CompileCounterWithBackend("aot_eager")
    for layer in ring_model("zigzag")[0].layers:
        layer.compile(fullgraph=True, backend=counter)
        layer(x.detach())
    assert counter.frame_count == 1, "names of layers are in no graph"


class Capture(nn.Module):
    """Keeps what it was called with."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.args, self.kwargs = args, kwargs
        return {"out": args[:1], "more": [*kwargs.values(), None]}


# How a module with these input names is called, and which of what it gets are DTensors.
CALLS: dict[str, tuple[tuple[str, ...], str, list[str], str, str]] = {
    "by position": (("query", "key", "value"), "xxx", [], "ddd", ""),
    "more by position": (("query", "key", "value"), "xxxx5", [], "dddx5", ""),
    "by name": (("query", "key", "value"), "", ["key", "query", "mask", "value"], "", "ddxd"),
    "both": (("query", "key", "value"), "xx", ["value", "mask"], "dd", "dx"),
    "own names": (("q", "kv"), "x", ["kv", "key"], "d", "dx"),
    "absent and None": (("query", "key", "value"), "xx", [], "dd", ""),
    "none of them a tensor": (("query", "key", "value"), "5x5", [], "5d5", ""),
}


@pytest.mark.parametrize("name", CALLS)
@on_ranks(2)
def test_calls(name: str) -> None:
    inputs, positional, names, placed, placed_names = CALLS[name]
    mesh = init_device_mesh("cpu", (2,))
    style = ContextParallel("striped", inputs=inputs)
    module = parallelize_module(Capture(), mesh, style)
    x = torch.randn(1, 2, 3, 4)
    output = module(*(x if kind == "x" else 5 for kind in positional), **dict.fromkeys(names, x))
    assert "".join(map(_kind, module.args)) == placed
    assert list(module.kwargs) == names
    assert "".join(map(_kind, module.kwargs.values())) == placed_names
    for given in (*module.args, *module.kwargs.values()):
        if isinstance(given, DTensor):
            assert given.shape == (1, 2, 6, 4)
            assert torch.equal(given.to_local(), x)
    leaves = [leaf for leaf in (*output["out"], *output["more"]) if isinstance(leaf, Tensor)]
    assert all(type(leaf) is Tensor and torch.equal(leaf, x) for leaf in leaves)
    assert output["more"][-1] is None


# The forward of a module that takes query, key and value, and where it takes them by position.
SIGNATURES: list[tuple[Any, set[int]]] = [
    (lambda query, key, value: None, {0, 1, 2}),
    (lambda x, value, *, query, key: None, {1}),
    (lambda x, query, **more: None, {1}),
    (lambda *args, **more: None, {0, 1, 2}),
    (lambda q, *kv: None, {0, 1, 2}),
    (lambda x, query, *more: None, {1, 2, 3}),
    (lambda hidden, mask, positions, **more: None, set()),
]


@pytest.mark.parametrize(("forward", "expected"), SIGNATURES)
def test_positions(forward: Any, expected: set[int]) -> None:
    positions = _positions(signature(forward).parameters.values(), ("query", "key", "value"))
    assert set(positions) == expected


def _kind(x: Any) -> str:
    return "d" if isinstance(x, DTensor) else "x" if isinstance(x, Tensor) else str(x)


class Unnamed(nn.Module):
    def forward(self, q: Any, k: Any, v: Any, **more: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v)


class Windowed(nn.Module):
    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return ring_attention(q, k, v, mask=Mask.sliding(2), return_lse=True)


@on_ranks(3)
def test_ring_attention_inside() -> None:
    mesh = init_device_mesh("cpu", (3,))
    style = ContextParallel("zigzag", inputs=("q", "k", "v"))
    module = parallelize_module(Windowed(), mesh, {"": style})
    *whole, _ = random_inputs(seq_len=SEQ_LEN)
    mine = as_layout("zigzag").positions(dist.get_rank(), 3, SEQ_LEN)
    dense = dense_attention(*whole, Mask.sliding(2))
    out, lse = module(*(x[:, :, mine].contiguous() for x in whole))
    for actual, expected in ((out, dense.out), (lse, dense.lse)):
        assert type(actual) is Tensor
        torch.testing.assert_close(actual.double(), expected[:, :, mine], atol=1e-5, rtol=1e-5)


def test_refusals(pool: Pool) -> None:
    with pytest.raises(ValueError, match="unknown layout 'spiral'; known layouts: contiguous"):
        ContextParallel("spiral")
    for wrong in (3, None, "query", ("query", 3), ()):
        with pytest.raises(
            TypeError, match=r"inputs must be names of arguments, such as \('query'"
        ):
            ContextParallel(inputs=wrong)  # pyrefly: ignore[bad-argument-type]
    for name, error in (("kernel", ValueError), ("strategy", ValueError), ("policy", TypeError)):
        with pytest.raises(error, match=name):
            ContextParallel(**{name: "fast"})  # pyrefly: ignore[bad-argument-type]
    for layout in ("balanced", Balanced(Mask.causal(), 16, 2)):
        assert ContextParallel(layout).layout.per_batch
    pool.run(4, _check_refusals)


def _check_refusals() -> None:
    mesh: DeviceMesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    parallelize_module(Attention(), mesh["cp"], ContextParallel())
    assert sequence_layout(mesh["cp"]).name == "zigzag"
    unnamed = parallelize_module(Unnamed(), mesh["cp"], ContextParallel())
    with pytest.raises(ValueError, match=r"Unnamed was called without any of \['query', "):
        unnamed(*torch.zeros(3, 1, 2, 4, 8))
    other = DTensor.from_local(torch.zeros(1, 2, 4, 8), mesh["dp"], [Shard(1)], run_check=False)
    flat = parallelize_module(Attention(), mesh["cp"], ContextParallel())
    with pytest.raises(ValueError, match=r"must be Shard\(2\) .*, got \(Shard\(dim=1\),\) on"):
        flat(other, other, other)
    with pytest.raises(ValueError, match=r"\(B, N, L, H\), got shape \(2, 4, 8\)"):
        flat(*torch.zeros(3, 2, 4, 8))
    with pytest.raises(ValueError, match="runs over one axis"):
        parallelize_module(Attention(), mesh, ContextParallel())
    with pytest.raises(ValueError, match=r"forward takes \[.*'query', .*inputs=\("):
        parallelize_module(Attention(), mesh["cp"], ContextParallel(inputs=("q", "k", "v")))
    for wrong in (None, [torch.zeros(1, 2, 4, 8)]):
        with pytest.raises(TypeError, match=r"key must be a tensor or a DTensor, .* got "):
            flat(torch.zeros(1, 2, 4, 8), wrong, torch.zeros(1, 2, 4, 8))


@on_ranks(1)
def test_the_name_of_a_layer_that_fails_is_forgotten() -> None:
    """Or ranks would compare it in the next call of the thread, whatever that is."""
    mesh = init_device_mesh("cpu", (1,))
    module = parallelize_module(Attention(), mesh, ContextParallel())
    inputs = [torch.randn(1, 2, 4, 4) for _ in range(3)]
    with pytest.raises(ValueError, match="must have one head dim"):
        module(inputs[0], *(x[:, :, :, :3] for x in inputs[1:]))
    assert not CALLER.layer
