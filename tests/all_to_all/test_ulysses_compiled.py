"""Compiled attention that exchanges tokens for heads."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dtensor_ring import (
    Balanced,
    Mask,
    RingError,
    SequenceAxis,
    TransferPolicy,
    ring_attention,
    sequence_runs,
    shard_sequence,
)
from dtensor_ring.planning.run_table import RunTable
from tests.dense import dense_attention
from tests.graphs import capturing
from tests.pool import Pool, on_ranks
from tests.rings import runs_of


@on_ranks(2)
def test_one_node_for_each_exchange_and_five_batches_compile_once() -> None:
    """Local shards, and DTensors, whose layouts belong to a batch or do not."""
    graphs: list[list[str]] = []

    backend, errors = capturing(graphs), []
    compiled = torch.compile(ring_attention, backend=backend, fullgraph=True)
    mesh = init_device_mesh("cpu", (2,))
    SequenceAxis(mesh, "balanced", strategy="ulysses")
    for end in (6, 10, 13, 22, 32):
        inputs = [torch.randn(2, heads, 16, 4, requires_grad=True) for heads in (4, 2, 2)]
        layout = Balanced(Mask.causal(), 32, 2, (0, end, 32), block=2)
        data = {"runs": sequence_runs(layout), "cu_seqlens": torch.tensor([0, end, 32])}
        outs = [attend(*inputs, mesh=mesh, **data) for attend in (ring_attention, compiled)]
        grads = [torch.autograd.grad(out.square().sum(), inputs) for out in outs]
        pairs = zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True)
        errors += [(x - y).abs().max().item() for x, y in pairs]
    layout = Balanced(Mask.causal(), 32, 2, block=2)
    runs = sequence_runs(layout)
    inputs = [
        shard_sequence(torch.randn(2, heads, 32, 4), mesh, 2, layout).requires_grad_()
        for heads in (4, 2, 2)
    ]
    outs = [attend(*inputs, runs=runs) for attend in (ring_attention, compiled)]
    grads = [torch.autograd.grad(out.to_local().square().sum(), inputs) for out in outs]
    pairs = zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True)
    errors += [(x - y).to_local().abs().max().item() for x, y in pairs]
    forward, backward = (["exchange", f"ring_attention{x}", "exchange"] for x in ("", "_backward"))
    assert graphs == [forward, backward] * 2
    assert max(errors) < 1e-5


@pytest.mark.parametrize(
    ("size", "strategy", "on_mesh"), [(2, "ulysses", False), (4, "ulysses:2", True)]
)
def test_eight_bits_are_as_many_nodes(pool: Pool, size: int, strategy: str, on_mesh: bool) -> None:
    """What is rounded is within the nodes; compiled results are those of eager ones, to the bit."""
    forward, backward = (["exchange", f"ring_attention{x}", "exchange"] for x in ("", "_backward"))
    for graphs, are_equal in pool.run(size, _compiled_in_eight_bits, strategy, on_mesh):
        assert graphs == [forward, backward]
        assert are_equal


def _compiled_in_eight_bits(strategy: str, on_mesh: bool) -> tuple[list[list[str]], bool]:
    """Our ops in each graph, of shards or of DTensors, and whether results are the eager ones."""
    graphs: list[list[str]] = []
    compiled = torch.compile(ring_attention, backend=capturing(graphs), fullgraph=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = TransferPolicy(kv_dtype="int8")
    axis = SequenceAxis(mesh, "zigzag", strategy=strategy, policy=policy)
    torch.manual_seed(0)
    whole = [torch.randn(2, heads, 32, 4) for heads in (4, 2, 2)]
    mine, results = axis.positions(32), []
    shards = [axis.shard(x, 2) if on_mesh else x[:, :, mine].contiguous() for x in whole]
    inputs = [x.detach().requires_grad_() for x in shards]
    for attend in (ring_attention, compiled):
        out = attend(*inputs) if on_mesh else attend(*inputs, mesh=mesh)
        loss = (out.to_local() if on_mesh else out).square().sum()
        found = (out, *torch.autograd.grad(loss, inputs))
        results.append([x.to_local() if on_mesh else x for x in found])
    return graphs, all(torch.equal(x, y) for x, y in zip(*results, strict=True))


UNEQUAL = RunTable([[(0, 6)], [(6, 3)], [(9, 1)], [(10, 6)]])
RUNS = {
    "eager": (UNEQUAL, False, None),
    "equal groups": (RunTable([[(0, 7)], [(7, 1)], [(8, 1)], [(9, 7)]]), True, None),
    # Ranks 2 and 3 have 7, and are told of the first group, too.
    "compiled": (UNEQUAL, True, r"runs give ranks \[0, 1\] 9 tokens together, but in compiled"),
}
"""Shards of a batch: runs, whether it is compiled, and why it cannot be."""


def test_compiled_code_has_groups_of_equal_lengths(pool: Pool) -> None:
    """A compiler cannot look at runs; where they are others than it was told, all ranks say so."""
    for name, (table, is_compiled, why_not) in RUNS.items():
        for reported, error in pool.run(4, _with_runs, table, is_compiled):
            assert (reported is None) == (why_not is None), (name, reported)
            assert reported is None or re.search(why_not or "", reported), (name, reported)
            assert error < 1e-5, name


def _with_runs(table: RunTable, is_compiled: bool) -> tuple[str | None, float]:
    """What this rank is told, and how far output and gradients are from dense ones."""
    mesh = init_device_mesh("cpu", (4,))
    SequenceAxis(mesh, "balanced", strategy="ulysses:2")
    torch.manual_seed(0)
    whole, grad = [torch.randn(1, 4, 16, 4) for _ in range(3)], torch.randn(1, 4, 16, 4)
    positions = torch.tensor(table.positions(dist.get_rank(), 4, 16))

    def sharded(x: Tensor) -> DTensor:
        local = x[:, :, positions].contiguous()
        how = {"run_check": False, "shape": x.shape, "stride": x.stride()}
        return DTensor.from_local(local, mesh, [Shard(2)], **how)

    attend: Any = ring_attention
    if is_compiled:
        attend = torch.compile(ring_attention, backend="aot_eager", fullgraph=True)
    inputs = [sharded(x).requires_grad_() for x in whole]
    try:
        out = attend(*inputs, runs=runs_of(table))
        grads = torch.autograd.grad(out, inputs, sharded(grad))
    except (ValueError, RingError) as error:
        return str(error), 0.0
    dense = dense_attention(*whole, Mask.causal())
    pairs = zip((out, *grads), (dense.out, *dense.backward(grad)), strict=True)
    return None, max((x.to_local() - y[:, :, positions]).abs().max().item() for x, y in pairs)
