"""The messages of an exchange: how they are packed, and from tensors in which order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dtensor_ring import ZigZag
from dtensor_ring.all_to_all.op import all_to_all_op, flatten_all_to_all
from dtensor_ring.all_to_all.plan import all_to_all_plan
from dtensor_ring.all_to_all.run import ALIGNED, AllToAllMessages, TensorShape, aligned, messages_of
from tests.all_to_all.test_op import CASES
from tests.played_group import PlayedGroup, play_group


@pytest.mark.parametrize("name", ["one key head", "uneven tokens", "dtypes"])
def test_tensors_may_lie_in_any_order(name: str) -> None:
    case = CASES[name]

    def run(group: PlayedGroup) -> None:
        given = case.before(group.rank())
        for is_back in (False, True):
            options = flatten_all_to_all(case.args(group.group_name, is_back=is_back))
            expected = all_to_all_op(given, *options)
            for tensors in orders(given):
                for found, wanted in zip(all_to_all_op(tensors, *options), expected, strict=True):
                    assert torch.equal(found, wanted)
            given = expected

    play_group(case.world_size, run)


def orders(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """The same numbers head by head, token by token, and with gaps in each dimension."""
    yield [x.contiguous() for x in tensors]
    yield [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    for dim in range(1, 5):
        yield [torch.stack([x, x], dim).select(dim, 0) for x in tensors]


def planned(
    num_heads: tuple[int, ...], itemsizes: tuple[int, ...], is_back: bool
) -> AllToAllMessages:
    """Rank 0 of four, with 16 tokens of 64 and two rows; heads have three numbers."""
    plan = all_to_all_plan(ZigZag(), ZigZag(), 4, 0, 4, 64)
    shapes = tuple(TensorShape(2, 3, itemsize) for itemsize in itemsizes)
    return messages_of(plan, num_heads, num_heads[-1], shapes, is_back)


@pytest.mark.parametrize("is_back", [False, True])
def test_each_peer_gets_one_message(is_back: bool) -> None:
    """Messages lie one after the other, and the tensors of one without gaps, the widest first."""
    found = planned((8, 4), (2, 8), is_back)
    for side in (found.sends, found.receives):
        assert [peer for peer, _ in side.messages] == [1, 2, 3]
        for peer, (begin, end) in side.messages:
            assert begin % ALIGNED == 0
            copies = [x for x in side.copies if x.peer == peer]
            assert [x.part.number for x in copies] == [1, 0]
            bounds = [begin, *(x.span[1] for x in copies)]
            assert [x.span[0] for x in copies] == bounds[:-1]
            assert bounds[-1] == end
        assert side.num_bytes == sum(aligned(end - begin) for _, (begin, end) in side.messages)


def test_peers_that_get_the_same_share_one_copy() -> None:
    """One head, of which each rank gets a copy: it is packed once, and received from each."""
    found = planned((1,), (4,), is_back=False)
    num_bytes = 2 * 16 * 3 * 4
    assert list(found.sends.messages) == [(peer, (0, num_bytes)) for peer in (1, 2, 3)]
    assert len(found.sends.copies) == 1
    assert len(found.receives.copies) == 3
    back = planned((1,), (4,), is_back=True)
    assert len(back.receives.copies) == 3, "copies that are summed"


def test_nothing_empty_travels() -> None:
    plan = all_to_all_plan(ZigZag(), ZigZag(), 4, 0, 4, 64)
    found = messages_of(plan, (4,), 4, (TensorShape(0, 3, 4),))
    assert not found.sends.messages + found.receives.messages
    assert not found.sends.num_bytes + found.receives.num_bytes
