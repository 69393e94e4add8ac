"""A cable that is pulled out, and a rank of two groups that dies: all others are told."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.network import Hosts, hosts
from dtensor_ring import Mask
from tests.faults.breaking import at_call, at_launch, kill, stop
from tests.faults.calls import Call, make, plain, step
from tests.faults.worlds import LIMITED, USUAL, Failure, Home, Log, Terms, Worlds, failure_of
from tests.huggingface.generation.generating import sharded
from tests.huggingface.serving.workloads import GREEDY, prompt_of
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


# A rank of two groups dies while requests are served: the others are told, and none waits.

PREFILL, DECODE = (0, 1), (2, 3)


def suffer(log: Log, victim: int, fault: Callable[[], object]) -> Any:
    """Serve requests until a rank is struck before a forward; what this rank is told."""
    from transformers import ContinuousBatchingConfig

    from parallel_plans.huggingface.serving.pooled_forward import PooledForward
    from parallel_plans.huggingface.serving.two_groups import RequestsHandedBack

    meshes = [DeviceMesh("cpu", [*ranks]) for ranks in (PREFILL, DECODE)]
    model = sharded("Llama")
    config = ContinuousBatchingConfig(page_size=4, num_blocks=30, max_requests_per_batch=1)
    batch = model.init_continuous_batching(None, config, prefill=meshes[0], decode=meshes[1])
    batch.add_requests([prompt_of(i, 9 + i) for i in range(3)], max_new_tokens=4, **GREEDY)

    def strike() -> None:
        log("fault")
        fault()

    try:
        if dist.get_rank() == victim:
            with at_call((PooledForward, "run"), 1, strike):
                list(batch)
        else:
            list(batch)
    except RequestsHandedBack as error:
        log("told")
        return [*error.not_started], str(error)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_is_killed(worlds: Worlds, victim: int) -> None:
    fates = worlds.run(4, suffer, victim, kill, terms=USUAL)
    assert fates[victim].ended == "SIGKILL"
    for rank, fate in enumerate(fates):
        if rank != victim:
            assert fate.ended == "returned", fate.value
            waiting, text = fate.value
            assert waiting in (["req_1", "req_2"], ["req_2"])
            assert "Requests that have not started: req_" in text


def test_a_rank_is_stopped(worlds: Worlds) -> None:
    """Longer than the groups wait."""
    victim = 3
    fates = worlds.run(4, suffer, victim, stop, terms=LIMITED)
    for rank, fate in enumerate(fates):
        if rank != victim:
            assert fate.ended == "returned", fate.value
            assert fate.value is not None
