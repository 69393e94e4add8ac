"""Seconds of collectives by hand, on a machine of round numbers."""

from __future__ import annotations

import pytest

from dtensor_ring.lab.training.collectives import (
    RankGroup,
    all_reduce_seconds,
    collective_seconds,
    rank_group,
    strided,
)
from tests.lab.machines import round_machine

# 4 ranks on a host; inside 100 B/s and 1 s, between 10 B/s and 2 s.
MACHINE = round_machine(ranks_per_host=4)


@pytest.mark.parametrize(
    ("ranks", "stride", "group"),
    [
        (4, 1, RankGroup(4, 4)),
        (8, 1, RankGroup(8, 4)),
        (8, 2, RankGroup(8, 2)),
        (2, 4, RankGroup(2, 1)),
        (3, 8, RankGroup(3, 1)),
    ],
)
def test_ranks_of_a_host(ranks: int, stride: int, group: RankGroup) -> None:
    assert rank_group(MACHINE, ranks, stride) == group
    assert strided(MACHINE, stride).ranks_per_host >= group.per_host


@pytest.mark.parametrize(
    ("group", "seconds"),
    [
        (RankGroup(1, 1), 0),
        # 300 of 400 bytes at 100 B/s.
        (RankGroup(4, 4), 1 + 3),
        # Half of 400 bytes leaves the host, a quarter of that by each of the four ports.
        (RankGroup(8, 4), 2 + 5),
        # With one rank on a host, 200 bytes go by one port.
        (RankGroup(2, 1), 2 + 20),
        # Two more hosts add the latency of two messages.
        (RankGroup(4, 1), 2 + 30 + 2 * 2),
    ],
)
def test_seconds(group: RankGroup, seconds: float) -> None:
    for kind in ("all_gather", "reduce_scatter"):
        assert collective_seconds(MACHINE, group, kind, 400) == pytest.approx(seconds)
    assert all_reduce_seconds(MACHINE, group, 400) == pytest.approx(2 * seconds)
    assert collective_seconds(MACHINE, group, "all_gather", 0) == 0


def test_slow_links_inside_decide() -> None:
    machine = round_machine(ranks_per_host=4, inside=1.0)
    # 350 of 400 bytes pass through each rank, at 1 B/s.
    assert collective_seconds(machine, RankGroup(8, 4), "all_gather", 400) == 1 + 350
