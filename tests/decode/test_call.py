"""Bound decode calls: one for calls that are equal in all that they depend on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_ring import Mask
from dtensor_ring.compute.kernels import Scores
from dtensor_ring.decode import call as calls
from dtensor_ring.decode.call import (
    BoundDecode,
    DecodeBatch,
    DecodeCall,
    DecodePlace,
    bound_decode,
    flatten_decode,
)
from tests.pool import Pool
from tests.rings import fake_group

QUERY, KEYS = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 4, 4)
RUNS = torch.tensor([[[0, 4]], [[4, 4]]])


def _bound(
    key_runs: Tensor = RUNS, query: Tensor = QUERY, agree: Tensor | None = None, **scores: Any
) -> BoundDecode:
    group: Any = dist.group.WORLD
    batch = DecodeBatch(key_runs=key_runs, agree=agree)
    place = DecodePlace(group_name=group.group_name)
    call = DecodeCall(batch, Scores(Mask.causal(), 1.0, **scores), place)
    return bound_decode(flatten_decode(call), query, KEYS.to(query.dtype), KEYS.to(query.dtype))


def test_equal_calls_are_one(pool: Pool) -> None:
    pool.run(1, _check_equal)


def _check_equal() -> None:
    with fake_group(2):
        first = _bound()
        assert first is _bound() is _bound(RUNS.clone())
        assert first.call.batch == DecodeBatch()  # it holds no tensor of its caller
        others = [
            _bound(RUNS.int()),
            _bound(softcap=2.0),
            _bound(query=QUERY.double()),
            _bound(query=torch.zeros(1, 4, 1, 4)),
            _bound(agree=torch.tensor([1])),
            _bound(agree=torch.tensor([2])),
        ]
        assert len({id(x) for x in (first, *others)}) == 7
        assert len({x.round.record for x in (first, *others[1:]) if x.round}) == 6
        with_sinks = _bound(sinks=torch.zeros(2))
        assert with_sinks is _bound(sinks=torch.ones(2))  # each layer has its own
        assert with_sinks not in (first, _bound(sinks=torch.zeros(2).double()))
        assert with_sinks.call.scores.sinks is None
    with fake_group(2, rank=1):  # a group of the same name
        assert _bound().request.rank == 1


def test_integers_are_read_again(pool: Pool) -> None:
    """The runs of the next token are written to the same memory."""
    pool.run(1, _check_written)


def _check_written() -> None:
    with fake_group(2):
        runs = RUNS.clone()
        assert _bound(runs).request.seq_len == 8
        runs[0, 0, 0], runs[1, 0, 0] = 4, 8
        assert _bound(runs).request.seq_len == 12
        runs[1, 0, 0] = 6
        with pytest.raises(ValueError, match="each position once"):
            _bound(runs)


def test_calls_take_bounded_memory(pool: Pool) -> None:
    pool.run(1, _check_bounded)


def _check_bounded() -> None:
    with fake_group(2):
        for length in range(1, 2000):
            _bound(agree=torch.tensor([length]))
        assert 0 < calls._BOUND.num_bytes <= calls._BOUND.max_bytes
        assert len(calls._BOUND) < 2000
