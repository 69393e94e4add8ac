"""Attention for which tokens are exchanged for heads, and what is sent and kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch
from weakref import ref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from dtensor_ring import (
    Balanced,
    BlockCyclic,
    ContextParallel,
    Contiguous,
    Mask,
    SequenceAxis,
    Slices,
    Striped,
    TransferPolicy,
    ZigZag,
    compare_strategies,
    ring_attention,
    shard_sequence,
    unshard_sequence,
)
from dtensor_ring.all_to_all import ulysses as ulysses_module
from dtensor_ring.all_to_all.ulysses import RingTensors, ulysses_attention, ulysses_backward
from dtensor_ring.planning.run_table import RunTable
from tests.dense import dense_attention, largest
from tests.lab.counted import counted
from tests.ops.test_op import errors
from tests.played_group import PlayedGroup, play_group
from tests.pool import Pool, on_ranks
from tests.rings import Case, Ring, local

CAUSAL, FULL, WINDOW = Mask.causal(), Mask.full(), Mask.sliding(5)
DOCUMENTS = ((0, 5, 6, 20, 24),)
BY_ROW = ((0, 7, 24, 24), (0, 3, 9, 20))
EIGHT = tuple(0.25 * i - 1 for i in range(8))
SLICES = Slices.prefix([[0, 10, 24], [0, 24, 24]], [[4, 2], [7, 0]])


def case(ring: Ring, strategy: str, **options: Any) -> Case:
    options = {"heads": (8, 4), "head_dims": (4, 4), "grad_lse": True} | options
    return Case(replace(ring, strategy=strategy), **options)


SEEN = {
    "causal": (CAUSAL, None, (ZigZag(), Striped(), Contiguous(), BlockCyclic(2))),
    "window": (WINDOW, DOCUMENTS, (ZigZag(), Striped())),
    "full": (FULL, BY_ROW, (ZigZag(), Contiguous())),
}
STRATEGIES = [(2, "ulysses"), (4, "ulysses:2"), (3, "ulysses"), (6, "ulysses:3+all_gather")]
STRATEGIES += [(8, "ulysses:4+direct")]
"""Each layout and mask has two of them, in turn."""
CASES = {
    **{
        f"{layout.spec}, {name}, {strategy} of {size}": case(
            Ring(layout, size, 24, SEEN[name][0], SEEN[name][1]), strategy
        )
        for i, (name, layout) in enumerate((x, y) for x in SEEN for y in SEEN[x][2])
        for size, strategy in (STRATEGIES[2 * i % 5], STRATEGIES[(2 * i + 1) % 5])
    },
    "uneven heads": case(
        Ring(ZigZag(), 4, 24, CAUSAL, BY_ROW), "ulysses", heads=(14, 7), sinks=(0.5, -1.0) * 7
    ),
    "28 heads on 8": case(Ring(ZigZag(), 8, 32, CAUSAL), "ulysses", heads=(28, 4)),
    "multi-query": case(Ring(ZigZag(), 6, 24, CAUSAL), "ulysses", heads=(6, 1), sinks=EIGHT[:6]),
    "multi-head": case(Ring(ZigZag(), 4, 24, CAUSAL), "ulysses:2", heads=(5, 5)),
    "sinks": case(Ring(ZigZag(), 4, 24, WINDOW, DOCUMENTS), "ulysses:2", sinks=EIGHT),
    "sinks, copies": case(Ring(ZigZag(), 8, 32, CAUSAL), "ulysses", sinks=EIGHT),
    "softcap": case(Ring(ZigZag(), 4, 24, CAUSAL), "ulysses", softcap=1.5, kernel="reference"),
    "head dims": case(Ring(ZigZag(), 4, 24, CAUSAL), "ulysses:2", head_dims=(6, 3)),
    "out only": case(Ring(ZigZag(), 4, 24, CAUSAL), "ulysses", grad_lse=False),
    "slices": case(Ring(ZigZag(), 4, 24, FULL, slices=SLICES), "ulysses:2"),
    "prefix": case(Ring(Striped(), 4, 24, Mask(3, 0, prefix=2), BY_ROW), "ulysses"),
    "chunks": case(Ring(ZigZag(), 4, 24, Mask.chunked(7)), "ulysses:2"),
    "balanced": case(
        Ring(Balanced(CAUSAL, 24, 4, DOCUMENTS, block=2), 4, 24, CAUSAL, DOCUMENTS), "ulysses:2"
    ),
    "uneven tokens": case(Ring(ZigZag(), 4, 19, CAUSAL), "ulysses:2"),
    "empty ranks": case(Ring(Contiguous(), 4, 5, FULL), "ulysses"),
    "cross": case(Ring(ZigZag(), 4, 24, FULL, key_seq_len=13), "ulysses:2"),
    "a turn": case(
        Ring(
            *(RunTable([[(20, 2)], [], [(23, 1)], [(22, 1)]]), 4, 24, CAUSAL),
            key_layout=RunTable([[(0, 9), (20, 1)], [(9, 11)], [(21, 3)], []]),
            begin=20,
        ),
        "ulysses:2",
    ),
    **{
        f"eight bits, {strategy}": case(
            Ring(ZigZag(), 4, 24, CAUSAL), strategy, policy=TransferPolicy(kv_dtype="int8")
        )
        for strategy in ("ulysses", "ulysses:2")
    },
    "bfloat16": case(Ring(ZigZag(), 8, 32, CAUSAL), "ulysses", dtype=torch.bfloat16),
}


def run_case(case: Case, group: PlayedGroup) -> list[torch.Tensor]:
    """Results, and gradients by autograd, which are those of the backward that trades again."""
    # What a rank has before anything is exchanged.
    before = replace(case, ring=replace(case.ring, strategy="ring"))
    query, key, value, *sinks = inputs = before.shards(group.rank())
    given = [x[:, :, before.ring.positions(group.rank())] for x in case.grads()]
    call = case.call(*sinks or [None], group_name=group.group_name)
    results = ulysses_attention(query, key, value, call)
    grads = torch.autograd.grad(results[: len(given)], inputs, given)
    grad_out, grad_lse = (*given, None)[:2]
    for keep in (False, True):  # what was exchanged
        with torch.no_grad():
            out, lse = ulysses_attention(query, key, value, call, keep=keep)
            again = ulysses_backward(grad_out, grad_lse, query, key, value, out, lse, call)
        for one, other in zip(grads, again, strict=False):  # that of no sinks is empty
            assert torch.equal(one, other)
    return [x.detach() for x in (*results, *grads)]


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_as_dense(case: Case) -> None:
    expected = case.expected()  # before there are threads, each of which would compute it
    by_rank = play_group(case.ring.world_size, lambda group: run_case(case, group))
    tolerance = {torch.float64: 1e-11, torch.bfloat16: 4e-2}[case.dtype]
    ring = replace(case.ring, strategy="ring")
    if case.sinks:  # a rank has the gradient of its heads and the tokens of its group
        whole = torch.stack([found[-1] for found in by_rank]).sum(0)
        by_rank = [[*found[:-1], whole] for found in by_rank]
    for rank, found in enumerate(by_rank):
        of = [ring.positions(rank, of_keys=index in (3, 4)) for index in range(len(found))]
        wanted = [local(x, positions) for x, positions in zip(expected, of, strict=True)]
        assert largest(errors(found, wanted).values()) < tolerance, f"rank {rank}"


LATE = ((0, 3, 25),)
WRONG = {
    "after the end": (Ring(ZigZag(), 4, 24, CAUSAL, LATE), "cu_seqlens must start at 0, never"),
    "decreasing": (Ring(ZigZag(), 4, 24, CAUSAL, ((0, 9, 4, 24),)), "cu_seqlens must start at"),
    "of a row": (Ring(ZigZag(), 4, 24, CAUSAL, (*BY_ROW, (0, 24, 24, 24))), r"or \(2, D\+1\), got"),
    "of keys": (
        Ring(ZigZag(), 4, 24, FULL, ((0, 8, 24),), 13, ((0, 8, 14),)),
        "key_cu_seqlens must start at 0",
    ),
    "as many": (
        Ring(ZigZag(), 4, 24, FULL, ((0, 8, 24),), 13, ((0, 13),)),
        "as many boundaries in cu_seqlens as in key_cu_seqlens, got 3 and 2",
    ),
    "cross, causal": (Ring(ZigZag(), 4, 24, CAUSAL, key_seq_len=13), "it takes Mask.full"),
    "late slices": (
        Ring(ZigZag(), 4, 24, FULL, slices=Slices.documents([0, 25])),
        "slices must end at or before the sequence length 24",
    ),
    "slices twice": (
        Ring(
            ZigZag(), 4, 24, FULL, slices=Slices([(0, 9), (8, 24)], [(0, 5)] * 2, [(None, 0)] * 2)
        ),
        "slices must be disjoint",
    ),
    "slices and a mask": (
        Ring(ZigZag(), 4, 24, CAUSAL, slices=Slices.documents([0, 24])),
        "slices say all that is seen",
    ),
}


@pytest.mark.parametrize("strategy", ["ulysses", "ulysses:2"])
@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_before_anything_is_sent(name: str, strategy: str) -> None:
    ring, match = WRONG[name]
    wrong = case(ring, strategy, batch=2)

    def run(group: PlayedGroup) -> None:
        shards = replace(wrong, ring=replace(ring, strategy="ring")).shards(group.rank())
        with (
            patch.object(group.transport, "start", side_effect=AssertionError),
            pytest.raises(ValueError, match=match),
        ):
            ulysses_attention(*shards, wrong.call(group_name=group.group_name))

    play_group(4, run)


def test_autocast_is_before_the_exchange() -> None:
    """Query, key and value travel in its dtype."""
    half = case(Ring(ZigZag(), 2, 8, CAUSAL), "ulysses", dtype=torch.float32)

    def run(group: PlayedGroup) -> int:
        start, sent = group.transport.start, []
        with (
            patch.object(group.transport, "start", lambda *x: sent.extend(x[1]) or start(*x)),
            torch.autocast("cpu", torch.bfloat16),
        ):
            shards = replace(half, ring=replace(half.ring, strategy="ring")).shards(group.rank())
            call = half.call(group_name=group.group_name)
            out, _ = ulysses_attention(*shards, call, with_lse=False)
        assert out.dtype == torch.bfloat16
        return sum(message.flat.numel() for message in sent)

    # Half of the 8, 4 and 4 heads of 4 tokens, and of the 8 heads of the output.
    assert play_group(2, run) == [2 * 2 * 4 * 4 * (4 + 2 + 2 + 4)] * 2


# All ways to exchange tokens for heads, and what each of them sends and keeps.


@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks()
def test_all_ways_to_call_it() -> None:
    """Local shards, DTensors, SDPA on DTensors and a module: out, lse and gradients."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    SequenceAxis(mesh, "zigzag", strategy=f"ulysses:{max(2, size // 2)}")
    torch.manual_seed(0)
    whole = [torch.randn(2, heads, 16, 4) for heads in (8, 4, 4)]
    sinks, grad = torch.randn(8), torch.randn(2, 8, 16, 4)
    found: dict[str, float] = {}
    for way, (attend, sinks_of) in WAYS.items():
        dense = dense_attention(*whole, Mask.causal(), sinks=sinks if sinks_of else None)
        expected = [dense.out, dense.lse, *dense.backward(grad)]
        inputs = [shard_sequence(x, mesh, 2).requires_grad_() for x in whole]
        own_sinks = sinks_of(sinks, mesh).requires_grad_() if sinks_of else None
        out, *lse = attend(*inputs, own_sinks, mesh)
        used = [*inputs, *([own_sinks] if sinks_of else [])]
        grads = torch.autograd.grad(out, used, shard_sequence(grad, mesh, 2))
        results = [out, *(lse or [None]), *grads[:3]]
        pairs = [
            (unshard_sequence(x, 2), y)
            for x, y in zip(results, expected, strict=False)
            if x is not None
        ]
        if sinks_of:
            total = grads[3].full_tensor() if isinstance(grads[3], DTensor) else grads[3]
            if not isinstance(grads[3], DTensor):
                dist.all_reduce(total)
            pairs.append((total, expected[-1]))
        for number, (x, y) in enumerate(pairs):
            found[f"{way} {number}"] = (x - y).abs().max().item()
    assert largest(found.values()) < 1e-5, found


def _local_shards(query: Any, key: Any, value: Any, sinks: Any, mesh: DeviceMesh) -> list[Tensor]:
    shards = [x.to_local() for x in (query, key, value)]
    results = ring_attention(*shards, sinks=sinks, mesh=mesh, return_lse=True)
    return [DTensor.from_local(x, mesh, [Shard(2)]) for x in results]


def _dtensors(query: Any, key: Any, value: Any, sinks: Any, mesh: DeviceMesh) -> Any:
    return ring_attention(query, key, value, sinks=sinks, return_lse=True)


def _sdpa(query: Any, key: Any, value: Any, sinks: Any, mesh: DeviceMesh) -> list[Tensor]:
    return [F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)]


def _out_only(query: Any, key: Any, value: Any, sinks: Any, mesh: DeviceMesh) -> list[Tensor]:
    return [ring_attention(query, key, value, strategy="ulysses")]


def _offloaded(query: Any, key: Any, value: Any, sinks: Any, mesh: DeviceMesh) -> list[Tensor]:
    """What autograd saves is a copy, which holds nothing else."""
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        return _sdpa(query, key, value, sinks, mesh)


def _checkpointed(query: Any, key: Any, value: Any, sinks: Any, mesh: DeviceMesh) -> list[Tensor]:
    """What autograd saves is made again, exchanges included."""
    return checkpoint(_sdpa, query, key, value, sinks, mesh, use_reentrant=False)


def _as_the_axis_says(
    query: Any, key: Any, value: Any, sinks: Any, mesh: DeviceMesh
) -> list[Tensor]:
    return [ring_attention(query, key, value)]


class _Attention(nn.Module):
    def forward(self, query: Any, key: Any, value: Any) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _module(query: Any, key: Any, value: Any, sinks: Any, mesh: DeviceMesh) -> list[Tensor]:
    style = ContextParallel("zigzag", strategy="ulysses:2")
    attention = parallelize_module(_Attention(), mesh, style)
    out = attention(*(x.to_local() for x in (query, key, value)))
    return [DTensor.from_local(out, mesh, [Shard(2)])]


WAYS: dict[str, Any] = {
    "local shards": (_local_shards, lambda sinks, mesh: sinks.clone()),
    "dtensors": (_dtensors, lambda sinks, mesh: distribute_tensor(sinks, mesh, [Replicate()])),
    "sdpa": (_sdpa, None),
    "offloaded": (_offloaded, None),
    "checkpointed": (_checkpointed, None),
    "out only": (_out_only, None),
    "module": (_module, None),
}


SENDERS: dict[str, tuple[Any, bool]] = {
    "dtensors": (_as_the_axis_says, False),
    "with lse": (_dtensors, True),
    "sdpa": (_sdpa, True),
    "compiled dtensors": (_as_the_axis_says, True),
    "compiled sdpa": (_sdpa, True),
}
"""How to call it, and whether the ranks exchange lse, too."""


@pytest.mark.parametrize(
    ("strategy", "ways"),
    [("ulysses", list(SENDERS)), ("ulysses:2", [x for x in SENDERS if "compiled" not in x])],
)
def test_every_way_sends_what_is_said(pool: Pool, strategy: str, ways: list[str]) -> None:
    """To the byte, forward and backward: nothing is exchanged a second time for backward."""
    batch, (heads, key_heads), seq_len, dim = 2, (8, 4), 16, 4
    world_size = 2 if strategy == "ulysses" else 4
    said = compare_strategies(
        *(Mask.causal(), seq_len, world_size, (heads, key_heads), dim),
        batch=batch,
        dtype=torch.float32,
        strategies=[strategy],
    ).rows[0]
    shapes = [(batch, count, seq_len, dim) for count in (heads, key_heads, key_heads)]
    by_rank = pool.run(world_size, _sent, strategy, ways, shapes)
    for way in ways:
        # Of half of the heads, the tokens of the other rank of the group.
        of_lse = batch * heads // 2 * seq_len // world_size * 4 if SENDERS[way][1] else 0
        busiest = [max(x) for x in zip(*(found[way] for found in by_rank), strict=True)]
        assert busiest == [said.forward.sent + of_lse, said.backward.sent], way


@on_ranks(2)
def test_what_was_exchanged_lives_as_long_as_lse() -> None:
    """Not longer, with and without a backward; and only where there will be one."""
    mesh = init_device_mesh("cpu", (2,))
    SequenceAxis(mesh, "zigzag", strategy="ulysses")
    inputs = [shard_sequence(torch.randn(1, 2, 8, 4), mesh, 2) for _ in range(3)]
    made: list[ref[Tensor]] = []
    exchanged = ulysses_module.RingTensors

    def seen(*tensors: Tensor) -> RingTensors:
        made.extend(ref(x) for x in tensors if x is not None)
        return exchanged(*tensors)

    with patch.object(ulysses_module, "RingTensors", seen):
        for needs_grad, goes_back in ((False, False), (True, False), (True, True)):
            for x in inputs:
                x.requires_grad_(needs_grad)
            out = F.scaled_dot_product_attention(*inputs, is_causal=True)
            assert len(made) == 5
            assert all((x() is not None) == needs_grad for x in made)
            if goes_back:
                torch.autograd.grad(out, inputs, out.detach())
            del out
            assert all(x() is None for x in made)
            made.clear()


def _sent(strategy: str, ways: list[str], shapes: list[tuple[int, ...]]) -> dict[str, list[int]]:
    """By way, the bytes that this rank sends forward and backward."""
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), {}
    SequenceAxis(mesh, "zigzag", strategy=strategy)
    for way in ways:
        attend, _ = SENDERS[way]
        if way.startswith("compiled"):
            attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
        inputs = [shard_sequence(torch.randn(x), mesh, 2).requires_grad_() for x in shapes]
        (out, *_), forward = counted(lambda: attend(*inputs, None, mesh))  # noqa: B023
        _, back = counted(lambda: torch.autograd.grad(out, inputs, out.detach()))  # noqa: B023
        found[way] = [forward.sent, back.sent]
    return found


@on_ranks(4)
def test_too_few_heads_are_refused() -> None:
    """On all ranks, before anything is sent; heads that another axis shards do not count."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "cp"))
    SequenceAxis(mesh["cp"], "zigzag", strategy="ulysses")
    for num_heads, num_key_heads in ((0, 0), (4, 0), (4, 3)):
        query, key = torch.randn(1, num_heads, 4, 8), torch.randn(1, num_key_heads, 4, 8)
        with pytest.raises(ValueError, match=r"need heads|must be a multiple of the key heads"):
            ring_attention(query, key, key, mesh=mesh["cp"])
    match = "the strategy 'ulysses:2' cannot run this attention: 1 query heads cannot be sharded"
    x = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match=match):
        ring_attention(x, x, x, mesh=mesh["cp"])
    query = distribute_tensor(torch.randn(1, 2, 8, 8), mesh, [Shard(1), Shard(2)])
    for attend in (ring_attention, F.scaled_dot_product_attention):
        with pytest.raises(ValueError, match=match):
            attend(query, query, query)
