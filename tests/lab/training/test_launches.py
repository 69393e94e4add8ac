"""What ops launch: bytes, numbers looked up one by one, and what a compiler makes of chains."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dtensor_ring.lab.training.launches import LaunchRecorder, fused


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("run", "num_bytes", "elements"),
    [
        (lambda x: x + x, 3 * 64, 0),
        (lambda x: x + x.t(), 3 * 64 * 2, 0),
        (lambda x: x.add_(x), 3 * 64, 0),
        # A row is broadcast, and read once.
        (lambda x: x * _empty(8), 2 * 64 + 16, 32),
        (lambda x: x * _empty(1, 8).expand(4, 8), 2 * 64 + 16, 32),
        (lambda x: x.float(), 64 + 128, 32),
        (lambda x: x[:, :4] * x[:, 4:], 3 * 32, 16),
        (lambda x: torch.cat([x, x], -1), 4 * 64, 64),
        (lambda x: x.copy_(_empty(4, 8)), 2 * 64, 0),
        (lambda x: x.sum(0), 64 + 16, 0),
        (lambda x: x.view(8, 4).t()[1:], 0, 0),
    ],
)
def test_a_launch(run: Callable[[Tensor], object], num_bytes: int, elements: int) -> None:
    given = _empty(4, 8) if num_bytes != 3 * 64 * 2 else _empty(8, 8)
    with LaunchRecorder() as recorder:
        run(given)
    found = [x for x in recorder.launches if x.num_bytes]
    assert sum(x.num_bytes for x in found) == num_bytes
    assert max((x.elements for x in found), default=0) == (elements or 64 * (num_bytes == 384))


def test_products_and_views() -> None:
    x, weight = _empty(4, 8), _empty(16, 8)
    with LaunchRecorder() as recorder, recorder.times(3):
        torch.mm(x, weight.t(), out=_empty(4, 16))
    (found,) = recorder.launches
    assert (found.flops, found.times, found.fuses) == (2 * 4 * 8 * 16, 3, False)
    assert found.num_bytes == 2 * (4 * 8 + 8 * 16 + 4 * 16)


def test_chains_are_one_kernel() -> None:
    x, weight = _empty(4, 8).requires_grad_(), _empty(8, 8)
    with LaunchRecorder() as recorder:
        gate = (x.float() * 2).to(x.dtype)
        out = gate @ weight
        number = len(recorder.launches)
        torch.autograd.backward((out * gate).sum())
    sides = recorder.launches[:number], recorder.launches[number:]
    first, product = fused(*sides)
    # It reads 32 numbers and writes as many: what is float32 stays inside.
    assert (first.num_bytes, product.flops) == (2 * 32 * 2, 2 * 4 * 8 * 8)
    assert sum(x.num_bytes for x in fused(sides[1])) < sum(x.num_bytes for x in sides[1])


def test_what_is_paused_is_not_there() -> None:
    with LaunchRecorder() as recorder:
        with recorder.paused():
            weight = _empty(4)
        assert (recorder.alive, recorder.launches) == (0, [])
        kept = weight + 1
        recorder.need(100)
    assert (recorder.alive, recorder.peak) == (kept.nbytes, kept.nbytes + 100)
    (launch,) = recorder.launches
    assert (launch.op, launch.times, launch.num_bytes) == ("add", 1, 2 * kept.nbytes)
