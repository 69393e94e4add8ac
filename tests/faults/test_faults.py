"""A rank that dies, stops, or whose kernel raises: the others are told, and can go on again."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from time import sleep
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtensor_ring import Mask, SequenceAxis
from dtensor_ring.compute.kernels import KERNELS
from dtensor_ring.decode.cache import CacheLayer
from tests.faults.breaking import at_call, at_launch, break_kernel, kill, leave, patience, stop
from tests.faults.calls import Call, make, plain, step
from tests.faults.decoding import Decoding, decode
from tests.faults.worlds import (
    DEADLINE,
    LIMITED,
    USUAL,
    Failure,
    Fate,
    Log,
    Terms,
    Worlds,
    failure_of,
)

VICTIM = 1
FORWARD, BACKWARD = ((type(KERNELS["reference"]), name) for name in ("forward", "backward"))
APPEND = CacheLayer, "append"
CALL = Call(mask=Mask.full(), kernel="reference")
"""Each step of it is one launch."""
LARGE = replace(CALL, seq_len=384, head_dim=64)
"""Its messages have hundreds of kilobytes: more than the system takes in on its own."""
TRAINING, LARGE_TRAINING = (partial(step, call, plain, training=True) for call in (CALL, LARGE))
DECODING = partial(decode, Decoding(options={"kernel": "reference"}))


@dataclass(frozen=True)
class Fault:
    """What happens to rank 1 in the middle of a ring, or of a decode call.

    Attributes:
        what: is called before a call of the method.
        method: what is called in each step; by default the kernel of a ring's forward.
        number: of the call.
        reported: a pattern in what the others are told.
        own: what rank 1 itself is told, `None` if it dies of it.
        dies: how its process ends otherwise.
        terms: how long the group waits: by default longer than any test, so that a rank which is
            told of the fault was not told by the time limit.
        world_size: the number of ranks.
        repeated: what all ranks do over and over, on a mesh.
        late: a rank that begins a second later, when the process of rank 1 has ended.
    """

    what: Callable[[], object]
    method: tuple[type, str] = FORWARD
    number: int = 1
    reported: str = "rank 1"
    own: str | None = None
    dies: str = "returned"
    terms: Terms = USUAL
    world_size: int = 3
    repeated: Callable[[DeviceMesh], object] = TRAINING
    late: int | None = None

    @property
    def survivors(self) -> list[int]:
        return [rank for rank in range(self.world_size) if self.own or rank != VICTIM]


BROKEN = {"reported": "rank 1.*step 1.*Broken.*no memory left", "own": "Broken"}
LEFT = {"reported": "rank 1.*step 1.*SystemExit", "own": "SystemExit"}
KILLED = {"dies": "SIGKILL"}
LIMIT = "the time limit of the group is over"
STOPPED = {"reported": f"step.*{LIMIT}", "own": "RingError", "terms": LIMITED}
UNCAUGHT = {"own": None, "dies": "raised"}
DECODE = {"repeated": DECODING}
BROKEN_DECODE = BROKEN | {"reported": "rank 1.*decode, step 0.*Broken.*no memory left"}
SILENT = {"reported": f"rank 1.*{LIMIT}", "own": "Broken", "terms": LIMITED}
"""The rank lives on, and does not come to the call."""
FAULTS = {
    "killed, forward": Fault(kill, **KILLED),
    "killed, first step": Fault(kill, number=0, **KILLED),
    "killed, backward": Fault(kill, BACKWARD, **KILLED),
    "killed, 2 ranks": Fault(kill, world_size=2, **KILLED),
    "killed, 4 ranks": Fault(kill, number=2, world_size=4, **KILLED),
    "killed, 4 ranks, backward": Fault(kill, BACKWARD, 2, world_size=4, **KILLED),
    "killed, large messages": Fault(kill, repeated=LARGE_TRAINING, **KILLED),
    "killed, large messages, backward": Fault(kill, BACKWARD, repeated=LARGE_TRAINING, **KILLED),
    "kernel, caught": Fault(break_kernel, **BROKEN),
    "kernel, caught, backward": Fault(break_kernel, BACKWARD, **BROKEN),
    "kernel, caught, 2 ranks": Fault(break_kernel, world_size=2, **BROKEN),
    "kernel, caught, 4 ranks": Fault(break_kernel, world_size=4, **BROKEN),
    "kernel, caught, large messages": Fault(break_kernel, repeated=LARGE_TRAINING, **BROKEN),
    "kernel, caught, large messages, backward": Fault(
        break_kernel, BACKWARD, repeated=LARGE_TRAINING, **BROKEN
    ),
    "kernel, uncaught": Fault(break_kernel, **BROKEN | UNCAUGHT),
    "kernel, uncaught, backward": Fault(break_kernel, BACKWARD, **BROKEN | UNCAUGHT),
    "exit, caught": Fault(leave, **LEFT),
    "exit, uncaught": Fault(leave, BACKWARD, **LEFT | UNCAUGHT),
    "stopped, forward": Fault(stop, **STOPPED),
    "stopped, backward": Fault(stop, BACKWARD, **STOPPED),
    "killed, decoding": Fault(kill, **DECODE | KILLED),
    "killed, decoding, 2 ranks": Fault(kill, world_size=2, **DECODE | KILLED),
    "kernel, caught, decoding": Fault(break_kernel, **DECODE | BROKEN_DECODE),
    "kernel, uncaught, decoding": Fault(break_kernel, **DECODE | BROKEN_DECODE | UNCAUGHT),
    "stopped, decoding": Fault(stop, **DECODE | STOPPED),
    "append, caught": Fault(break_kernel, APPEND, **DECODE | SILENT),
    "append, uncaught": Fault(break_kernel, APPEND, **DECODE | UNCAUGHT),
    # Rank 2 waits for rank 0, which finds its connection to rank 1 closed already.
    "append, uncaught, rank 0 late": Fault(
        break_kernel, APPEND, reported="rank [01]", **DECODE | UNCAUGHT, late=0
    ),
}


@dataclass
class Reported:
    """What a rank is told of a fault, and in its next call on the same group."""

    first: Failure
    again: Failure | None


REPEATED = {"stopped, backward", "killed, 4 ranks", "killed, large messages, backward"}
REPEATED |= {"kernel, caught, large messages", "kernel, uncaught, backward"}
"""Others have their direction, their number of ranks and their messages, each with another."""


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=name, marks=[pytest.mark.repeats] if name in REPEATED else [])
        for name, fault in FAULTS.items()
    ],
)
def test_fault(worlds: Worlds, fault: Fault) -> None:
    for fate in check_fault(worlds, fault):
        # It may be further: what it needs of rank 1 in this loop may have arrived before.
        _, text, fields = fate.value.first
        step = "before its first step" if fields["step"] is None else f"step {fields['step']}"
        assert f"{fields['direction']}, {step}" in text
        assert fields["peer"] in fields["ring"]


def check_fault(worlds: Worlds, fault: Fault, *through: Callable[..., Any]) -> list[Fate]:
    """All are told of it, those that are returned by an error, and the ranks can go on."""
    fates = worlds.run(fault.world_size, *through, suffer, fault, terms=fault.terms)
    victim, others = fates[VICTIM], [x for rank, x in enumerate(fates) if rank != VICTIM]
    assert victim.ended == fault.dies
    if fault.own is not None:
        assert victim.value.first.kind == fault.own
        check_refused(fault, victim)
    for fate in others:
        assert fate.ended == "returned"
        kind, text, fields = fate.value.first
        assert kind == "RingError", text
        assert re.search(fault.reported, text)
        assert fields["ring"] == tuple(range(fault.world_size))
        assert fate.events["told"] > victim.events["fault"]
        check_refused(fault, fate)
    check_new_world(worlds, fault.survivors, [fates[rank].pid for rank in fault.survivors])
    return others


def check_refused(fault: Fault, fate: Fate) -> None:
    """The group takes no call any more, and says why."""
    again = fate.value.again
    assert again is not None
    assert again.kind == "RingError", again.text
    assert re.search(fault.reported, again.text)


def check_new_world(worlds: Worlds, members: list[int], pids: list[int]) -> None:
    """The same processes, as a new world, compute what is right."""
    fates = worlds.run(members, make, (CALL,) * len(members), ("plain",) * len(members), True)
    assert [fate.pid for fate in fates] == pids
    assert all(fate.value.is_right(CALL) for fate in fates), fates


def suffer(log: Log, fault: Fault) -> Reported:
    """Steps of training, until this rank is told that rank 1 has a fault."""
    mesh, is_victim = init_device_mesh("cpu", (fault.world_size,)), dist.get_rank() == VICTIM
    SequenceAxis(mesh, "contiguous")  # here ranks meet, if they have NCCL alone

    if dist.get_rank() == fault.late:
        sleep(1.0)

    def strike() -> None:
        log("fault")
        fault.what()

    with at_call(fault.method, fault.number, strike) if is_victim else nullcontext():
        try:
            while True:
                fault.repeated(mesh)
        except (Exception, SystemExit) as error:
            log("told")
            if is_victim and fault.own is None:
                raise
            # The rank lives on, and so does all that the error holds.
            live_on(len(fault.survivors))
            return Reported(failure_of(error), again(mesh))


def live_on(num_ranks: int) -> None:
    """Wait until that many ranks are here."""
    store = dist.distributed_c10d._get_default_store()
    store.add("told", 1)
    while store.add("told", 0) < num_ranks:
        sleep(0.01)


def again(mesh: DeviceMesh) -> Failure | None:
    """What the next call on the group raises."""
    try:
        step(CALL, plain, mesh, training=True)
    except RuntimeError as error:
        return failure_of(error)
    return None


RETRIES = {
    "1 rank": (1, (0,), 1),
    "2 ranks": (2, (0, 1), 1),
    "3 ranks": (3, (0, 1, 2), 1),
    "3 ranks, 50 times": (3, (0, 1, 2), 50),
    "1 of 2 ranks": (2, (1,), 1),
    "1 of 3 ranks": (3, (1,), 1),
    "2 of 3 ranks": (3, (0, 1), 1),
}
"""World size, whose kernels raise, and in how many calls on end."""


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("1 rank", "backward"),
        ("2 ranks", "forward"),
        ("3 ranks", "backward"),
        ("3 ranks, 50 times", "forward"),
        ("3 ranks, 50 times", "backward"),
        ("1 of 2 ranks", "backward"),
        ("1 of 3 ranks", "forward"),
        ("2 of 3 ranks", "backward"),
    ],
)
def test_retry(worlds: Worlds, name: str, direction: str) -> None:
    check_retries(worlds, name, direction)


def check_retries(worlds: Worlds, name: str, direction: str, *through: Callable[..., Any]) -> None:
    """If all ranks fail alike, the next call is right; if some do, it is refused on all."""
    world_size, broken, times = RETRIES[name]
    terms = Terms(deadline=2 * DEADLINE + times / 2)
    fates = worlds.run(world_size, *through, retry, broken, times, direction, terms=terms)
    for rank, fate in enumerate(fates):
        assert fate.ended == "returned", fate
        kinds, last = fate.value
        assert kinds == ["Broken" if rank in broken else "RingError"] * times
        if len(broken) == world_size:
            assert isinstance(last, float), last
            assert last <= LARGE.tolerance
        else:
            assert last.kind == "RingError"
            assert re.search("step 0.*Broken.*no memory left", last.text)
    check_new_world(worlds, list(range(world_size)), [fate.pid for fate in fates])


def retry(
    log: Log, broken: tuple[int, ...], times: int, direction: str
) -> tuple[list[str], float | Failure]:
    """The errors of calls whose kernels raise, and what comes of the next one."""
    mesh, kinds = init_device_mesh("cpu", (dist.get_world_size(),)), []
    is_broken, are_all = dist.get_rank() in broken, len(broken) == mesh.size()
    for _ in range(times):
        with (
            patience() if are_all else nullcontext(),
            at_launch(direction, 0, break_kernel) if is_broken else nullcontext(),
        ):
            try:
                step(LARGE, plain, mesh, training=True)
            except Exception as error:
                kinds.append(type(error).__name__)
    try:
        return kinds, step(LARGE, plain, mesh, training=True)
    except RuntimeError as error:
        return kinds, failure_of(error)


@pytest.mark.parametrize("fault", [kill, break_kernel], ids=["killed", "kernel"])
def test_rings_side_by_side(worlds: Worlds, fault: Callable[[], object]) -> None:
    """Of two rings one fails; the other does not care."""
    *first, other, _ = worlds.run(4, go_on_beside, fault)
    assert [fate.ended for fate in (*first, other)] == ["returned"] * 3
    assert [fate.value for fate in first] == [None, None]
    assert other.value.kind == "RingError"
    assert other.value.fields["ring"] == (2, 3)


def go_on_beside(log: Log, fault: Callable[[], object]) -> Failure | None:
    """What steps of training raise, on two rings of which the last rank has a fault."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["cp"]
    with at_launch("backward", 1, fault) if dist.get_rank() == 3 else nullcontext():
        try:
            errors = [step(CALL, plain, mesh, training=True) for _ in range(20)]
        except RuntimeError as error:
            return failure_of(error)
    assert max(errors) <= CALL.tolerance
    return None
