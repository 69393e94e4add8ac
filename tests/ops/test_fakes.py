"""What the registered ops promise: their schemas, and what fake kernels return."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dtensor_ring import Contiguous, Mask, Striped, ZigZag
from dtensor_ring.ops.options import flatten
from dtensor_ring.ops.ring_op import ring_backward_op, ring_op
from dtensor_ring.planning.run_table import RunTable
from dtensor_ring.transport.transport import TransferPolicy
from tests.ops.test_compile import BLOCK
from tests.pool import Pool, on_ranks
from tests.rings import Case, Ring, fake_group, local

CAUSAL, FULL = Mask.causal(), Mask.full()
SINKS = (0.5, -1.0, 2.0, 0.0)
CHECKED = {
    "plain": Case(Ring(ZigZag(), 1, 8, CAUSAL), torch.float32),
    "turn": Case(
        Ring(RunTable([[(5, 3)]]), 1, 8, CAUSAL, key_layout=RunTable([[(0, 8)]]), begin=5),
        torch.float32,
    ),
    "slices": Case(Ring(ZigZag(), 1, 8, FULL, slices=BLOCK), torch.float32),
    "cross": Case(Ring(ZigZag(), 1, 8, FULL, ((0, 3, 7),), 5, ((0, 2, 5),)), torch.float32),
    "sinks and lse": Case(
        Ring(Striped(), 1, 8, FULL), torch.float32, sinks=SINKS, softcap=2.0, grad_lse=True
    ),
    "eight bits": Case(
        Ring(ZigZag(), 1, 8, CAUSAL), torch.float32, policy=TransferPolicy(kv_dtype="int8")
    ),
    # Nothing arrives from a fake group: documents that stay on their rank need nothing.
    "fake group": Case(Ring(Contiguous(), 4, 16, CAUSAL, ((0, 4, 8, 12, 16),)), torch.float32),
}


@pytest.mark.parametrize("case", CHECKED.values(), ids=list(CHECKED))
@on_ranks(1)
def test_opcheck(case: Case) -> None:
    rank = case.ring.world_size - 1
    group = fake_group(case.ring.world_size, rank) if rank else nullcontext()
    with group, warnings.catch_warnings():
        # opcheck looks at .grad of copies that are no leaves, whatever it is given.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        _opcheck_both(case, rank)


def _opcheck_both(case: Case, rank: int) -> None:
    query, key, value, *sinks = case.shards(rank)
    options = flatten(case.call(*sinks))
    torch.library.opcheck(ring_op, (query, key, value, *options))
    with torch.no_grad():
        tensors = query, key, value, *ring_op(query, key, value, *options)
    grads = [local(x, case.ring.positions(rank)) for x in case.grads()]
    grad_out, grad_lse = grads if case.grad_lse else (*grads, None)
    arguments = [x.detach() if isinstance(x, Tensor) else x for x in (*tensors, *options)]
    torch.library.opcheck(ring_backward_op, (grad_out, grad_lse, *arguments))


BASE = Case(Ring(ZigZag(), 2, 8, CAUSAL), torch.float32)
PROMISED = {
    "grouped": BASE,
    "reference": replace(BASE, kernel="reference"),
    "bfloat16": replace(BASE, dtype=torch.bfloat16),
    "eight bits": replace(BASE, policy=TransferPolicy(kv_dtype="fp8")),
    "float64, value head dim": replace(BASE, dtype=torch.float64, head_dims=(8, 4)),
    "sinks and lse": replace(BASE, sinks=SINKS, grad_lse=True),
    "one head, batch of one": replace(BASE, heads=(1, 1), batch=1),
    "one token": replace(BASE, ring=Ring(ZigZag(), 2, 2, CAUSAL)),
    "an empty shard": replace(BASE, ring=Ring(ZigZag(), 2, 1, CAUSAL)),
    "cross": replace(BASE, ring=Ring(ZigZag(), 2, 8, FULL, key_seq_len=5)),
    "one tile": replace(BASE, ring=Ring(Contiguous(), 2, 8, CAUSAL, ((0, 4, 8),))),
}


def test_fake_kernels_promise_what_the_real_ones_return(pool: Pool) -> None:
    for rank, found in enumerate(pool.run(2, _all_described)):
        for (name, contiguous), (promised, returned) in found.items():
            assert promised == returned, f"rank {rank}: {name}, contiguous: {contiguous}"


def _all_described() -> dict[tuple[str, bool], Any]:
    cases = product(PROMISED, (True, False))
    return {(x, contiguous): _described(PROMISED[x], contiguous) for x, contiguous in cases}


def _described(case: Case, contiguous: bool) -> tuple[list[Any], list[Any]]:
    """Dtype, sizes and strides of all results, of fake tensors and of real ones."""
    rank = dist.get_rank()
    query, key, value, *sinks = (
        x.detach().contiguous() if contiguous else x.detach() for x in case.shards(rank)
    )
    grad_out, *grad_lse = (local(x, case.ring.positions(rank)) for x in case.grads())
    grads, options = (grad_out, *(grad_lse or [None])), flatten(case.call(*sinks))
    described = []
    for mode in (FakeTensorMode(allow_non_fake_inputs=True), nullcontext()):
        with mode:
            outputs = ring_op(query, key, value, *options)
            arguments = *grads, query, key, value, *outputs, *options
            results = *outputs, *ring_backward_op(*arguments)
        described.append([description(x) for x in results])
    return described[0], described[1]


def description(x: Tensor) -> tuple[Any, ...]:
    """A dim of size 1 or an empty tensor may have any strides."""
    strides = [
        stride if size > 1 and x.numel() else "any"
        for size, stride in zip(x.shape, x.stride(), strict=True)
    ]
    return str(x.dtype), tuple(x.shape), tuple(strides)
