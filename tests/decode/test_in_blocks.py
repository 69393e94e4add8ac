"""Decoding whose sums have a fixed order: the same bits, however many ranks hold the cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from dtensor_ring import (
    Mask,
    RingError,
    SequenceAxis,
    ShardedCache,
    TransferPolicy,
    decode_attention,
)
from dtensor_ring.compute.kernels import kernel_for
from dtensor_ring.decode.in_blocks import decode_in_blocks, decode_pieces
from dtensor_ring.decode.plan import DecodeRequest
from dtensor_ring.decode.run import Combine
from dtensor_ring.ops.options import kernel_facts
from dtensor_ring.planning.mask import as_documents
from tests.decoding import Decode, Outputs
from tests.dense import dense_attention
from tests.drawn import TOLERANCES, different, documents_of, examples, masks
from tests.played import PlayedTransport, play
from tests.pool import Pool, on_ranks
from tests.slices import slices

BLOCK = 16


@st.composite
def calls(draw: st.DrawFn) -> Decode:
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
    for case in different(calls(), examples(200)):
        rows: Any = case.runs
        alone = replace(case, runs=(tuple(sorted(x for row in rows for x in row)),), world_size=1)
        ((out, lse),), dense = results_of(alone), case.dense()
        for x, exact in ((out, dense.out), (lse, dense.lse)):
            error = (x.double() - exact).abs().masked_fill(x == exact, 0.0)
            assert (error <= TOLERANCES[case.dtype] * (1 + exact.abs())).all(), case
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
    assert error < TOLERANCES[dtype], error
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
