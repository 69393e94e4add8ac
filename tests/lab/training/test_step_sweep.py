"""Sweeps of simulated steps, and which strategy wins where."""

from __future__ import annotations

from typing import Any

import pytest

from dtensor_ring.lab.presets import as_machine
from dtensor_ring.lab.training.step import simulate_step
from dtensor_ring.lab.training.step_sweep import (
    link_rate,
    parse_sweep,
    sweep_steps,
    winner_map,
    with_rate,
)
from dtensor_ring.planning.strategy import every_strategy

CONFIG = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 4096}
CONFIG |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
ASKED: dict[str, Any] = {"config": CONFIG, "seq_len": 16384, "mesh": {"cp": 8}, "machine": "h100"}
H100 = as_machine("h100")


def test_ranks_stay_and_dp_takes_the_rest() -> None:
    rows = sweep_steps({"cp": [1, 2, 4, 8, 3]}, **ASKED).rows
    for row, dp in zip(rows, (8, 4, 2, 1), strict=False):
        cp = row.values["cp"]
        expected = simulate_step(**(ASKED | {"mesh": {"dp": dp, "cp": cp}}))
        assert row.step is not None
        assert row.step.as_json() == expected.as_json()
    assert rows[4].step is None
    assert rows[4].why_not == "3 ranks of the other axes do not divide 8"


def test_all_strategies() -> None:
    found = sweep_steps({"strategy": ["all"], "cp": [1, 8]}, **ASKED)
    specs = [row.values["strategy"] for row in found.rows]
    assert specs == ["ring", *(x.spec for x in every_strategy(8))]
    lines = str(found).splitlines()
    assert lines[0].split() == ["strategy", "cp", "ms", "MFU", "tokens/s", "waits,", "ms", "GiB"]
    assert len(lines) == len(specs) + 1
    for line, row in zip(lines[1:], found.rows, strict=True):
        if row.why_not is None:
            assert row.step is not None
            assert f"{row.step.seconds * 1e3:,.1f}" in line
    assert lines[-1].endswith(
        "4 query heads cannot be sharded over the 8 ranks of a group, each has to get one"
    )


def test_machines_and_sizes() -> None:
    rows = sweep_steps({"machine": ["h100", "b200"], "batch": [1, 2]}, **ASKED).rows
    steps = [row.step for row in rows]
    assert [x.machine for x in steps if x] == ["h100", "h100", "b200", "b200"]
    seconds = [x.seconds for x in steps if x]
    assert seconds[2] < seconds[0] < seconds[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (["pp=2"], "'pp=2' cannot be swept: cp=1,2,4 or one of dp_replicate"),
        (["cp"], "'cp' cannot be swept"),
        (["cp=1", "cp=2"], "'cp=2' cannot be swept"),
        (["cp=1,x"], "cp=x is not a number"),
    ],
)
def test_what_cannot_be_swept(text: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_sweep(text)


def test_links_of_another_speed() -> None:
    assert link_rate(H100.between) == pytest.approx(48e9, rel=1e-3)
    slower = with_rate(H100.inside, link_rate(H100.inside) / 4)
    for name in ("p2p", "all_to_all", "all_gather", "reduce_scatter"):
        before, after = getattr(H100.inside, name), getattr(slower, name)
        assert after(0.0) == before(0.0)
        assert after(2**28) - after(0.0) == pytest.approx(4 * (before(2**28) - before(0.0)))


def test_winners() -> None:
    """Each cell has the strategy of the shortest step, and how much shorter it is in attention."""
    tokens, rates = (1024, 16384), (10e9, 400e9)
    found = winner_map(CONFIG, {"cp": 4}, "h100", tokens, rates)
    assert found.level == "inside"
    assert found.strategies == tuple(x.spec for x in every_strategy(4))
    for count, winners, gains in zip(tokens, found.winners, found.gains, strict=True):
        for rate, winner, gain in zip(rates, winners, gains, strict=True):
            from dataclasses import replace

            machine = replace(H100, inside=with_rate(H100.inside, rate))
            seconds = []
            for strategy in found.strategies:
                step = simulate_step(CONFIG, 4 * count, {"cp": 4}, machine, strategy=strategy)
                seconds.append(sum(step.parts[x] for x in ("attention", "ring")))
            assert seconds[winner] == pytest.approx(min(seconds))
            assert gain == pytest.approx(seconds[0] / min(seconds))


def test_links_between_hosts_decide_across_them() -> None:
    found = winner_map(CONFIG, {"cp": 8, "tp": 2}, "h100", (1024,), (50e9,))
    assert found.level == "between"
    # Two query heads of a rank are too few for groups of four and eight.
    assert found.strategies[found.winners[0][0]] not in ("ulysses:4", "ulysses:8")


def test_without_an_axis_there_is_nothing_to_choose() -> None:
    with pytest.raises(ValueError, match="without cp in the mesh, there are no strategies"):
        winner_map(CONFIG, {"tp": 2}, "h100", (1024,), (50e9,))
