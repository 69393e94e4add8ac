"""Ranks that decode over caches: each is right, or all raise what differs."""

from __future__ import annotations

import pytest

from tests.faults.decoding import CACHES, DECODED, Decoding, decode_as
from tests.faults.test_differences import check_fates
from tests.faults.worlds import Worlds


@pytest.mark.parametrize("how", CACHES)
def test_equal_calls(worlds: Worlds, how: str) -> None:
    cases = (Decoding(how),) * 3
    check_fates(worlds.run(3, decode_as, cases), cases, None)


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("name", DECODED)
def test_different_calls(worlds: Worlds, name: str, odd: int) -> None:
    difference = DECODED[name]
    cases = difference.by_rank(Decoding(), 3, odd)
    spared = [odd] if difference.spares_rank_0 else []
    check_fates(worlds.run(3, decode_as, cases), cases, difference.reported, spared)
