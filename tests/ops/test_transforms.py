"""The transforms of `torch.func` over attention of local shards, against dense float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call, grad, grad_and_value, hessian, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtensor_ring import (
    Mask,
    SequenceAxis,
    decode_attention,
    merge_attention,
    ring_attention,
    shard_sequence,
    sum_over_sequence,
    unshard_sequence,
)
from tests.dense import dense_attention
from tests.pool import Pool

LENGTH, MASK = 8, Mask.sliding(3)


class Whole:
    """Query, key, value and a gradient of one sequence, and the part of this rank."""

    def __init__(self, strategy: str, samples: int = 0) -> None:
        self.mesh: DeviceMesh = init_device_mesh("cpu", (2,))
        axis = SequenceAxis(self.mesh, "zigzag", strategy=strategy)
        self.mine = axis.positions(LENGTH)
        shape = (*((samples,) if samples else ()), 1, 4, LENGTH, 4)
        self.whole = torch.randn(4, *shape, dtype=torch.float64)
        self.query, self.key, self.value, self.weight = self.local(self.whole).unbind()

    def local(self, x: Tensor) -> Tensor:
        return x[..., self.mine, :]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ring_attention(query, key, value, mesh=self.mesh, mask=MASK)

    def loss(self, query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        return (self.attend(query, key, value) * weight).sum()

    def dense(self, sample: Any = ..., weight: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """This rank's part of the output and of the gradients of query, key and value."""
        *inputs, grad_out = self.whole[:, sample]
        found = dense_attention(*inputs, MASK)
        grads = found.backward(grad_out if weight is None else weight)
        return self.local(found.out.detach()), [self.local(x) for x in grads]


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-10)


def _check_grad(strategy: str) -> None:
    case = Whole(strategy)
    found = grad(case.loss, (0, 1, 2))(case.query, case.key, case.value, case.weight)
    close(list(found), case.dense()[1])


def _check_vjp(strategy: str) -> None:
    """Its function is called after the transform is over; other gradients go on below it."""
    case = Whole(strategy)
    key = case.key.clone().requires_grad_()
    out, pull = vjp(lambda query, value: case.attend(query, key, value), case.query, case.value)
    expected_out, expected = case.dense()
    close(out.detach(), expected_out)
    (grad_key,) = torch.autograd.grad(out, key, case.weight)
    grad_query, grad_value = pull(case.weight)
    close([grad_query, grad_key, grad_value], expected)


def _check_jacrev(strategy: str) -> None:
    """Row number i is the gradient of the sum, over ranks, of their output number i."""
    case = Whole(strategy)

    def outputs(key: Tensor) -> Tensor:
        return case.attend(case.query, key, case.value).sum((0, 1, 3))

    found = jacrev(outputs)(case.key)
    others = [torch.empty_like(case.mine) for _ in range(2)]
    dist.all_gather(others, case.mine)
    for number, row in enumerate(found):
        weight = torch.zeros_like(case.whole[0])
        for mine in others:
            weight[..., mine[number], :] = 1
        close(row, case.dense(weight=weight)[1][1])


def _check_samples(strategy: str) -> None:
    """Gradients by sample; the key is one for all, and its gradients differ."""
    case = Whole(strategy, samples=3)
    case.whole[1] = case.whole[1, :1]
    per_sample = vmap(grad(case.loss, (0, 1, 2)), in_dims=(0, None, 0, 0))
    moved = case.local(case.whole[1, 0])
    found = per_sample(case.query, moved, case.value, case.weight)
    for number, grads in enumerate(zip(*found, strict=True)):
        close(list(grads), case.dense(number)[1])


def _check_sinks(strategy: str) -> None:
    """Sinks by sample, of which each rank has a part of the gradient."""
    case = Whole(strategy, samples=2)
    sinks = torch.randn(2, 4, dtype=torch.float64)

    def loss(sinks: Tensor, query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        out = ring_attention(query, key, value, mesh=case.mesh, mask=MASK, sinks=sinks)
        return (out * weight).sum()

    found = vmap(grad(loss))(sinks, case.query, case.key, case.value, case.weight)
    dist.all_reduce(found)
    for number in range(2):
        *inputs, grad_out = case.whole[:, number]
        dense = dense_attention(*inputs, MASK, sinks=sinks[number])
        close(found[number], dense.backward(grad_out)[3])


def _check_decoding(strategy: str) -> None:
    case = Whole(strategy, samples=3)
    query = case.whole[0][..., :1, :]  # the same on all ranks
    attend = partial(decode_attention, mesh=case.mesh)
    found = vmap(attend)(query, case.key, case.value)
    for number, out in enumerate(found):
        close(out, attend(query[number], case.key[number], case.value[number]))


def _check_of_vmap(strategy: str) -> None:
    """A gradient through samples in the last dimension."""
    case = Whole(strategy, samples=2)

    def loss(query: Tensor) -> Tensor:
        out = vmap(case.attend, in_dims=(-1, 0, 0))(query.movedim(0, -1), case.key, case.value)
        return (out * case.weight).sum()

    found = grad(loss)(case.query)
    for number in range(2):
        close(found[number], case.dense(number)[1][0])


def _check_refused(strategy: str) -> None:
    """Second derivatives, of any kind."""
    case = Whole(strategy)
    inputs = case.key, case.value, case.weight

    def slope(query: Tensor) -> Tensor:
        return grad(case.loss)(query, *inputs).sum()

    with pytest.raises(NotImplementedError, match="differentiable once, not twice"):
        grad(slope)(case.query)
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")  # PyTorch's own, inside
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        hessian(case.loss)(case.query, *inputs)

    def sharded(query: Tensor) -> Tensor:
        return shard_sequence(query, case.mesh, 2).to_local().sum()

    with pytest.raises(NotImplementedError, match=r"cannot make a DTensor .* ring_attention"):
        grad(sharded)(case.query)
    parts = [shard_sequence(x.detach(), case.mesh, 2).requires_grad_() for x in [case.query] * 3]
    out = F.scaled_dot_product_attention(*parts, is_causal=True)
    with pytest.raises(NotImplementedError, match="differentiable once, not twice; leave cr"):
        torch.autograd.grad(out.sum(), parts, create_graph=True)
    loss = unshard_sequence(parts[0] * 2, 2).pow(3).sum()
    with pytest.raises(NotImplementedError, match="sequence is differentiable once, not twice"):
        torch.autograd.grad(loss, parts[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        jvp(lambda x: sum_over_sequence(x, case.mesh), (case.query,), (case.query,))


def _check_module(strategy: str) -> None:
    """What a training step has beside attention: a merge of two, and a sum over the ranks.

    A gradient that is taken below the transform goes through them, too.
    """
    case = Whole(strategy)
    case.value.requires_grad_()
    project = nn.Linear(4, 4, dtype=torch.float64)
    parameters = {name: x.detach() for name, x in project.named_parameters()}

    def loss(parameters: dict[str, Tensor], attend: Callable[..., Any]) -> Tensor:
        query = functional_call(project, parameters, (case.query,))
        parts = attend(query, mask=MASK), attend(query, mask=Mask.full())
        out, lse = merge_attention(parts)
        return sum_over_sequence((out * case.weight).sum() + lse.sum(), case.mesh)

    def attend(query: Tensor, mask: Mask) -> Any:
        how = {"mesh": case.mesh, "mask": mask, "return_lse": True}
        return ring_attention(query, case.key, case.value, **how)

    of_all = [*project.parameters(), case.value]
    expected = torch.autograd.grad(loss(dict(project.named_parameters()), attend), of_all)
    found, value = grad_and_value(loss)(parameters, attend)
    (below,) = torch.autograd.grad(value, case.value)
    close([*(x.detach() for x in found.values()), below], list(expected))


def _check_dtensors(strategy: str) -> None:
    """A transform hides that its inputs are DTensors."""
    case = Whole(strategy)
    placed = [
        DTensor.from_local(x, case.mesh, [Shard(2)])
        for x in (case.query, case.key, case.value, case.weight)
    ]
    axis = SequenceAxis(case.mesh)

    def gradients(attend: Any, **how: Any) -> list[Tensor]:
        def loss(*inputs: Any) -> Tensor:
            return (attend(*inputs[:3], **how) * inputs[3]).sum()

        found = grad(loss, (0, 1, 2))(*placed)
        assert all(x.placements == (Shard(2),) for x in found)
        return [x.to_local() for x in found]

    for attend in (ring_attention, axis.attention):
        close(gradients(attend, mask=MASK), case.dense()[1])
    expected = gradients(ring_attention)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(backend):
            close(gradients(F.scaled_dot_product_attention, is_causal=True), expected)


CHECKS = {
    "grad": _check_grad,
    "vjp": _check_vjp,
    "jacrev": _check_jacrev,
    "vmap of grad": _check_samples,
    "grad of vmap": _check_of_vmap,
    "sinks": _check_sinks,
    "decoding": _check_decoding,
    "refused": _check_refused,
    "module": _check_module,
    "DTensors": _check_dtensors,
}


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
@pytest.mark.parametrize("name", CHECKS)
def test_transform(pool: Pool, name: str, strategy: str) -> None:
    pool.run(2, CHECKS[name], strategy)
