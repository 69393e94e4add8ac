"""Decode attention, whose ranks are threads of one process, and its tiles."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from dtensor_ring import (
    BlockCyclic,
    Contiguous,
    Mask,
    RingError,
    SequenceAxis,
    ShardedCache,
    Striped,
    TransferPolicy,
    ZigZag,
    decode_attention,
)
from dtensor_ring.compute.kernels import kernel_for
from dtensor_ring.decode.in_blocks import decode_in_blocks, decode_pieces
from dtensor_ring.decode.plan import DecodeRequest, decode_step
from dtensor_ring.decode.run import MERGES, Combine
from dtensor_ring.ops.options import kernel_facts
from dtensor_ring.planning.mask import as_documents
from dtensor_ring.planning.run_table import RunTable
from tests.decoding import TOLERANCES, Decode, Outputs, check
from tests.dense import dense_attention
from tests.drawn import TOLERANCES as DRAWN_TOLERANCES
from tests.drawn import bounds_of, different, documents_of, examples, masks
from tests.played import PlayedTransport, play
from tests.pool import Pool, on_ranks
from tests.slices import slices

CAUSAL = Mask.causal()
LONGEST = 80
WORLD_SIZES = range(1, 6)
LAYOUTS = [Contiguous(), Striped(), ZigZag(), BlockCyclic(3)]


@st.composite
def decode_masks(draw: st.DrawFn) -> Mask:
    bounds = st.none() | st.integers(0, LONGEST)
    left, right = draw(bounds), draw(st.sampled_from([0, 0, 0, None, 5]))
    cut = draw(st.sampled_from(["", "", "chunk", "prefix"]))
    return Mask(left, right, **({cut: draw(st.integers(1, 40))} if cut else {}))


@st.composite
def runs(draw: st.DrawFn, world_size: int, num_positions: int) -> tuple:
    """Blocks of positions, each of some rank or of none; so ranks may be empty."""
    ends = st.lists(st.integers(0, num_positions), max_size=8)
    bounds = [0, *sorted(draw(ends)), num_positions]
    owners = draw(st.lists(st.integers(-1, world_size - 1), min_size=9, max_size=9))
    held: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    for begin, end, owner in zip(bounds, bounds[1:], owners, strict=False):
        if owner >= 0:
            held[owner].append((begin, end - begin))
    return tuple(map(tuple, held))


@st.composite
def calls(draw: st.DrawFn, world_size: int) -> Decode:
    """Any call; one in four is over a layout, others over runs of any kind."""
    batch = draw(st.integers(1, 3))
    num_queries = draw(st.sampled_from([1, 1, 1, 2, 3, 7, 20, 64]))
    size = draw(st.integers(0, LONGEST))
    held = draw(runs(world_size, size))
    if not draw(st.integers(0, 3)):
        held, size = draw(st.sampled_from(LAYOUTS)), -(-size // world_size) * world_size
    num_starts = draw(st.sampled_from(sorted({1, batch})))
    starts = st.integers(0, max(0, size - num_queries)) | st.just(max(0, size - num_queries))
    starts = draw(st.lists(starts, min_size=num_starts, max_size=num_starts))
    seq_len = max(size, max(starts) + num_queries)
    heads = draw(st.sampled_from([(2, 2), (4, 2), (3, 1)]))
    head_dims = draw(st.sampled_from([(8, 8), (8, 8), (8, 4), (4, 12)]))
    softcap = draw(st.sampled_from([0.0, 0.0, 1.5]))
    special = softcap or len(set(head_dims)) > 1
    kind, num_rows = draw(st.integers(0, 3)), draw(st.sampled_from(sorted({1, batch})))
    seen: dict = {"mask": draw(decode_masks())}
    if kind == 1:
        rows = st.lists(bounds_of(seq_len, 4), min_size=num_rows, max_size=num_rows)
        seen["documents"] = tuple(draw(rows))
    elif kind == 2:
        seen = {"mask": Mask.full(), "slices": draw(slices((seq_len,) * 2, num_rows, 6))}
    sinks = st.lists(st.floats(-3, 3, width=32), min_size=heads[0], max_size=heads[0])
    return Decode(
        *(held, size, tuple(starts), world_size, num_queries),
        **seen,
        dtype=draw(st.sampled_from(list(TOLERANCES))),
        heads=heads,
        head_dims=head_dims,
        batch=batch,
        kernel=draw(st.sampled_from([None, "reference"] + ([] if special else ["cpu_flash"]))),
        sinks=tuple(draw(st.just([]) | sinks)),
        softcap=softcap,
    )


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_random_calls(world_size: int, request: pytest.FixtureRequest) -> None:
    """`pytest tests/decode/test_decode.py --decode-cases 20000` tries as many."""
    wanted, num_tried = request.config.getoption("--decode-cases") // len(WORLD_SIZES), 0

    @settings(
        max_examples=wanted // len(MERGES),
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(calls(world_size))
    def try_one(case: Decode) -> None:
        nonlocal num_tried
        for merge in MERGES:  # to draw a call takes longer than to make it
            num_tried += 1
            check(replace(case, merge=merge))

    try_one()
    request.node.user_properties.append(("decode calls tried", num_tried))


EVEN = tuple(((4 * rank, 4),) for rank in range(4))


@pytest.mark.parametrize("merge", MERGES)
def test_every_subset_of_ranks_may_be_empty(merge: str) -> None:
    for held in product([False, True], repeat=4):
        kept = tuple(runs if holds else () for runs, holds in zip(EVEN, held, strict=True))
        check(Decode(kept, 16, (15,), 4, merge=merge))


def test_unequal_rows_are_as_one_row_at_a_time() -> None:
    """In every bit: a batch changes nothing."""
    case = Decode(EVEN, 16, (3, 14, 0, 9), 4, 2, batch=4)
    inputs = case.inputs()
    for results in case.played():
        for row, start in enumerate(case.starts):
            alone = replace(case, starts=(start,), batch=1)
            object.__setattr__(alone, "inputs", lambda row=row: [x[row : row + 1] for x in inputs])
            for whole, one in zip(results, alone.played()[0], strict=True):
                assert torch.equal(whole[row], one[0]), start


@pytest.mark.parametrize("num_queries", [1, 2, 5, 63, 64])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_queries_at_every_offset_of_blocks(layout: object, num_queries: int) -> None:
    for end in range(num_queries, num_queries + 9, 3):
        check(Decode(layout, 72, (end - num_queries,), 3, num_queries))  # type: ignore[arg-type]


# The tiles that a few queries make with the runs of a cache.

MANY = RunTable([[(16 * i, 8) for i in range(500)], [(16 * i + 8, 8) for i in range(500)]])
"""Blocks of 8 positions in turns."""


@pytest.mark.parametrize(
    ("mask", "num_queries", "num_tiles"),
    [
        (Mask.causal(), 1, 1),
        (Mask.full(), 1, 1),
        (Mask.full(), 64, 1),
        (Mask.sliding(3000), 1, 1),
        (Mask.chunked(4096), 1, 1),
        (Mask.causal(), 8, 2),  # the square of the queries themselves, on the rank that holds them
        (Mask.prefix_causal(5), 1, 1),
    ],
)
def test_what_all_queries_see_is_one_tile(mask: Mask, num_queries: int, num_tiles: int) -> None:
    start = 8000 - num_queries
    requests = [DecodeRequest(MANY, mask, x, 2, 8000, (start,), num_queries) for x in range(2)]
    steps = [decode_step(x) for x in requests]
    assert [len(step.tiles) for step in steps] == [1, num_tiles]
    assert [len(step.cols) for step in steps] == [4000, 4000]


def test_planned_once() -> None:
    request = DecodeRequest(MANY, Mask.causal(), 0, 2, 8000, (7999,), 1)
    again = request._replace(layout=RunTable(MANY.numbers.copy()))
    assert decode_step(request) is decode_step(again)
    assert request.num_bytes == MANY.num_bytes  # the cache counts what its keys hold


def test_rows_of_one_length_share_their_tiles() -> None:
    for starts, batches in (((7,), {None}), ((7, 7), {None}), ((7, 5), {0, 1})):
        step = decode_step(DecodeRequest(Contiguous(), Mask.causal(), 0, 1, 8, starts, 1))
        assert {tile.batch for tile in step.tiles} == batches


def test_queries_after_all_keys_see_those_in_their_window() -> None:
    """Two queries, after as many keys as one table of slices has."""
    step = decode_step(DecodeRequest(Contiguous(), Mask.sliding(5), 0, 1, 1024, (1024,), 2))
    assert sum(tile.area for tile in step.tiles) == 5 + 4


def test_keys_with_gaps() -> None:
    step = decode_step(DecodeRequest(Striped(), Mask.causal(), 1, 4, 64, (60,), 4))
    assert {tile.mask for tile in step.tiles} == {Mask.full()}
    assert [tile.cols for tile in step.tiles] == [(0, 15), (0, 16)]


# Decoding whose sums have a fixed order: the same bits, however many ranks hold the cache.

BLOCK = 16


@st.composite
def fixed_calls(draw: st.DrawFn) -> Decode:
    """A call on blocks of keys that lie on any ranks; some may be on none."""
    world_size, batch = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2]))
    size = draw(st.integers(1, 150))
    starts = range(0, size, BLOCK)
    owners = draw(st.lists(st.integers(0, world_size), min_size=len(starts), max_size=len(starts)))
    held = [
        [(x, min(BLOCK, size - x)) for x, y in zip(starts, owners, strict=True) if y == rank]
        for rank in range(world_size)
    ]
    num_queries = draw(st.sampled_from([1, 1, 3, 20]))
    row = st.integers(0, size)
    begins = draw(
        st.lists(row, min_size=batch, max_size=batch) | st.lists(row, min_size=1, max_size=1)
    )
    longest = max(size, max(begins) + num_queries)
    seen: dict[str, Any] = {"mask": draw(masks())}
    kind = draw(st.integers(0, 3))
    if kind == 1:
        seen["documents"] = draw(documents_of(longest, batch, 3))
    elif kind == 2:
        seen = {"mask": Mask.full(), "slices": draw(slices((longest,) * 2, 1, 6))}
    heads = draw(st.sampled_from([(4, 4), (4, 2), (8, 1)]))
    sinks = draw(st.just(()) | st.just(tuple(0.25 * x for x in range(heads[0]))))
    return Decode(
        *(tuple(map(tuple, held)), size, tuple(begins), world_size, num_queries),
        **seen,
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        heads=heads,
        head_dims=draw(st.sampled_from([(8, 8), (32, 32)])),
        batch=batch,
        kernel=draw(st.sampled_from([None, "reference"])),
        sinks=sinks,
    )


def of_rank(case: Decode, rank: int, transport: PlayedTransport) -> Outputs:
    """What a rank computes."""
    query, key, value = case.inputs()
    here = case.positions(rank)
    request = DecodeRequest(
        *(case.layout, case.mask, rank, case.world_size, case.num_positions),
        *(case.starts, case.num_queries, as_documents(case.documents), case.slices),
    )
    kv, scores = (key[:, :, here], value[:, :, here]), case.scores()
    facts = kernel_facts(scores, query, key, value, True, case.slices, by_block=True)
    kernel = kernel_for(*facts)
    combine = None
    if case.world_size > 1:
        combine = Combine(transport, rank, case.world_size, "one_shot")
    pieces, step = decode_pieces(BLOCK, request), request.step(kv[0].shape[2])
    return decode_in_blocks(query, kv, step, pieces, kernel, scores, combine)


def results_of(case: Decode) -> list[Outputs]:
    return play(case.world_size, lambda rank, transport: of_rank(case, rank, transport))


def test_bits_do_not_depend_on_who_holds_a_block() -> None:
    for case in different(fixed_calls(), examples(200)):
        rows: Any = case.runs
        alone = replace(case, runs=(tuple(sorted(x for row in rows for x in row)),), world_size=1)
        ((out, lse),), dense = results_of(alone), case.dense()
        for x, exact in ((out, dense.out), (lse, dense.lse)):
            error = (x.double() - exact).abs().masked_fill(x == exact, 0.0)
            assert (error <= DRAWN_TOLERANCES[case.dtype] * (1 + exact.abs())).all(), case
        for of_this in results_of(case):
            assert all(map(torch.equal, of_this, (out, lse))), case


POLICY = TransferPolicy(order="fixed", block=BLOCK)
PROMPT, NUM_TOKENS = 53, 21
MASKS = {"causal": Mask.causal(), "window": Mask.sliding(37)}


def _generate(name: str, dtype: torch.dtype, heads: tuple[int, int], ends: bool) -> list[Tensor]:
    """Out and lse of tokens that come one by one after a prompt, then a few at once."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    axis = SequenceAxis(mesh, f"whole_blocks:{BLOCK}", policy=POLICY)
    cache, generator = ShardedCache(mesh, 1, block=BLOCK), torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, n, PROMPT + NUM_TOKENS, 32, generator=generator).to(dtype)
        for n in (heads[0], heads[1], heads[1])
    )
    prompt = PROMPT // BLOCK * BLOCK if ends else PROMPT
    own = axis.positions(prompt)
    cache.begin(prompt, dealt=True)
    kv = cache[0].append(key[:, :, own], value[:, :, own])
    found: list[Tensor] = []
    for begin in [*range(prompt, prompt + NUM_TOKENS - 5), prompt + NUM_TOKENS - 5]:
        end = begin + (5 if begin == prompt + NUM_TOKENS - 5 else 1)
        cache.begin(end - begin, dealt=False)
        kv = cache[0].append(key[:, :, begin:end], value[:, :, begin:end])
        how = {"mask": MASKS[name], "key_runs": cache.key_runs, "mesh": mesh}
        found += decode_attention(query[:, :, begin:end], *kv, **how, return_lse=True)
    whole = key[:, :, :end], value[:, :, :end]
    dense = dense_attention(query[:, :, :end], *whole, MASKS[name], scale=32**-0.5)
    error = (found[-2].double() - dense.out[:, :, -5:]).abs().max()
    assert error < DRAWN_TOLERANCES[dtype], error
    return found


@pytest.mark.pairs
@pytest.mark.parametrize("name", [*MASKS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "ends"), [((4, 2), False), ((4, 4), True)])
def test_tokens_of_a_cache(
    pool: Pool, name: str, dtype: torch.dtype, heads: tuple[int, int], ends: bool
) -> None:
    case = name, dtype, heads, ends
    results = [of_rank for size in (1, 2, 4) for of_rank in pool.run(size, _generate, *case)]
    for found in results[1:]:
        assert len(found) == len(results[0]) == 2 * (NUM_TOKENS - 4)
        assert all(map(torch.equal, found, results[0]))


def _of_shards(layout: str) -> list[Tensor]:
    """Of keys in shards of a layout, as plain tensors and as DTensors."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    axis = SequenceAxis(mesh, layout, policy=POLICY)
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(1, 2, n, 32, generator=generator) for n in (3, 8 * BLOCK))
    sinks = torch.tensor([0.5, -1.0])
    own = key[:, :, axis.positions(key.shape[2])]
    plain = decode_attention(query, own, own, mesh=mesh, sinks=sinks, return_lse=True)
    sharded = axis.shard(key, 2)
    whole = DTensor.from_local(query, sharded.device_mesh, [Replicate()])
    placed = decode_attention(whole, sharded, sharded, return_lse=True)
    return [*plain, *(x.to_local() if isinstance(x, DTensor) else x for x in placed)]


def test_keys_of_an_axis(pool: Pool) -> None:
    (wanted,) = pool.run(1, _of_shards, "contiguous")
    for size, layout in ((2, "zigzag"), (2, "contiguous"), (4, "whole_blocks:16")):
        for found in pool.run(size, _of_shards, layout):
            assert all(map(torch.equal, found, wanted)), layout


@on_ranks(2)
def test_what_it_refuses() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    query, key = torch.randn(1, 2, 1, 32), torch.randn(1, 2, 24, 32)
    SequenceAxis(mesh, "contiguous", policy=POLICY)
    runs = torch.tensor([[[0, 24]], [[24, 24]]])
    how = {"mesh": mesh, "key_runs": runs}
    with pytest.raises(ValueError, match="needs each block of 16 positions whole on one rank"):
        decode_attention(query, key, key, **how)
    with pytest.raises(ValueError, match="leave merge out"):
        decode_attention(query, key, key, merge="one_shot", **how)
    SequenceAxis(mesh, "contiguous", policy=TransferPolicy(order="fixed"))
    with pytest.raises(ValueError, match=r"pass TransferPolicy\(block=\) for its axis"):
        decode_attention(query, key, key, **how)
    block = 8 * (1 + 2 * dist.get_rank())
    SequenceAxis(mesh, "contiguous", policy=TransferPolicy(order="fixed", block=block))
    with pytest.raises(RingError, match="by blocks of"):
        decode_attention(query, key, key, **how)
