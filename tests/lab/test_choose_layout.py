"""The layout that is chosen takes least time, as simulations of each layer say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dtensor_ring import Mask, choose_layout
from dtensor_ring.lab.choose import choose
from dtensor_ring.lab.simulated_attention import simulate_attention
from tests.forced import machine_for

CAUSAL, WINDOW = Mask.causal(), Mask.sliding(7)
SIZES: dict[str, Any] = {"heads": (4, 2), "head_dim": 8, "dtype": "float32"}
FAST_LINKS = machine_for("ring")

CASES = {
    "causal": ([CAUSAL], "ring", "zigzag"),
    "full, a tie": ([Mask.full()], "ring", "contiguous"),
    "window": ([WINDOW], "ring", "contiguous"),
    "one causal layer of six": ([WINDOW] * 5 + [CAUSAL], "ring", "zigzag"),
    "each layer by its own strategy": ([WINDOW, CAUSAL], "auto", "zigzag"),
}


@pytest.mark.parametrize("name", CASES)
def test_least_time_of_all_layers(name: str) -> None:
    masks, strategy, expected = CASES[name]
    how: dict[str, Any] = SIZES | {"machine": FAST_LINKS}
    found = choose_layout(masks if len(masks) > 1 else masks[0], 250, 4, strategy=strategy, **how)
    assert found == expected
    of = {x: _total(masks, x, strategy, how) for x in ("contiguous", "zigzag")}
    assert of[found] <= min(of.values()) * (1 + 1e-6)


def _total(masks: Sequence[Mask], layout: str, strategy: str, how: dict[str, Any]) -> float:
    """Seconds of all layers, one by one, of the padded length."""
    total = 0.0
    for mask in masks:
        asked: tuple[Any, ...] = mask, 256, 4
        one: Any = choose(*asked, layout=layout, **how) if strategy == "auto" else strategy
        total += simulate_attention(*asked, layout=layout, strategy=one, **how).total
    return total


REFUSED = [
    (([], 256, 4), {}, ValueError, "there are none"),
    ((CAUSAL, 256, 0), {}, ValueError, "world_size"),
    ((CAUSAL, 256, 4), {"strategy": "tree"}, ValueError, "unknown strategy 'tree'"),
    ((CAUSAL, 256, 4), {"machine": "h1"}, ValueError, "neither a file that can be read"),
    ((CAUSAL, 256, 4), {"machine": 3}, TypeError, "machine must be"),
]


@pytest.mark.parametrize(("asked", "how", "error", "message"), REFUSED)
def test_refused(asked: Any, how: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        choose_layout(*asked, **how)
