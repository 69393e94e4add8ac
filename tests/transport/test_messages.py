"""Exchanges whose messages travel in pieces, from where they lie and to where they belong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dtensor_ring import ZigZag
from dtensor_ring.ops.autograd import exchange_op
from dtensor_ring.ops.exchange_options import flatten_trade
from dtensor_ring.planning.exchanges.exchange import exchange_of
from dtensor_ring.transport import messages
from dtensor_ring.transport.exchange import traded
from dtensor_ring.transport.messages import Geometry, goes_in_pieces
from tests.ops.test_exchange import CASES, Case, check_exchange
from tests.played_group import PlayedGroup, play_group

pytestmark = pytest.mark.usefixtures("pieces")


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All pieces are large."""
    monkeypatch.setattr(messages, "LARGE_PIECE", 1)
    traded.clear()  # it knows messages
    yield
    traded.clear()


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_pieces_go_where_they_belong_and_gradients_come_back(case: Case) -> None:
    check_exchange(case)


@pytest.mark.parametrize("name", ["one key head", "uneven tokens", "dtypes"])
def test_tensors_may_lie_in_any_order(name: str) -> None:
    """Pieces are sent from where they lie if that is token by token, else copies of them are."""
    case = CASES[name]

    def run(group: PlayedGroup) -> None:
        given = case.before(group.rank())
        for is_back in (False, True):
            options = flatten_trade(case.trade(group.group_name, is_back=is_back))
            expected = exchange_op(given, *options)
            for tensors in orders(given):
                for found, wanted in zip(exchange_op(tensors, *options), expected, strict=True):
                    assert torch.equal(found, wanted)
            given = expected

    play_group(case.world_size, run)


def orders(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """The same numbers head by head, token by token, and with gaps in each dimension."""
    yield [x.contiguous() for x in tensors]
    yield [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    for dim in range(1, 5):
        yield [torch.stack([x, x], dim).select(dim, 0) for x in tensors]


def test_large_tensors_are_not_copied() -> None:
    """Nothing that comes is copied on the way there, nothing that leaves on the way back."""
    plan = exchange_of(ZigZag(), ZigZag(), 4, 0, 4, 64)
    before = [Geometry.token_major((2, heads, 16, 3), 4) for heads in (8, 4)]
    after = [Geometry.token_major((2, heads, 64, 3), 4) for heads in (2, 1)]
    there = traded(plan, (8, 4), 4, tuple(before))
    back = traded(plan, (8, 4), 4, tuple(after), is_back=True)
    assert (len(there.sends.copies), len(there.receives.copies)) == (3 * 2, 0)
    assert (len(back.sends.copies), len(back.receives.copies)) == (0, 3 * 2)
    # Two rows of two tensors. Tokens of a rank are on both sides of those of the next one; the
    # last rank has them side by side.
    assert len(there.receives.messages) == 2 * 2 * (2 + 2 + 1)
    assert len(there.sends.messages) == 2 * 2 * 2 * 3


def test_many_tokens_apart_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "LARGE_PIECE", 100)
    assert goes_in_pieces(200, 2)
    assert not goes_in_pieces(199, 2)
    assert not goes_in_pieces(10**9, 0), "there are too many"
    assert not goes_in_pieces(0, 0)
