"""Decode calls of ranks that agree take one message; of those that differ or fail, all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtensor_ring import RingError, SequenceAxis, decode_attention, ring_attention
from dtensor_ring.agreement.call_record import MAX_PAYLOAD
from dtensor_ring.compute.kernels import KERNELS
from dtensor_ring.transport.transport import ProcessGroupTransport
from tests.decode.test_decode_op import options_of
from tests.decoding import Decode, Outputs, check
from tests.pool import Pool, on_ranks

RUNS = (((0, 3), (9, 2)), ((3, 6), (11, 5)), ())
SMALL = Decode(RUNS, 16, (15,), 3)
LARGE = Decode(RUNS, 16, (15,), 3, batch=600, heads=(16, 4), dtype=torch.float32)


class Counted:
    """How many messages a rank sends: with a record, and without."""

    def __init__(self) -> None:
        self.record_works = self.others = 0
        self.memories: set[int] = set()
        self._patches: list[Any] = []

    def __enter__(self) -> Counted:
        send_record, start = ProcessGroupTransport.send_record, ProcessGroupTransport.start

        def with_record(this: Any, message: Any) -> Any:
            self.record_works += 1
            self.memories.add(message.flat.data_ptr())
            return send_record(this, message)

        def without(this: Any, receives: Any, sends: Any) -> Any:
            self.others += len(sends)
            return start(this, receives, sends)

        self._patches = [
            patch.object(ProcessGroupTransport, "send_record", with_record),
            patch.object(ProcessGroupTransport, "start", without),
        ]
        for each in self._patches:
            each.start()
        return self

    def __exit__(self, *error: object) -> None:
        for each in self._patches:
            each.stop()


@pytest.mark.parametrize(
    ("case", "record_works", "others", "joined"),
    [
        (SMALL, 2, 0, 1),  # one message to each of the two other ranks, joined once
        (LARGE, 1, 2, 1),
        (Decode(RUNS, 16, (15,), 3, merge="two_shot"), 2, 2, 2),
        (Decode(RUNS, 16, (15,), 3, batch=0), 2, 0, 1),
    ],
    ids=["small", "large", "two shots", "empty batch"],
)
def test_messages(pool: Pool, case: Decode, record_works: int, others: int, joined: int) -> None:
    for outputs, sent in pool.run(3, _count, case):
        check(case, [outputs])
        assert sent == [(record_works, others, joined)] * 3


def _count(case: Decode) -> tuple[Outputs, list[tuple[int, int, int]]]:
    mesh, sent = init_device_mesh("cpu", (3,)), []
    for _ in range(3):
        with Counted() as counted:
            outputs = attend(mesh, case)
        sent.append((counted.record_works, counted.others, len(counted.memories)))
    return outputs, sent


def test_no_message_without_a_mesh(pool: Pool) -> None:
    assert pool.run(2, _count_alone) == [(0, 0)] * 2


def _count_alone() -> tuple[int, int]:
    init_device_mesh("cpu", (2,))
    with Counted() as counted:
        decode_attention(*torch.randn(3, 1, 2, 1, 8))
    return counted.record_works, counted.others


def attend(mesh: DeviceMesh, case: Decode, **odd: Any) -> Outputs:
    query, key, value = case.inputs()
    here = case.positions(dist.get_rank())
    options = options_of(case) | odd
    return decode_attention(
        query, key[:, :, here], value[:, :, here], mesh=mesh, return_lse=True, **options
    )


def _ring(mesh: DeviceMesh) -> Any:
    return ring_attention(*torch.randn(3, 1, 2, 4, 8), mesh=mesh)


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(RingError) as caught:
        call()
    return str(caught.value)


class Failing(Exception):
    """What a kernel raises."""


@pytest.mark.parametrize("who", ["one", "all"])
def test_a_kernel_raises(pool: Pool, who: str) -> None:
    """If all ranks do, the group stays in order; if one does, the others are told."""
    for rank, text in enumerate(pool.run(3, _raise, who)):
        if who == "all":
            assert text == "right"
        elif rank == 1:
            assert "takes no more calls since rank 1 raised, in decode" in text
        else:
            assert "rank 1 raised, in decode, step 0: Failing: no memory" in text


def _raise(who: str) -> str:
    mesh, is_odd = init_device_mesh("cpu", (3,)), dist.get_rank() == 1
    attend(mesh, SMALL, kernel="reference")

    def fail(*_: Any) -> Any:
        raise Failing("no memory")

    if who == "all" or is_odd:
        # The last rank has no keys, so that it launches no kernel.
        kernel = patch.object(KERNELS["reference"], "forward", fail)
        place = patch("dtensor_ring.decode.op.decode", fail)
        with kernel, place, pytest.raises(Failing):
            attend(mesh, SMALL, kernel="reference")
    if who == "all":
        check(SMALL, [attend(mesh, SMALL, kernel="reference")])
        return "right"
    return error_of(lambda: attend(mesh, SMALL, kernel="reference"))


def test_columns_of_one_rank_do_not_fit(pool: Pool) -> None:
    for rank, text in enumerate(pool.run(3, _misfit)):
        reported = "rank 1 raised, in decode, step 0: ValueError: key must hold the 11 tokens"
        assert (reported if rank != 1 else "key must hold the 11 tokens") in text


def _misfit() -> str:
    mesh = init_device_mesh("cpu", (3,))
    if dist.get_rank() != 1:
        return error_of(lambda: attend(mesh, SMALL))
    query, key, value = SMALL.inputs()
    with pytest.raises(ValueError, match="key must hold") as caught:
        decode_attention(query, key, value, mesh=mesh, **options_of(SMALL))
    return str(caught.value)


class Own(ProcessGroupTransport):
    """A transport of a user's."""

    num_started = 0

    def start(self, receives: Any, sends: Any) -> Any:
        self.num_started += 1
        return super().start(receives, sends)


@on_ranks(3)
def test_transports_of_users_move_the_partials() -> None:
    mesh = init_device_mesh("cpu", (3,))
    transport = Own(mesh.get_group())
    SequenceAxis(mesh, transport=transport)
    check(SMALL, [attend(mesh, SMALL)])
    assert transport.num_started == 1


@on_ranks(3)
def test_rings_and_decoding_in_turns() -> None:
    """A message of one kind may be shorter than the room for the other."""
    mesh = init_device_mesh("cpu", (3,))
    for _ in range(3):
        _ring(mesh)
        check(SMALL, [attend(mesh, SMALL)])


def test_the_largest_message_that_a_record_carries(pool: Pool) -> None:
    rows = MAX_PAYLOAD // (9 * 8)
    for num_rows, record_works in ((rows, 2), (rows + 1, 1)):
        case = Decode(RUNS, 16, (15,), 3, batch=num_rows, heads=(1, 1), merge="one_shot")
        for outputs, sent in pool.run(3, _count, case):
            check(case, [outputs])
            assert [record_works for record_works, _, _ in sent] == [record_works] * 3
