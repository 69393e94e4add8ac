"""Infinities and NaN come out where dense attention has them, and stay within their document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, product
from math import inf, nan

import pytest
import torch
from torch import Tensor

from dtensor_ring import Mask
from dtensor_ring.compute.kernels import Launch, Scores
from dtensor_ring.compute.kernels.cpu_flash import CpuFlash
from dtensor_ring.compute.memory import WHOLE
from tests.layouts import LAYOUTS
from tests.played_group import PlayedGroup, play_group
from tests.rings import Case, Ring, local

CAUSAL, FULL = Mask.causal(), Mask.full()
DTYPES = torch.float32, torch.bfloat16, torch.float64
KERNELS = None, None, "reference"
NAMES = "out", "lse", "dq", "dk", "dv"
SHARDS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17)
"""Tokens of a rank: from fewer than a vector of aten's kernel holds to more."""


@dataclass(frozen=True)
class Poke:
    """An extreme number in one token of the query, key or value."""

    case: Case
    tensor: int
    number: float
    token: int

    def inputs(self) -> list[Tensor]:
        inputs = self.case.inputs()
        inputs[self.tensor][:, :, self.token, 1] = self.number
        return inputs

    def attend(self, group: PlayedGroup) -> list[Tensor]:
        """Out, lse and gradients of a rank."""
        positions = self.case.ring.positions(group.rank())
        shards = [local(x, positions).requires_grad_() for x in self.inputs()]
        outputs = self.case.attend(*shards, group_name=group.group_name)
        (grad_out,) = self.case.grads()
        return [*outputs, *torch.autograd.grad(outputs[0], shards, local(grad_out, positions))]

    def expected(self) -> list[Tensor]:
        """The same of the whole sequence, dense and in float64, of visible pairs alone.

        A product with a weight of 0 would be NaN where nothing is seen.
        """
        inputs = [x.double().requires_grad_() for x in self.inputs()]
        hidden = ~self.case.ring.visible()[:, None, :, :, None]
        query = inputs[0].unsqueeze(3)
        keys, values = (
            x.repeat_interleave(query.shape[1] // x.shape[1], 1).unsqueeze(2).masked_fill(hidden, 0)
            for x in inputs[1:]
        )
        scores = self.case.scale * (query * keys).sum(-1).masked_fill(hidden[..., 0], -inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -inf, 0).unsqueeze(-1)).exp()
        out = (weights.unsqueeze(-1) * values).sum(3)
        grads = torch.autograd.grad(out, inputs, self.case.grads()[0].double())
        return [x.detach() for x in (out, lse, *grads)]

    def elsewhere(self) -> Tensor:
        """Tokens of other documents `(S,)`."""
        (bounds,) = self.case.ring.documents or ((0, self.case.ring.seq_len),)
        ends = torch.tensor(bounds[1:])
        document = torch.bucketize(torch.arange(self.case.ring.seq_len), ends, right=True)
        return document != document[self.token]


COMBINATIONS = list(product(range(3), (nan, inf, -inf)))


def pokes(mask: Mask, world_size: int, num_each: int) -> Iterator[Poke]:
    """In every layout and length, some of the combinations; all else comes in turns."""
    turns = count()
    for layout, length, _ in product(LAYOUTS, SHARDS, range(num_each)):
        turn = next(turns)
        seq_len = layout.padded_length(length * world_size, world_size)
        documents = ((0, seq_len // 3, seq_len),) if turn % 2 else None
        ring = Ring(layout, world_size, seq_len, mask, documents)
        dtype, kernel = DTYPES[turn // 2 % len(DTYPES)], KERNELS[turn // 4 % len(KERNELS)]
        token = 7 * turn % seq_len
        yield Poke(Case(ring, dtype, kernel=kernel), *COMBINATIONS[turn % 9], token)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("mask", [CAUSAL, FULL, Mask.sliding(4)], ids=["causal", "full", "window"])
def test_extremes(mask: Mask, world_size: int, request: pytest.FixtureRequest) -> None:
    """Ranks are threads: it is about numbers, not about what moves them."""
    num_each = 3 if request.config.getoption("--all-cases") else 1
    tried = list(pokes(mask, world_size, num_each))
    by_rank = play_group(world_size, lambda group: [poke.attend(group) for poke in tried])
    wrong = [
        f"{fault}: {poke}"
        for poke, *results in zip(tried, *by_rank, strict=True)
        for fault in _faults(poke, results)
    ]
    assert not wrong, "\n".join(wrong[:10])


def _faults(poke: Poke, by_rank: list[list[Tensor]]) -> Iterator[str]:
    """What is wrong on any rank."""
    wholes = poke.expected()
    for rank, results in enumerate(by_rank):
        positions = poke.case.ring.positions(rank)
        expected = [whole[:, :, positions] for whole in wholes]
        for fault in _faults_of_rank(poke, results, expected, poke.elsewhere()[positions]):
            yield f"rank {rank}: {fault}"


def _faults_of_rank(
    poke: Poke, results: list[Tensor], wanted: list[Tensor], elsewhere: Tensor
) -> Iterator[str]:
    eps = torch.finfo(poke.case.dtype).eps
    for name, x, expected in zip(NAMES, results, wanted, strict=True):
        # What is finite is right: nothing that is not finite in dense attention was lost.
        pair = (y[x.isfinite()].double() for y in (x, expected))
        if not torch.allclose(*pair, rtol=8 * eps, atol=32 * eps):
            yield f"{name} is finite and wrong"
        if not x[:, :, elsewhere].isfinite().all():
            yield f"{name} of another document is not finite"
        if name == "out" and not torch.equal(x[expected.isinf()], expected[expected.isinf()]):
            yield "an infinite output was lost"


def test_halves_of_a_long_square() -> None:
    """Which the kernel for CPUs merges itself."""
    query, key, value = torch.randn(3, 1, 1, 1000, 8)
    value[..., 5, 1] = inf
    square = Launch(WHOLE, WHOLE, CAUSAL), Scores(CAUSAL, 0.3)
    out, _ = CpuFlash().forward(query, key, value, *square)
    assert (out[..., 5:, 1] == inf).all()
    assert out[..., 2:].isfinite().all()
