"""Strategies: their specs, and which attentions they can run."""

from __future__ import annotations

import pytest

from dtensor_ring.planning.route import ROUTES
from dtensor_ring.planning.strategy import Strategy, as_strategy, check_strategy, why_not

SPECS = {
    **{name: Strategy(1, name) for name in ROUTES},
    "ulysses": Strategy(8),
    "ulysses:8": Strategy(8),
    "ulysses:1": Strategy(),
    "ulysses:4": Strategy(4),
    "ulysses:2+around": Strategy(2, "around"),
    "ulysses:4+all_gather": Strategy(4, "all_gather"),
    "ulysses+all_gather": Strategy(8),
    "ulysses:1+direct": Strategy(1, "direct"),
}
"""For an axis of 8 ranks."""


@pytest.mark.parametrize("spec", SPECS)
def test_specs(spec: str) -> None:
    found = as_strategy(spec, 8)
    assert found == SPECS[spec]
    assert as_strategy(found.spec, 8) == found
    check_strategy(spec)


UNKNOWN = ["", "tree", "ulysses:", "ulysses:0", "ulysses:-2", "ulysses:x", "ulysses:²", "ring+ring"]
UNKNOWN += ["ring:2", "ulysses:2+", "ulysses:2+tree", "ulysses:2+ring+ring", "Ulysses", "+ring"]


@pytest.mark.parametrize("spec", UNKNOWN)
def test_unknown_specs(spec: str) -> None:
    for check in (check_strategy, lambda spec: as_strategy(spec, 4)):
        with pytest.raises(ValueError, match=r"known strategies: ring, .*all_gather, ulysses"):
            check(spec)


@pytest.mark.parametrize("spec", [None, 4, b"ring"])
def test_what_is_no_spec(spec: object) -> None:
    with pytest.raises(TypeError, match=f"strategy must be a name, a str, got {spec!r}"):
        as_strategy(spec, 4)  # type: ignore[arg-type]


def test_groups_that_do_not_divide_the_axis() -> None:
    fitting = "do not divide the 6 of the axis; these do: ulysses:2, ulysses:3, ulysses:6"
    with pytest.raises(ValueError, match=fitting):
        as_strategy("ulysses:4", 6)
    with pytest.raises(ValueError, match="these do: ring"):
        as_strategy("ulysses:2", 1)


REASONS = {
    "ring": ((1, 4, 4), None),
    "as many as ranks": ((4, 4, 2), None),
    "one key head": ((4, 4, 1), None),
    "uneven": ((8, 28, 4), None),
    "too few": ((4, 3, 3), "3 query heads cannot be sharded over the 4 ranks of a group"),
}


@pytest.mark.parametrize("case", REASONS)
def test_why_not(case: str) -> None:
    (group, *heads), reason = REASONS[case]
    found = why_not(Strategy(group), *heads)
    assert found == reason or (reason and found and found.startswith(reason))
