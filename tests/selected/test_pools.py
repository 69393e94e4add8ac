"""Pools of a sharded sequence, and queries that choose among them, are those of one process."""

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
    Balanced,
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
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.run_table import RunTable
from dtensor_ring.selected import run
from dtensor_ring.selected.plan import pool_numbers, pool_table
from tests.decode.test_decode_messages import Counted
from tests.layouts import LAYOUTS
from tests.pool import Pool, on_ranks
from tests.selected.indexers import dense

DIM = 3


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.spec)
def test_pools_are_where_their_last_token_is(layout: Layout) -> None:
    for world_size, length, size in product((1, 2, 3, 4), (1, 5, 24, 37), (1, 2, 3, 4, 50)):
        seq_len = layout.dealt_length(length, world_size)
        owner = {p: r for r in range(world_size) for p in layout.positions(r, world_size, seq_len)}
        table = pool_table(layout, world_size, seq_len, size)
        for rank in range(world_size):
            for position in table.positions(rank, world_size, seq_len):
                last = min(position // size * size + size, seq_len) - 1
                assert owner.pop(position, None) is not None, "each is on one rank"
                assert layout_owner(layout, world_size, seq_len, last) == rank
        assert not owner


def layout_owner(layout: Layout, world_size: int, seq_len: int, position: int) -> int:
    found = [r for r in range(world_size) if position in layout.positions(r, world_size, seq_len)]
    return found[0]


def dense_pools(x: Tensor, gates: Tensor | None, size: int) -> Tensor:
    """Of the whole sequence `(B, S, D)`."""
    pools = []
    for begin in range(0, x.shape[1] - size + 1, size):
        tokens = x[:, begin : begin + size]
        weights = torch.ones_like(tokens) if gates is None else gates[:, begin : begin + size].exp()
        pools.append((tokens * weights).sum(1) / weights.sum(1).expand_as(tokens[:, 0]))
    return torch.stack(pools, 1) if pools else x[:, :0]


MADE = [
    (2, "contiguous", 23, 4, 0),
    (3, "zigzag", 37, 5, DIM),
    (3, "striped", 24, 4, 1),
    (4, "block_cyclic:3", 41, 2, DIM),
    (2, "balanced", 24, 5, 1),
    (4, "contiguous", 24, 9, 0),  # of some ranks no token is the last of a pool
    (2, "zigzag", 6, 7, 0),  # no pool at all
    (1, "zigzag", 10, 3, DIM),
    (2, "zigzag", 20, 1, 0),
]


@pytest.mark.parametrize(("world_size", "spec", "length", "size", "gate_dim"), MADE)
@on_ranks()
def test_pools_equal_one_process(spec: str, length: int, size: int, gate_dim: int) -> None:
    """Results and gradients, with the loss of all ranks together."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world_size,))
    if spec == "balanced":
        layout: Layout = Balanced(Mask.causal(), length, world_size, (0, 5, length), block=2)
    else:
        layout = as_layout(spec)
        length = layout.dealt_length(length, world_size)
    generator = torch.Generator().manual_seed(length + size)
    shapes = [(2, length, DIM)] + [(2, length, gate_dim)] * bool(gate_dim)
    whole = [torch.randn(*x, generator=generator).double().requires_grad_() for x in shapes]
    mine = layout.positions(rank, world_size, length)
    local = [x.detach()[:, mine].requires_grad_() for x in whole]
    both, owned = [*whole, None][:2], [*local, None][:2]
    found = pool_tokens(owned[0], mesh, size, layout=layout, gates=owned[1], seq_len=length)
    expected = dense_pools(both[0], both[1], size)
    ends = [p for p in range(size - 1, length, size) if p in mine]
    numbers = [p // size for p in ends]
    torch.testing.assert_close(found, expected[:, numbers], rtol=1e-12, atol=1e-12)
    # A factor for each pool tells gradients that go to the wrong token.
    factor = torch.arange(1.0, expected.shape[1] + 1).double().view(1, -1, 1)
    wanted = torch.autograd.grad((expected * factor).square().sum(), whole)
    grads = torch.autograd.grad((found * factor[:, numbers]).square().sum(), local)
    for ours, theirs in zip(grads, wanted, strict=True):
        torch.testing.assert_close(ours, theirs[:, mine], rtol=1e-12, atol=1e-12)


def in_16_bits() -> tuple[Tensor, Tensor]:
    mesh = init_device_mesh("cpu", (1,))
    both = torch.randn(2, 1, 64, DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    x, gates = both.unbind()
    expected = dense_pools(x.double(), gates.double(), 32).bfloat16()
    return pool_tokens(x, mesh, 32, layout="zigzag", gates=gates), expected


def test_16_bits_are_rounded_once(pool: Pool) -> None:
    ((found, expected),) = pool.run(1, in_16_bits)
    assert torch.equal(found, expected)


@on_ranks(2)
def test_shards_of_whole_pools_send_nothing() -> None:
    mesh = init_device_mesh("cpu", (2,))
    counts = []
    for size in (4, 5):
        with Counted() as counted:
            pool_tokens(torch.ones(1, 16, DIM), mesh, size, layout="zigzag")
        counts.append(counted.others)
    whole, cut = counts
    assert whole == 0
    assert cut > 0


@on_ranks(1)
def test_wrong_calls() -> None:
    mesh = init_device_mesh("cpu", (1,))
    x: Any = torch.ones(1, 6, DIM)
    for error, match, given, how in (
        (TypeError, "plain local shard, got DTensor", DTensor.from_local(x, mesh), {}),
        (TypeError, "tensor must be a plain local shard, got int", 3, {}),
        (ValueError, r"\(B, L, D\), got torch.float32 \(6, 3\)", x[0], {}),
        (ValueError, "gates must be .* got .*float64", x, {"gates": x.double()}),
        (ValueError, r"gates must be .* got \(1, 6, 2\)", x, {"gates": x[..., :2]}),
        (ValueError, "size must be", x, {"size": 0}),
        (ValueError, "unknown layout", x, {"layout": "spiral"}),
    ):
        with pytest.raises(error, match=match):
            pool_tokens(given, mesh, **{"size": 2, "layout": "zigzag"} | how)


HEADS, HEAD_DIM = 3, 4


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
    shapes = (2, seq_len, HEADS, HEAD_DIM), (2, seq_len, HEAD_DIM), (2, seq_len, HEADS)
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
def test_wrong_calls_of_an_index() -> None:
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
    shapes = (2, 6, length, HEAD_DIM), (2, length, HEAD_DIM), (6,)
    whole = [torch.randn(*x, generator=generator).double().requires_grad_() for x in shapes]
    local = [whole[0].detach()[:, :, mine], whole[1].detach()[:, mine], whole[2].detach()]
    local = [x.clone().requires_grad_() for x in local]
    where: dict[str, Any] = {"layout": spec, "seq_len": length}
    tokens = whole_pools(local[1], mesh, size, **where)
    before = pools_before(tokens[..., : HEAD_DIM // 2], mesh, size, **where)
    ends = [n for n in range(length // size) if (n + 1) * size - 1 in mine]
    before = before * (torch.tensor(ends) > 0).view(1, -1, 1, 1)
    keys = (tokens.mean(2) + before.sum(2).repeat(1, 1, 2)).unsqueeze(1)
    pools = whole[1][:, : length // size * size].unflatten(1, (-1, size))
    shifted = torch.cat([pools[:, :1] * 0, pools[:, :-1]], 1)[..., : HEAD_DIM // 2]
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
        found = selected_attention(local[0], keys, HEAD_DIM, chosen[:, mine], **how)
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
