"""Bound calls: one for equal calls, while their group lives; a launch that is all of a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from dtensor_ring import Mask
from dtensor_ring.compute.kernels import Scores
from dtensor_ring.ops import bound
from dtensor_ring.ops.bound import MAX_BOUND, BoundCall, bound_call
from dtensor_ring.ops.nodes import is_plain
from dtensor_ring.ops.options import Batch, Call, Place, flatten
from tests.pool import on_ranks
from tests.rings import fake_group

MASK = Mask.causal()


NONE = Batch()


def _bound(batch: Batch = NONE, length: int = 8, **scores: Any) -> BoundCall:
    """The bound call of this rank's share of the sequence."""
    size, name = dist.get_world_size(), dist.group.WORLD.group_name  # type: ignore[union-attr]
    place = Place("contiguous", "ring", length * size, length * size, name)
    x = torch.zeros(1, 2, length, 4)
    return bound_call(flatten(Call(batch, Scores(MASK, 1.0, **scores), place)), x, x, x)


SINKS, SEED = torch.zeros(2), torch.tensor(1)
# Ranks, boundaries, other options, and whether one launch is all.
SOLE: list[tuple[int, list[int] | None, dict[str, Any], bool]] = [
    (1, None, {}, True),
    (1, None, {"softcap": 2.0}, True),
    (1, [0, 8], {}, False),
    (1, None, {"sinks": SINKS}, False),
    (1, None, {"dropout_p": 0.5, "dropout_seed": SEED}, False),
    (2, None, {}, False),
]


@on_ranks(1)
def test_equal_calls_are_bound_once() -> None:
    with fake_group(1):
        assert _bound() is _bound()
        assert len({id(x) for x in (_bound(), _bound(length=9), _bound(softcap=2.0))}) == 3
        documents = Batch(torch.tensor([0, 8]))
        assert _bound(documents) is not _bound(documents)
        for length in range(1, MAX_BOUND + 3):
            _bound(length=length)
        assert 0 < len(bound._BOUND) <= MAX_BOUND
    ranks = []
    for rank in (0, 1, 0):  # the groups have the same name, and the calls the same options
        with fake_group(2, rank):
            ranks.append(_bound().rank)
    assert ranks == [0, 1, 0]


@on_ranks(1)
def test_the_launch_that_is_all() -> None:
    x = torch.zeros(1, 2, 8, 4)
    for size, ends, scores, is_sole in SOLE:
        with fake_group(size, size - 1):
            batch = Batch(None if ends is None else torch.tensor(ends))
            found = _bound(batch, **scores)
            kernel = found.call.select(x, x, x, None)
            assert (found.sole(kernel, x, x) is not None) == is_sole, (size, ends, scores)


class _Seeing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def _profiled() -> Iterator[None]:
    with torch.profiler.profile():
        yield


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (nullcontext(), True),
        (torch.no_grad(), True),
        (FlopCounterMode(display=False), False),
        (_Seeing(), False),
        (torch.autocast("cpu", torch.bfloat16), False),
        (_profiled(), False),
    ],
)
def test_calls_that_someone_sees_are_not_plain(
    context: AbstractContextManager[Any], expected: bool
) -> None:
    with context:
        assert is_plain(torch.ones(2), torch.ones(2, requires_grad=True)) == expected


def test_tensors_that_are_more_than_numbers_are_not_plain() -> None:
    plain = torch.ones(2)
    assert not is_plain(plain, torch.empty(2, device="meta"))
    assert not is_plain(plain, torch._neg_view(plain))
    seen: list[bool] = []
    torch.vmap(lambda x: seen.append(is_plain(x)) or x)(plain)
    torch.func.grad(lambda x: seen.append(is_plain(x)) or x.sum())(plain)
    assert seen == [False, False]
