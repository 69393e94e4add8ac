"""Messages between processes: on which devices, in which order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dtensor_ring.transport.process_group import ProcessGroupTransport, set_transport, transport_of
from dtensor_ring.transport.protocol import P2P
from tests.pool import Pool
from tests.transport.test_rotation import recorded


def test_gloo_sends_nothing_of_a_gpu(pool: Pool) -> None:
    pool.run(2, _prepare_for_a_gpu)


def _prepare_for_a_gpu() -> None:
    with pytest.raises(ValueError, match=r"on CUDA and their group is gloo's, .*\"nccl\"\)"):
        ProcessGroupTransport(dist.group.WORLD).prepare(torch.device("cuda"))


def test_receives_go_first(pool: Pool) -> None:
    for order in pool.run(2, _exchange):
        assert order == ["irecv", "irecv", "isend", "isend"]


def _exchange() -> list[str]:
    """Two messages each way, which arrive in the order in which they were given."""
    rank = dist.get_rank()
    given, got = [torch.full((2,), 10.0 * rank + i) for i in range(2)], torch.zeros(2, 2)
    transport = ProcessGroupTransport(dist.group.WORLD)
    with recorded() as hops:
        works = transport.start([P2P(x, 1 - rank) for x in got], [P2P(x, 1 - rank) for x in given])
    for work in works:
        work.wait()
    assert got.tolist() == [[10.0 * (1 - rank) + i] * 2 for i in range(2)]
    assert not transport.start([], [])
    return [message.what for hop in hops for message in hop]


def test_the_transport_of_a_group(pool: Pool) -> None:
    pool.run(1, _check_transport_of)


def _check_transport_of() -> None:
    group = dist.group.WORLD
    assert isinstance(transport_of(group), ProcessGroupTransport)
    mine = ProcessGroupTransport(group)
    set_transport(group, mine)
    assert transport_of(group) is mine
