"""When kernels and collectives run, next to what a hand computes."""

from __future__ import annotations

import pytest

from dtensor_ring.lab.training.collectives import (
    COLLECTIVE,
    COMPUTE,
    Task,
    UnitSeconds,
    fsdp_tasks,
    run_streams,
)


def _ends(units: list[UnitSeconds], *factors: float) -> dict[str, float]:
    spans = run_streams(fsdp_tasks(units), *factors)
    found: dict[str, float] = {}
    for span in spans:
        # A layer is gathered twice: forward, then for its backward.
        name = span.label if span.label not in found else f"{span.label} again"
        found[name] = span.end
    return found


def _units(number: int, *seconds: float) -> list[UnitSeconds]:
    return [UnitSeconds(str(i), *seconds) for i in range(number)]


def test_collectives_hide_under_longer_kernels() -> None:
    """The first gather and the last reduction are exposed: 1 + 3 * 3 + 3 * 6 + 2."""
    found = _ends(_units(3, 3.0, 6.0, 1.0, 2.0))
    assert found["gather 1"] == 2  # with the kernels of layer 0, which begin at 1
    assert found["forward 2"] == 10
    assert found["gather 1 again"] == 11  # with the backward of layer 2
    assert found["reduce 2"] == 18
    assert found["gather 0 again"] == 19  # after the reduction: one communicator
    assert found["backward 0"] == 28
    assert found["reduce 0"] == 30


def test_kernels_wait_for_longer_collectives() -> None:
    """Forward: gathers follow one another. Backward: each layer waits for two collectives."""
    found = _ends(_units(3, 1.0, 2.0, 4.0, 5.0))
    assert [found[f"forward {i}"] for i in range(3)] == [5, 9, 13]
    assert found["backward 2"] == 15
    assert found["gather 1 again"] == 17
    assert found["reduce 2"] == 22
    assert found["gather 0 again"] == 26
    assert found["backward 1"] == 19
    assert found["reduce 1"] == 31
    assert found["backward 0"] == 28
    assert found["reduce 0"] == 36


def test_without_gathers_only_reductions_are_left() -> None:
    """As with replicas alone: kernels never wait, reductions of 5 follow one another."""
    found = _ends(_units(3, 1.0, 2.0, 0.0, 5.0))
    assert "gather 0" not in found
    assert found["backward 0"] == 3 + 6
    assert found["reduce 0"] == 5 + 15


def test_a_single_rank_only_computes() -> None:
    spans = run_streams(fsdp_tasks(_units(2, 1.0, 2.0, 0.0, 0.0)))
    assert [span.end for span in spans] == [1, 2, 4, 6]


@pytest.mark.parametrize(
    ("factors", "ends"),
    [
        # Kernels of 4 and a transfer of 3 that begin together.
        ((1.0, 1.0), (4.0, 3.0)),
        # Kernels advance by half for 3 seconds, so 2.5 are left.
        ((2.0, 1.0), (5.5, 3.0)),
        # The transfer advances by two thirds for 4 seconds, and has a third of a second left.
        ((1.0, 1.5), (4.0, 4 + 1 / 3)),
        # Kernels at half of their speed for 4.5 seconds, in which the transfer ends.
        ((2.0, 1.5), (4.5 + 1.75, 4.5)),
    ],
)
def test_streams_slow_each_other(factors: tuple[float, float], ends: tuple[float, float]) -> None:
    tasks = [Task("kernels", COMPUTE, 4.0), Task("transfer", COLLECTIVE, 3.0)]
    assert [span.end for span in run_streams(tasks, *factors)] == pytest.approx(ends)


def test_tasks_that_wait_for_one_another() -> None:
    tasks = [Task("a", COMPUTE, 1.0, (1,)), Task("b", COLLECTIVE, 1.0, (0,))]
    with pytest.raises(ValueError, match="none can begin"):
        run_streams(tasks)
