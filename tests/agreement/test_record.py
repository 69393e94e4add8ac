"""Words: what differs is named, and messages of calls that differ have other tags."""

from __future__ import annotations

import pytest

from dtensor_ring.agreement.call_record import (
    MAX_BYTES,
    CallRecord,
    CallSite,
    differences,
    reason_of,
)
from dtensor_ring.transport.transport import ABORT_TAG

FIELDS = {"scale": "0.5", "mask": "Mask(left=None, right=0)", "cu_seqlens": "[0, 3, 8]"}


@pytest.mark.parametrize(
    ("fields", "number", "forward_call", "expected"),
    [
        (FIELDS, 7, 3, []),
        (FIELDS | {"scale": "0.25"}, 7, 3, [("scale", "0.5", "0.25")]),
        (FIELDS | {"a": "ü"}, 7, 3, [("a", "none", "ü")]),
        (FIELDS, 8, 3, [("number of the call", "7", "8")]),
        (FIELDS, 7, 2, [("backward of call number", "3", "2")]),
    ],
)
def test_differences_are_named(
    fields: dict[str, str], number: int, forward_call: int, expected: list[tuple[str, str, str]]
) -> None:
    one, other = CallRecord(FIELDS), CallRecord(fields)
    mine, theirs = one.message(7, 3), other.message(number, forward_call)
    assert differences(mine, theirs) == expected
    assert differences(mine + b"data", theirs + b"other data") == expected


def test_what_does_not_fit_counts_too() -> None:
    one, other = (CallRecord({"cu_seqlens": "1, " * 4000 + end}) for end in ("5", "6"))
    assert len(one.message(1, 0)) == len(other.message(1, 0)) == MAX_BYTES
    (found,) = differences(one.message(1, 0), other.message(1, 0))
    assert found[0] == "what does not fit into the record"
    assert differences(one.message(1, 0), one.message(1, 0)) == []


def test_call_sites_are_named() -> None:
    one, other, unknown = (
        CallRecord(FIELDS).message(1, 0, CallSite(*where))
        for where in (("a.py:1 in f", "0", "R, S(2)"), ("x" * 200, "y" * 200 + "1", "S(2)"), ())
    )
    differing = [("call site", "a.py:1 in f", "x" * 96), ("layer", "0", "y" * 63 + "1")]
    differing += [("placements", "R, S(2)", "S(2)")]
    assert differences(one, other) == differing
    assert differences(one, unknown) == differences(unknown, one) == []


def test_tags_differ() -> None:
    record_works = [CallRecord(FIELDS), CallRecord(FIELDS | {"scale": "0.25"})]
    tags = [
        x.tag(number, forward_call)
        for x in record_works
        for number in range(50)
        for forward_call in range(50)
    ]
    assert len(set(tags)) == len(tags)
    assert all(0 <= tag < ABORT_TAG for tag in tags), "records and aborts have tags of their own"
    assert CallRecord(FIELDS).tag(3, 1) == record_works[0].tag(3, 1), "those of one call are alike"


@pytest.mark.parametrize(
    ("text", "waited", "reason"),
    [
        ("Timed out waiting 3000ms", 0.5, "the time limit of the group is over"),
        ("Connection closed by peer", 0.5, "its connection is closed"),
        ("Connection closed by peer", 3.0, "the time limit of the group is over"),
    ],
)
def test_a_connection_that_closes_at_the_time_limit(text: str, waited: float, reason: str) -> None:
    """The rank that closed it has waited as long."""
    assert reason_of(RuntimeError(text), waited, limit=3.0).startswith(reason)
