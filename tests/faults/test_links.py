"""Hosts whose cable is pulled out: all ranks are told when the time limit of the group is over."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from time import sleep

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.network import Hosts, hosts
from dtensor_ring import Mask
from tests.faults.breaking import at_launch
from tests.faults.calls import Call, make, plain, step
from tests.faults.worlds import LIMITED, Failure, Home, Log, Terms, Worlds, failure_of
from tests.scripts import run_launchers
from tests.test_public import ROOT

VICTIM, WORLD_SIZE = 1, 3
BRIEF = 0.5
"""Seconds that TCP makes good: it sends again."""
CALL = Call(mask=Mask.full(), kernel="reference", seq_len=192, head_dim=64)


@pytest.fixture(scope="module")
def network() -> Iterator[Hosts]:
    try:
        with hosts(WORLD_SIZE) as made:
            yield made
    except RuntimeError as error:
        pytest.skip(f"no network of its own: {error}")


@pytest.fixture(scope="module")
def apart(network: Hosts) -> Iterator[Worlds]:
    """Ranks on a host each."""
    worlds = Worlds([Home(name, network.address(0)) for name in network.names])
    yield worlds
    worlds.close()


def test_torchrun_on_two_hosts(network: Hosts) -> None:
    """The first line of the page on clusters, as it is there."""
    page = (ROOT / "docs/clusters.md").read_text()
    line = page.partition("```shell\n")[2].partition("```")[0]
    assert line.startswith("torchrun --nnodes 2 ")
    commands = {}
    for index, name in enumerate(network.names[:2]):
        where = {"HEAD": network.address(0), "ADDRESS": network.address(index), "GPUS": "1"}
        where |= {"IS_HEAD": str(int(not index))}
        shell = ["bash", "-c", f"printf '%s\\0' {line}"]
        said = subprocess.run(shell, env=where, check=True, capture_output=True, text=True).stdout
        torchrun, *argv = said.split("\0")[:-1]
        assert torchrun == "torchrun"
        commands[name] = ["torch.distributed.run", *argv]
    runs = run_launchers(commands, cwd=ROOT)
    assert [run.code for run in runs] == [0, 0], runs
    # Which host has rank 0 is up to the rendezvous.
    (reported,) = [run.printed for run in runs if run.printed]
    assert reported.startswith("world size 2, ")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_pulled_out(network: Hosts, apart: Worlds, tmp_path: Path, direction: str) -> None:
    def pull() -> None:
        network.connect(VICTIM, False)
        (tmp_path / "pulled").touch()

    terms = LIMITED._replace(on={"pull": pull})
    fates = apart.run(WORLD_SIZE, lose_link, direction, tmp_path / "pulled", terms=terms)
    network.connect(VICTIM)
    for fate in fates:
        assert fate.ended == "returned", fate
        failure = fate.value
        assert failure is not None
        assert failure.kind == "RingError", failure.text
        assert failure.fields["direction"] == direction
        assert f"step {failure.fields['step']}" in failure.text
        assert failure.fields["peer"] in range(WORLD_SIZE)
        assert "the time limit of the group is over" in failure.text
        assert fate.events["told"] > fates[VICTIM].events["pull"]
    check_new_world(apart)


def test_pulled_out_briefly(network: Hosts, apart: Worlds, tmp_path: Path) -> None:
    def pull() -> None:
        network.connect(VICTIM, False)
        (tmp_path / "pulled").touch()
        sleep(BRIEF)
        network.connect(VICTIM)

    given, terms = ("forward", tmp_path / "pulled"), Terms(on={"pull": pull})
    fates = apart.run(WORLD_SIZE, lose_link, *given, terms=terms)
    assert [fate.ended for fate in fates] == ["returned"] * WORLD_SIZE, fates
    assert [fate.value for fate in fates] == [None] * WORLD_SIZE
    check_new_world(apart)


def check_new_world(worlds: Worlds) -> None:
    fates = worlds.run(WORLD_SIZE, make, (CALL,) * WORLD_SIZE, ("plain",) * WORLD_SIZE, True)
    assert all(fate.value.is_right(CALL) for fate in fates), fates


def lose_link(log: Log, direction: str, pulled: Path) -> Failure | None:
    """What two steps of training raise, after the cable of rank 1 was pulled out in the first."""
    mesh, is_victim = init_device_mesh("cpu", (WORLD_SIZE,)), dist.get_rank() == VICTIM

    def pull() -> None:
        log("pull")
        while not pulled.exists():
            sleep(0.01)

    with at_launch(direction, 0, pull) if is_victim else nullcontext():
        try:
            errors = [step(CALL, plain, mesh, training=True) for _ in range(2)]
        except RuntimeError as error:
            log("told")
            return failure_of(error)
    assert max(errors) <= CALL.tolerance
    return None
