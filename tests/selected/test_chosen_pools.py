"""Queries choose among pools that end before them, on any number of ranks as in plain loops."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from dtensor_ring import (
    Mask,
    SequenceAxis,
    Slices,
    decode_select_keys,
    select_keys,
    selected_attention,
)
from dtensor_ring.extension import (
    append_runs,
    as_layout,
    pool_runs,
    pool_tokens,
    pools_before,
    whole_pools,
)
from dtensor_ring.planning.run_table import RunTable
from dtensor_ring.selected import run
from dtensor_ring.selected.plan import pool_numbers
from tests.decode.test_decode_messages import Counted
from tests.layouts import LAYOUTS
from tests.pool import Pool, on_ranks
from tests.selected.indexers import dense

HEADS, DIM = 3, 4


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.spec)
def test_numbers_are_where_the_last_token_is(layout: Any) -> None:
    for world_size, length, size in product((1, 3), (1, 24, 37), (2, 5)):
        seq_len = layout.dealt_length(length, world_size)
        table = pool_numbers(layout, world_size, seq_len, size)
        assert isinstance(table, RunTable)
        for rank in range(world_size):
            mine = layout.positions(rank, world_size, seq_len)
            numbers = [n for n in range(seq_len // size) if (n + 1) * size - 1 in mine]
            assert list(table.positions(rank, world_size, seq_len // size)) == numbers


def inputs(seq_len: int) -> list[Tensor]:
    """Query, tokens and weights: whole numbers with whole means, so that many scores are equal."""
    generator = torch.Generator().manual_seed(seq_len)
    shapes = (2, seq_len, HEADS, DIM), (2, seq_len, DIM), (2, seq_len, HEADS)
    query, tokens, weights = (torch.randint(-2, 3, x, generator=generator) for x in shapes)
    return [query.float(), tokens.float() * 180, weights.float()]


def in_loops(seq_len: int, size: int, k: int, with_weights: bool) -> Tensor:
    """`(B, S, K)`, or of each head `(B, Hi, S, K)`."""
    query, tokens, weights = inputs(seq_len)
    pools = tokens[:, : seq_len // size * size].unflatten(1, (-1, size)).mean(2)
    products = 0.5 * torch.einsum("bshd,bpd->bhsp", query, pools)
    if with_weights:
        products = (products.relu() * weights.mT.unsqueeze(-1)).sum(1, keepdim=True)
    found = torch.full((*products.shape[:3], k * size + size - 1), -1, dtype=torch.int32)
    for number, row in enumerate(products.flatten(0, 2).tolist()):
        at = number % seq_len
        ended = (at + 1) // size
        chosen = sorted(sorted(range(ended), key=lambda n: (-row[n], n))[:k])
        listed = [t for n in chosen for t in range(n * size, n * size + size)]
        listed += range(ended * size, at + 1)
        found.view(-1, found.shape[3])[number, : len(listed)] = torch.tensor(listed).int()
    return found.squeeze(1) if with_weights else found


def of_rank(spec: str, length: int, size: int, k: int, with_weights: bool, route: str) -> None:
    """Of all tokens, and of the last ones with the others cached."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    mesh, layout = init_device_mesh("cpu", (world_size,)), as_layout(spec)
    SequenceAxis(mesh, spec)
    length = layout.dealt_length(length, world_size)
    mine = layout.positions(rank, world_size, length)
    query, tokens, weights = inputs(length)
    pools = pool_tokens(tokens[:, mine], mesh, size, layout=spec, seq_len=length)
    how: dict[str, Any] = {"scale": 0.5, "pool_size": size, "mesh": mesh}
    own = weights[:, mine] if with_weights else None
    found = select_keys(query[:, mine], pools, own, k, seq_len=length, route=route, **how)
    expected = in_loops(length, size, k, with_weights)
    assert torch.equal(found, expected[..., mine, :])
    if any(run.stride > 1 for run in layout.runs(0, world_size, length)):
        return
    runs = torch.tensor(append_runs(layout, length, world_size))
    cached = whole_pools(tokens[:, mine], mesh, size, runs=runs).mean(2)
    for count in (1, 5):
        own = weights[:, -count:] if with_weights else None
        found = decode_select_keys(query[:, -count:], cached, own, k, key_runs=runs, **how)
        assert torch.equal(found, expected[..., -count:, :])


CASES = [
    (2, "contiguous", 23, 4, 2, True, "ring"),
    (3, "zigzag", 37, 5, 3, True, "direct"),
    (3, "striped", 24, 4, 9, True, "all_gather"),
    (4, "block_cyclic:3", 41, 2, 3, False, "around"),
    (4, "contiguous", 24, 9, 1, True, "ring"),  # of some ranks no token is the last of a pool
    (2, "zigzag", 8, 9, 2, True, "ring"),  # no pool at all
    (1, "zigzag", 12, 3, 2, False, "ring"),
]


def by_single_queries(*case: Any) -> None:
    """In chunks of one query, each of which skips the pools after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "SCORES", 1)
        of_rank(*case)


def test_chunks_of_queries(pool: Pool) -> None:
    for case in (("zigzag", 37, 5, 3), ("striped", 24, 4, 2)):
        pool.run(2, by_single_queries, *case, True, "ring")


@pytest.mark.parametrize(("world_size", *[f"x{i}" for i in range(6)]), CASES)
def test_equals_plain_loops(
    pool: Pool, world_size: int, x0: str, x1: int, x2: int, x3: int, x4: bool, x5: str
) -> None:
    pool.run(world_size, of_rank, x0, x1, x2, x3, x4, x5)


@on_ranks(1)
def test_wrong_calls() -> None:
    mesh = init_device_mesh("cpu", (1,))
    query, tokens, weights = inputs(8)
    pools = tokens[:, :2]
    placed = [DTensor.from_local(x, mesh, [Replicate()]) for x in (query, pools, weights)]
    bounds = torch.tensor([0, 3, 8]).int()
    for match, given, how in (
        ("pools or chosen by blocks", (query, pools, weights), {"block_size": 2}),
        ("a causal sequence of one document.*got cu_seqlens", (query, pools, weights),
         {"cu_seqlens": bounds}),
        ("one document.*got Mask", (query, pools, weights), {"mask": Mask.full()}),
        ("holds 3 tokens, but its shard", (query, tokens[:, :3], weights), {}),
        ("is for local shards", placed, {"mesh": None}),
        ("pool_size must be", (query, pools, weights), {"pool_size": 0}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            select_keys(*given, 1, **{"pool_size": 4, "mesh": mesh} | how)
    runs = torch.tensor([[[0, 8]]]).int()
    for match, how in (
        ("needs key_runs", {}),
        (r"for all rows with pool_size=4, got \[6, 7\]",
         {"key_runs": runs, "query_starts": torch.tensor([6, 7])}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            decode_select_keys(
                query[:, :1], pools, weights[:, :1], 1, pool_size=4, mesh=mesh, **how
            )
    for how in ({}, {"layout": "zigzag", "runs": runs}):
        with pytest.raises(ValueError, match="the layout of the tokens, or the runs"):
            whole_pools(tokens, mesh, 2, **how)


@pytest.mark.parametrize(
    ("world_size", "spec", "length", "size"),
    [
        (2, "contiguous", 23, 4),
        (3, "zigzag", 37, 5),
        (3, "striped", 24, 4),
        (4, "block_cyclic:3", 41, 2),
        (4, "contiguous", 24, 9),
        (1, "zigzag", 12, 3),
    ],
)
@pytest.mark.parametrize("sees_all", [False, True])
@on_ranks()
def test_attention_to_pools(spec: str, length: int, size: int, sees_all: bool) -> None:
    """To overlapping pools by their numbers, with the gradients of all that they are made of.

    Or to all that end before a query, by a mask of positions and without a list.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    mesh, layout = init_device_mesh("cpu", (world_size,)), as_layout(spec)
    axis = SequenceAxis(mesh, spec)
    length = layout.dealt_length(length, world_size)
    mine = layout.positions(rank, world_size, length)
    generator = torch.Generator().manual_seed(length)
    shapes = (2, 6, length, DIM), (2, length, DIM), (6,)
    whole = [torch.randn(*x, generator=generator).double().requires_grad_() for x in shapes]
    local = [whole[0].detach()[:, :, mine], whole[1].detach()[:, mine], whole[2].detach()]
    local = [x.clone().requires_grad_() for x in local]
    where: dict[str, Any] = {"layout": spec, "seq_len": length}
    tokens = whole_pools(local[1], mesh, size, **where)
    before = pools_before(tokens[..., : DIM // 2], mesh, size, **where)
    ends = [n for n in range(length // size) if (n + 1) * size - 1 in mine]
    before = before * (torch.tensor(ends) > 0).view(1, -1, 1, 1)
    keys = (tokens.mean(2) + before.sum(2).repeat(1, 1, 2)).unsqueeze(1)
    pools = whole[1][:, : length // size * size].unflatten(1, (-1, size))
    shifted = torch.cat([pools[:, :1] * 0, pools[:, :-1]], 1)[..., : DIM // 2]
    dense_keys = (pools.mean(2) + shifted.sum(2).repeat(1, 1, 2)).unsqueeze(1)
    ended = (torch.arange(length).unsqueeze(1) + 1) // size
    chosen = torch.arange(length // size).repeat(2, length, 1)
    is_left_out = (chosen % 3 == 1) & (not sees_all)
    chosen = chosen.masked_fill((chosen >= ended) | is_left_out, -1).int()
    how: dict[str, Any] = {"scale": 0.7, "sinks": local[2], "seq_len": length}
    if sees_all:
        how["key_runs"] = pool_runs(world_size, size, **where)
        how["slices"] = Slices.pools(length, size)
        how["strategy"] = "ulysses" if world_size == 3 else None
        found = axis.attention_with_lse(local[0], keys, keys, **how)
    else:
        how |= {"mesh": mesh, "pool_size": size, "return_lse": True}
        found = selected_attention(local[0], keys, DIM, chosen[:, mine], **how)
    expected = dense(whole[0], dense_keys, dense_keys, chosen.unsqueeze(1), 0.7, whole[2])
    factors = torch.randn(expected[0].shape, generator=generator).double(), torch.arange(length)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs[:, :, mine], rtol=1e-9, atol=1e-9)
    loss = (expected[0] * factors[0]).sum() + (expected[1] * factors[1]).sum()
    own = (found[0] * factors[0][:, :, mine]).sum() + (found[1] * factors[1][mine]).sum()
    wanted, grads = torch.autograd.grad(loss, whole), torch.autograd.grad(own, local)
    dist.all_reduce(grads[2])
    for ours, theirs in zip(
        grads, (wanted[0][:, :, mine], wanted[1][:, mine], wanted[2]), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def messages(size: int) -> tuple[int, int]:
    """That make pools of tokens, and of a selection among these."""
    mesh = init_device_mesh("cpu", (2,))
    SequenceAxis(mesh, "contiguous")
    query, tokens, weights = (x[:, :16] for x in inputs(32))
    with Counted() as made:
        pools = pool_tokens(tokens, mesh, size, layout="contiguous")
    with Counted() as chosen:
        select_keys(query, pools, weights, 2, pool_size=size, mesh=mesh)
    return made.others, chosen.others


def test_pools_of_one_rank_travel_as_keys_alone(pool: Pool) -> None:
    """Whole pools send no token; those that end on another rank send the tokens before."""
    for made, chosen in pool.run(2, messages, 4):
        assert (made, chosen) == (0, 1)
    assert pool.run(2, messages, 5)[0][0] > 0
