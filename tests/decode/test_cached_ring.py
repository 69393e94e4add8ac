"""Rings of an append step's queries over all that a cache holds, against dense attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtensor_ring import Mask, SequenceAxis, ShardedCache, Slices, ring_attention
from dtensor_ring.decode.plan import CacheTable
from dtensor_ring.planning.route import ROUTES
from dtensor_ring.planning.run_table import RunTable, as_layout
from tests.dense import dense_attention
from tests.drawn import documents_of, masks
from tests.meshes import random_inputs
from tests.played import play
from tests.pool import Pool, on_ranks
from tests.refusals import Refused, check_refused
from tests.rings import Case, Ring, local, runs_of
from tests.slices import slices
from tests.test_played import Played, of_rank

IN_FLOAT64 = Played("reference", "cpu", torch.float64)
LAYOUTS = ["zigzag", "contiguous", "block_cyclic:3"]


def turns_of(table: CacheTable, begin: int) -> tuple[RunTable, RunTable]:
    """Runs of the queries from there on, and of all keys."""
    return RunTable(table.numbers_from(begin)), RunTable(table.numbers, "key_runs")


def check(case: Case) -> None:
    """All ranks, forward and backward, against dense attention."""
    ring = case.ring
    results = play(
        ring.world_size, lambda rank, transport: of_rank(case, IN_FLOAT64, rank, transport)
    )
    for rank, of_this in enumerate(results):
        for what, actual, whole in zip(
            ("out", "lse", "dq", "dk", "dv"), of_this, case.expected(), strict=False
        ):
            expected = whole[:, :, ring.positions(rank, of_keys=what in ("dk", "dv"))]
            torch.testing.assert_close(actual, expected, atol=1e-11, rtol=1e-11)


@st.composite
def rings(draw: st.DrawFn, world_size: int, table: CacheTable, begin: int) -> Ring:
    """The attention of an append step, with any mask, documents or slices."""
    queries, keys = turns_of(table, begin)
    seq_len, strategy = table.seq_len, draw(st.sampled_from(list(ROUTES)))
    ring = Ring(queries, world_size, seq_len, Mask.full(), None, None, None, strategy, None, keys)
    ring = replace(ring, begin=begin)
    if draw(st.integers(0, 3)) == 0:
        num_rows = draw(st.sampled_from([1, 2]))
        return replace(ring, slices=draw(slices((seq_len, seq_len), num_rows)))
    documents = draw(st.none() | documents_of(seq_len, 2, 3))
    return replace(ring, mask=draw(masks()), documents=documents)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 5), st.sampled_from(LAYOUTS), st.sampled_from([1, 4]))
def test_append_steps_of_a_cache(
    data: st.DataObject, world_size: int, layout: str, block: int
) -> None:
    """Of any sizes, one after the other, with decoded tokens between them."""
    table = CacheTable.empty(world_size, block)
    for _ in range(data.draw(st.integers(1, 3))):
        begin = table.seq_len
        table = table.append_sharded(as_layout(layout), data.draw(st.integers(1, 24)))
        ring = data.draw(rings(world_size, table, begin))
        sinks = data.draw(st.sampled_from([(), (0.5, -1.0, 2.0, 0.0)]))
        check(Case(ring, sinks=sinks, softcap=data.draw(st.sampled_from([0.0, 1.5]))))
        table = table.append(data.draw(st.integers(0, 6)))


EMPTY = {
    "queries on one rank": ([[], [(6, 4)], []], [[(0, 4), (8, 2)], [(4, 4)], []]),
    "keys on one rank": ([[(6, 2)], [], [(8, 2)]], [[], [], [(0, 10)]]),
    "no rank has both": ([[(9, 1)], [], []], [[], [(0, 3), (5, 5)], [(3, 2)]]),
    "all queries": ([[(0, 1)], [(1, 8)], [(9, 1)]], [[(0, 9)], [], [(9, 1)]]),
    "keys from a window on": ([[(6, 2)], [(8, 2)], []], [[(3, 3)], [(8, 2)], [(6, 2)]]),
}


@pytest.mark.parametrize(("queries", "keys"), EMPTY.values(), ids=list(EMPTY))
def test_ranks_without_tokens(queries: Any, keys: Any) -> None:
    tables = RunTable(queries), RunTable(keys)
    begin, first = tables[0].begin, tables[1].begin
    # A window sees no position that nobody holds.
    mask = Mask.sliding(begin - first) if first else Mask.causal()
    check(Case(Ring(tables[0], 3, 10, mask, key_layout=tables[1], begin=begin)))


def test_prompts_in_chunks(pool: Pool) -> None:
    """Through the op, the cache and real messages; ranks agree by the record of the call."""
    for world_size in (1, 3):
        for error in pool.run(world_size, _prompt_in_chunks):
            assert error < 1e-5


def _prompt_in_chunks() -> float:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    axis, cache = SequenceAxis(mesh, "zigzag"), ShardedCache(mesh, 1, block=4)
    torch.manual_seed(0)  # the same on all ranks
    query, key, value, _ = random_inputs(seq_len=40)
    sinks, errors = torch.randn(4), []
    given: dict[str, Any] = {"mask": Mask.sliding(17), "cu_seqlens": torch.tensor([0, 9, 40])}
    expected = dense_attention(query, key, value, given["mask"], cu_seqlens=given["cu_seqlens"],
                               sinks=sinks).out  # fmt: skip
    for number, num_tokens in enumerate((16, 1, 3, 11, 9)):
        is_sharded = number != 2
        begin = cache.seq_len
        cache.begin(num_tokens, dealt=is_sharded)
        mine = torch.arange(begin, begin + num_tokens)
        if is_sharded:
            mine = cache.positions[cache.positions >= begin]
        keys, values = cache[0].append(key[:, :, mine], value[:, :, mine])
        given["cu_seqlens"] = torch.tensor([0, min(9, cache.seq_len), cache.seq_len])
        if is_sharded:
            runs = {"runs": cache.query_runs, "key_runs": cache.key_runs}
            one = axis.attention(query[:, :, mine], keys, values, sinks=sinks, **given, **runs)
            other = ring_attention(
                query[:, :, mine], keys, values, sinks=sinks, mesh=mesh, validate=True,
                **given, **runs,
            )  # fmt: skip
            assert torch.equal(one, other)
            errors.append((one - expected[:, :, mine]).abs().max().item() if one.numel() else 0.0)
    return max(errors)


RUNS = (
    ([[(6, 2)], [(8, 2)]], [[(0, 6)], [(6, 4)]]),
    ([[(6, 1), (9, 1)], [(7, 2)]], [[(0, 3), (7, 3)], [(3, 4)]]),
    ([[(8, 2)], [(6, 2)]], [[(4, 6)], [(0, 4)]]),
)
"""Of queries and of keys: other runs of the same lengths."""


@on_ranks(2)
def test_other_runs_do_not_compile_again() -> None:
    """And a cache that grows compiles once more."""
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    SequenceAxis(mesh, "striped")  # the layout of the axis has no say
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ring_attention, fullgraph=True, backend=counter)
    num_compiled, errors = [], []
    longer = [([[(n, 2)], [(n + 2, 2)]], [[(0, n)], [(n, 4)]]) for n in (9, 20)]
    for runs in (*RUNS, *longer):
        tables = [RunTable(rows) for rows in runs]
        seq_len, begin = tables[1].end, tables[0].begin
        ring = Ring(tables[0], 2, seq_len, Mask.causal(), key_layout=tables[1], begin=begin)
        case = Case(ring, torch.float32, scale=8**-0.5)
        given = [torch.nn.functional.pad(runs_of(x), (0, 0, 0, 4 - x.numbers.shape[1]))
                 for x in tables]  # fmt: skip
        shards = [x.contiguous().detach().requires_grad_() for x in case.shards(rank)]
        out = compiled(*shards, mesh=mesh, runs=given[0], key_runs=given[1])
        grads = torch.autograd.grad(out, shards, local(case.grads()[0], ring.positions(rank)))
        expected = case.expected()
        for found, whole, of_keys in zip(
            (out, *grads), (expected[0], *expected[2:]), (0, 0, 1, 1), strict=True
        ):
            part = whole[:, :, ring.positions(rank, bool(of_keys))]
            errors.append((found.detach() - part).abs().max().item())
        num_compiled.append(counter.frame_count)
    assert num_compiled[:3] == [1, 1, 1]
    assert num_compiled[-1] <= 2
    assert max(errors) < 1e-5


def _inputs(mesh: DeviceMesh, num_queries: int = 2) -> dict[str, Any]:
    """An append step of two tokens at position 6, on one rank that holds all."""
    query, key, value, _ = random_inputs(seq_len=num_queries, kv_heads=4, key_seq_len=8)
    return {
        "query": query,
        "key": key,
        "value": value,
        "mesh": mesh,
        "runs": torch.tensor([[[6, 2]]]),
        "key_runs": torch.tensor([[[0, 8]]]),
    }


REFUSALS: Refused = {
    ValueError: {
        "key_runs say .* of the queries.*got no runs": {"runs": None},
        "key_runs say which positions .*; got key_cu_seqlens, which are another's": {
            "key_cu_seqlens": torch.tensor([0, 8]),
            "mask": Mask.full(),
        },
        "key_runs must hold each position once, not so position 4": {
            "key_runs": torch.tensor([[[0, 5], [4, 4]]])
        },
        "the key_runs of a rank must be in ascending order": {
            "key_runs": torch.tensor([[[4, 4], [0, 4]]])
        },
        "key_runs must hold each position once, not so position 5$": {
            "key_runs": torch.tensor([[[0, 5], [6, 2]]])
        },
        "runs must hold each position once, not so position 5": {
            "runs": torch.tensor([[[4, 1], [6, 2]]])
        },
        "last tokens of the keys' sequence, but runs end at 7 and key_runs at 8": {
            "runs": torch.tensor([[[5, 2]]])
        },
        "rank 0 of 1 holds 2 tokens, but its shard of runs has 1": {
            "runs": torch.tensor([[[7, 1]]])
        },
        "rank 0 of 1 holds 8 tokens, but its shard of key_runs has 7": {
            "key_runs": torch.tensor([[[1, 7]]])
        },
        "these key_runs shard 8 tokens over 2 ranks, not 8 tokens over 1": {
            "key_runs": torch.tensor([[[0, 4]], [[4, 4]]])
        },
        r"key_runs must be from 0 to 2,147,483,647, got \[-1, 9\]": {
            "key_runs": torch.tensor([[[-1, 9]]])
        },
        r"key_runs must hold start and length of the runs of each rank, shape \(W, R, 2\), got": {
            "key_runs": torch.tensor([0, 8])
        },
        "key_runs must be int32 or int64": {"key_runs": torch.zeros(1, 1, 2)},
        "cu_seqlens must start at 0, never decrease and end at or before the sequence length 8": {
            "cu_seqlens": torch.tensor([0, 9])
        },
        "slices": {"slices": Slices([(0, 9)], [(0, 8)], [(None, None)])},
    },
    TypeError: {"key_runs must be a plain tensor, as Sharded": {"key_runs": [[[0, 8]]]}},
}


@on_ranks(1)
def test_refused() -> None:
    mesh = init_device_mesh("cpu", (1,))
    axis = SequenceAxis(mesh, "zigzag")
    check_refused(REFUSALS, lambda change: ring_attention(**_inputs(mesh) | change))
    assert ring_attention(**_inputs(mesh)).shape == (2, 4, 2, 8)
    arguments = _inputs(mesh)
    del arguments["mesh"]
    with pytest.raises(ValueError, match="seq_len is for local shards"):
        axis.attention(**arguments, seq_len=8)
    sharded = {name: axis.shard(arguments[name], 2) for name in ("query", "key", "value")}
    with pytest.raises(ValueError, match="key_runs are for local shards"):
        ring_attention(**arguments | sharded)
    assert axis.attention(**arguments).shape == arguments["query"].shape
