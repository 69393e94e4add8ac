"""Words: what differs is named, and messages of calls that differ have other tags."""

from __future__ import annotations

import pytest

from dtensor_ring.agreement.record import MAX_BYTES, Where, Word, differences
from dtensor_ring.transport.transport import ABORT_TAG

FIELDS = {"scale": "0.5", "mask": "Mask(left=None, right=0)", "cu_seqlens": "[0, 3, 8]"}


@pytest.mark.parametrize(
    ("fields", "number", "origin", "expected"),
    [
        (FIELDS, 7, 3, []),
        (FIELDS | {"scale": "0.25"}, 7, 3, [("scale", "0.5", "0.25")]),
        (FIELDS | {"a": "ü"}, 7, 3, [("a", "none", "ü")]),
        (FIELDS, 8, 3, [("number of the call", "7", "8")]),
        (FIELDS, 7, 2, [("backward of call number", "3", "2")]),
    ],
)
def test_differences_are_named(
    fields: dict[str, str], number: int, origin: int, expected: list[tuple[str, str, str]]
) -> None:
    one, other = Word(FIELDS), Word(fields)
    mine, theirs = one.message(7, 3), other.message(number, origin)
    assert differences(mine, theirs) == expected
    assert differences(mine + b"data", theirs + b"other data") == expected


def test_what_does_not_fit_counts_too() -> None:
    one, other = (Word({"cu_seqlens": "1, " * 4000 + end}) for end in ("5", "6"))
    assert len(one.message(1, 0)) == len(other.message(1, 0)) == MAX_BYTES
    (found,) = differences(one.message(1, 0), other.message(1, 0))
    assert found[0] == "what does not fit into a word"
    assert differences(one.message(1, 0), one.message(1, 0)) == []


def test_places_are_named() -> None:
    one, other, unknown = (
        Word(FIELDS).message(1, 0, Where(*where))
        for where in (("a.py:1 in f", "0", "R, S(2)"), ("x" * 200, "y" * 200 + "1", "S(2)"), ())
    )
    differing = [("place of the call", "a.py:1 in f", "x" * 96), ("layer", "0", "y" * 63 + "1")]
    differing += [("placements", "R, S(2)", "S(2)")]
    assert differences(one, other) == differing
    assert differences(one, unknown) == differences(unknown, one) == []


def test_tags_differ() -> None:
    words = [Word(FIELDS), Word(FIELDS | {"scale": "0.25"})]
    tags = [x.tag(number, origin) for x in words for number in range(50) for origin in range(50)]
    assert len(set(tags)) == len(tags)
    assert all(0 <= tag < ABORT_TAG for tag in tags), "words and aborts have tags of their own"
    assert Word(FIELDS).tag(3, 1) == words[0].tag(3, 1), "those of one call are alike"
