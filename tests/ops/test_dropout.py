"""Dropout and a bias by distance: scores and weights depend on positions alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from dtensor_ring import (
    Mask,
    SequenceAxis,
    TransferPolicy,
    decode_attention,
    ring_attention,
    shard_sequence,
)
from dtensor_ring import shard_sequence as shard
from dtensor_ring import unshard_sequence as unshard
from tests.dense import dense_attention, dropout_factors
from tests.pool import Pool, on_ranks
from tests.refusals import Refused, check_refused

CAUSAL, FULL = Mask.causal(), Mask.full()
RATE = 0.3


# Of DTensors on a mesh of more axes: batch rows and heads are counted in the whole batch.
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
@pytest.mark.parametrize("other", [Shard(0), Shard(1)], ids=["batch", "heads"])
@on_ranks(4)
def test_counts_in_the_whole_batch(strategy: str, other: Shard) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "cp"))
    SequenceAxis(mesh["cp"], "contiguous", strategy=strategy)
    whole = _inputs()
    seed, placements = torch.tensor(5), [other, Shard(2)]
    factors = dropout_factors(RATE, 5, (2, 4, 16, 16))
    dense = dense_attention(*whole, CAUSAL, factors=factors)
    inputs = [distribute_tensor(x, mesh, placements).requires_grad_() for x in whole]
    out = ring_attention(*inputs, dropout_p=RATE, dropout_seed=seed)
    grads = torch.autograd.grad(out, inputs, distribute_tensor(whole[0], mesh, placements))
    for found, expected in zip((out, *grads), (dense.out, *dense.backward(whole[0])), strict=True):
        torch.testing.assert_close(found.full_tensor(), expected, atol=1e-12, rtol=1e-12)


def _inputs(seq_len: int = 16) -> list[Tensor]:
    """Query, key and value, float64, the same on each rank."""
    generator = torch.Generator().manual_seed(3)
    shape = 2, 4, seq_len, 8
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_scaled_dot_product_attention_drops_by_the_random_state(pool: Pool, strategy: str) -> None:
    one, two, four = (pool.run(size, _attended, strategy) for size in (1, 2, 4))
    for found in (*one, *two, *four):
        for x, y in zip(found, one[0], strict=True):
            torch.testing.assert_close(x, y, atol=1e-13, rtol=1e-13)


def _attended(strategy: str) -> list[Tensor]:
    """Outputs and gradients of calls that share nothing but the seed of the process."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    SequenceAxis(mesh, "zigzag", strategy=strategy)
    whole = [x.requires_grad_() for x in _inputs()]
    torch.manual_seed(7)
    results = []

    def attend(*inputs: Tensor) -> Tensor:
        sharded = (shard(x, mesh, 2) for x in inputs)
        return unshard(F.scaled_dot_product_attention(*sharded, dropout_p=RATE, is_causal=True), 2)

    for run in (attend, lambda *x: checkpoint(attend, *x, use_reentrant=False)):
        out = run(*whole)
        grads = torch.autograd.grad(out.square().sum(), whole)
        for grad in grads:
            dist.all_reduce(grad.div_(mesh.size()))  # each rank has that of its own tokens
        results += [out.detach(), *grads]
    first, again = results[0], results[4]
    assert not torch.equal(first, again), "each call draws a seed of its own"
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        results += [attend(*whole)]
    return results


@on_ranks(2)
def test_recomputation_drops_the_same_weights() -> None:
    mesh = init_device_mesh("cpu", (2,))
    axis = SequenceAxis(mesh, "striped")
    seen: list[Tensor] = []

    def attend(*inputs: Tensor) -> Tensor:
        out = axis.attention(*inputs, dropout_p=RATE)
        seen.append(out.detach())
        return out.square()

    for is_reentrant in (False, True):
        torch.manual_seed(1)
        whole = [x[:, :, dist.get_rank() :: 2].clone().requires_grad_() for x in _inputs()]
        checkpoint(attend, *whole, use_reentrant=is_reentrant).sum().backward()
        forward, again = seen
        assert torch.equal(forward, again)
        seen.clear()


@on_ranks(2)
def test_compiled() -> None:
    """One graph, whose seeds come from the random state, alike on all ranks, anew in each call."""
    mesh = init_device_mesh("cpu", (2,))
    axis = SequenceAxis(mesh, "zigzag")
    whole = _inputs()
    inputs = [axis.shard(x, 2).to_local().requires_grad_() for x in whole]

    def attend(*inputs: Tensor) -> Tensor:
        return axis.attention(*inputs, dropout_p=RATE)

    compiled = torch.compile(attend, fullgraph=True)
    torch.manual_seed(2)
    # A seed that is given says what is dropped in graphs, too.
    given = torch.compile(
        lambda *x: axis.attention(*x[:3], dropout_p=RATE, dropout_seed=x[3]), fullgraph=True
    )
    out = given(*inputs, torch.tensor(5))
    dense = dense_attention(*whole, CAUSAL, factors=dropout_factors(RATE, 5, (2, 4, 16, 16)))
    ours = [axis.shard(x, 2).to_local() for x in (dense.out, *dense.backward(whole[0]))]
    grads = torch.autograd.grad(out, inputs, axis.shard(whole[0], 2).to_local())
    for found, expected in zip((out, *grads), ours, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    one, two = compiled(*inputs), compiled(*inputs)
    assert not torch.equal(one, two)
    # Values of one: each output is the sum of its row's weights, whose mean is one.
    ones = [inputs[0], inputs[1], torch.ones_like(inputs[2]).requires_grad_()]
    sums = compiled(*ones)
    (grad,) = torch.autograd.grad(sums, ones[2:], sums.detach())
    # With the same weights w in backward: sum(grad) = sum(w * sums) = sum(sums ** 2).
    total = torch.stack([grad.sum(), sums.square().sum()]).detach()
    dist.all_reduce(total)
    torch.testing.assert_close(total[0], total[1])


def test_masks_are_independent() -> None:
    """Chi-square over pairs of weights that differ in one number, or in their seed."""
    size, seed = 100, 3
    shape = (2, 2, 512, 512)
    kept = dropout_factors(RATE, seed, shape) > 0
    pairs = {
        "rows": kept[0].eq(kept[1]),
        "heads": kept[:, 0].eq(kept[:, 1]),
        "queries": kept[:, :, 1:].eq(kept[:, :, :-1]),
        "keys": kept[..., 1:].eq(kept[..., :-1]),
        "diagonals": kept[..., 1:, 1:].eq(kept[..., :-1, :-1]),
        "seeds": kept.eq(dropout_factors(RATE, seed + 1, shape) > 0),
        "transposed": kept.eq(kept.mT)[..., *torch.triu_indices(512, 512, 1)],
    }
    assert abs(kept.double().mean().item() - (1 - RATE)) < 5 * (0.21 / kept.numel()) ** 0.5
    chance = RATE**2 + (1 - RATE) ** 2
    for name, equal in pairs.items():
        count = equal.numel()
        excess = equal.sum().item() - count * chance
        chi_square = excess**2 / (count * chance * (1 - chance))
        assert chi_square < 20, f"{name}: {chi_square} over {count:,} pairs, size {size}"


REFUSED: Refused = {
    ValueError: {
        "at least 0 and less than 1, got 1.0": {"dropout_p": 1.0},
        "at least 0 and less than 1, got -0.1": {"dropout_p": -0.1},
        r"one int64 number, shape \(\), on cpu, got \(\) torch.float32": {
            "dropout_p": 0.1,
            "dropout_seed": torch.tensor(1.0),
        },
        "'cpu_flash' cannot serve this attention .*cannot drop weights by the positions": {
            "dropout_p": 0.1,
            "kernel": "cpu_flash",
        },
    },
    TypeError: {
        "dropout_p must be a number": {"dropout_p": "0.1"},
        "must be a plain tensor": {"dropout_p": 0.1, "dropout_seed": 5},
    },
}


@on_ranks(2)
def test_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    SequenceAxis(mesh, "zigzag")
    x = torch.randn(1, 2, 8, 8)
    check_refused(REFUSED, lambda options: ring_attention(x, x, x, mesh=mesh, **options))


@on_ranks(2)
def test_ranks_with_other_rates_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    SequenceAxis(mesh, "zigzag")
    x = torch.randn(1, 2, 8, 8)
    with pytest.raises(ValueError, match="dropout_p"):
        ring_attention(x, x, x, mesh=mesh, dropout_p=0.1 * (1 + dist.get_rank()), validate=True)


# A bias by distance: queries add it to the score of keys so many positions before.


def _whole(extent: int = 5, seq_len: int = 16) -> list[Tensor]:
    """Query, key, value, a bias by distance and sinks of queries, the same on each rank."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, heads, seq_len, size) for heads, size in ((4, 8), (2, 8), (2, 6), (4, extent))]
    shapes += [(2, 4, seq_len)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _expected(whole: list[Tensor], mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
    """Out and lse, written out: a sink is a key without a value."""
    query, key, value, bias, sinks = whole
    key, value = (x.repeat_interleave(2, 1) for x in (key, value))
    lag = torch.arange(query.shape[2]).unsqueeze(1) - torch.arange(key.shape[2])
    scores = query @ key.mT * scale
    for number, x in enumerate(bias.unbind(-1)):
        scores = scores + x.unsqueeze(-1) * (lag == number)
    seen = (lag >= 0) & (lag <= (len(lag) if mask.left is None else mask.left))
    scores = torch.cat([scores.masked_fill(~seen, -torch.inf), sinks.unsqueeze(-1)], -1)
    return scores.softmax(-1)[..., :-1] @ value, scores.logsumexp(-1)


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
@pytest.mark.parametrize("kind", ["shards", "dtensors", "axis"])
@on_ranks(2)
def test_public_functions(kind: str, strategy: str) -> None:
    """With a sink of each query, which is not of each head."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    axis, mask = SequenceAxis(mesh, "zigzag", strategy=strategy), Mask.sliding(9)
    whole = [x.requires_grad_() for x in _whole()]
    given = [axis.shard(x, 2) for x in whole]
    how: dict[str, Any] = {"mask": mask, "scale": 0.3}
    if kind != "dtensors":
        given = [x.to_local() for x in given]
    query, key, value, bias, sinks = given
    how |= {"relative_bias": bias, "sinks": sinks}
    if kind == "axis":
        out = axis.attention(query, key, value, **how)
        expected = _expected(whole, mask, 0.3)[:1]
        found: list[Tensor] = [out]
    else:
        on = {} if kind == "dtensors" else {"mesh": mesh}
        found = [*ring_attention(query, key, value, return_lse=True, **how, **on)]
        expected = _expected(whole, mask, 0.3)
    weights = [torch.randn_like(x) for x in expected]
    dist.broadcast(weights[0], 0)
    dist.broadcast(weights[-1], 0)
    own = [axis.shard(x, 2).to_local() for x in expected]
    local = [x.to_local() if kind == "dtensors" else x for x in found]
    grads = torch.autograd.grad(
        sum((x * axis.shard(y, 2).to_local()).sum() for x, y in zip(local, weights, strict=True)),
        whole,
    )
    wanted = torch.autograd.grad(
        sum((x * y).sum() for x, y in zip(expected, weights, strict=True)), whole
    )
    for x, y in zip(local, own, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    for x, y in zip(grads, wanted, strict=True):
        dist.all_reduce(x)
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_decoding() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    axis, mask = SequenceAxis(mesh, "zigzag"), Mask.sliding(9)
    whole = _whole()
    out, lse = (x[:, :, -3:] for x in _expected(whole, mask, 0.3))
    query, bias, sinks = (whole[i][:, :, -3:] for i in (0, 3, 4))
    key, value = (axis.shard(whole[i], 2).to_local() for i in (1, 2))
    how: dict[str, Any] = {"mask": mask, "scale": 0.3, "relative_bias": bias}
    how |= {"sinks": sinks, "mesh": mesh}
    found = decode_attention(query, key, value, return_lse=True, **how)
    torch.testing.assert_close(found[0], out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[1], lse, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match=r"same positions in all batch rows, got query_starts \[1"):
        decode_attention(query, key, value, query_starts=torch.tensor([13, 12]), **how)


@on_ranks(1)
def test_refused_biases() -> None:
    """Also a query that is wider by mistake."""
    mesh = init_device_mesh("cpu", (1,))
    query, key, value, bias, sinks = _whole()
    wide = torch.cat([query, bias], -1)
    for given, error, match in (
        ({"relative_bias": bias[:, :2]}, ValueError, r"\(B, N, L, E\).*got \(2, 2, 16, 5\)"),
        ({"relative_bias": bias[..., :0]}, ValueError, "needs a distance, got E = 0"),
        ({"relative_bias": bias.long()}, ValueError, "torch.int64"),
        ({"relative_bias": bias, "kernel": "cpu_flash"}, ValueError, "bias by distance"),
        ({"relative_bias": 2.0}, TypeError, "of the query's kind, got float"),
        ({"sinks": sinks[:, :, :3]}, ValueError, r"or \(B, N, L\), .*got \(2, 4, 3\)"),
    ):
        for attend in (ring_attention, decode_attention):
            few = {"query_starts": torch.zeros(1, dtype=torch.int64)}
            more = few if attend is decode_attention else {}
            with pytest.raises(error, match=match):
                attend(query, key, value, mesh=mesh, **given, **more)
    SequenceAxis(mesh)
    shards = [shard_sequence(x, mesh, 2) for x in (wide, key, value)]
    for call in (
        lambda: ring_attention(wide, key, value, mesh=mesh),
        lambda: decode_attention(wide, key, value, mesh=mesh),
        lambda: F.scaled_dot_product_attention(*shards, is_causal=True, enable_gqa=True),
    ):
        with pytest.raises(ValueError, match="one head dim"):
            call()
    axis = SequenceAxis(mesh, policy=TransferPolicy(order="fixed"))
    with pytest.raises(ValueError, match="relative_bias has no sums in a fixed order"):
        axis.attention(query, key, value, relative_bias=bias)


@on_ranks(2)
def test_compiled_in_one_graph() -> None:
    mesh = init_device_mesh("cpu", (2,))
    axis = SequenceAxis(mesh, "zigzag")
    local = [axis.shard(x, 2).to_local().requires_grad_() for x in _whole()]

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
        how = {"relative_bias": bias, "sinks": sinks, "mesh": mesh}
        return ring_attention(query, key, value, **how).square()

    results = []
    for run in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        out = run(*local)
        results.append([out, *torch.autograd.grad(out.sum(), local)])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
