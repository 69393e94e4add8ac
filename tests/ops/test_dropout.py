"""Dropout of attention: the weights that it drops depend on positions in the whole batch alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from dtensor_ring import Mask, SequenceAxis, ring_attention
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
