"""The page on failures has the rows of the suite, and says what the suite asks for."""

from __future__ import annotations

import re

from tests.faults.decoding import DECODED
from tests.faults.differences import DIFFERENCES
from tests.faults.page import NOT_TRIED, RIGHT, SAME, SHOWN, rows
from tests.faults.test_faults import FAULTS
from tests.faults.test_nccl_alone import SUITED


def test_differences() -> None:
    listed = {name: cells for name, *cells in rows("differences")}
    assert list(listed) == list(DIFFERENCES)
    for name, (training, inference, alone) in listed.items():
        reported = training, training if inference == SAME else inference
        for text, is_training in zip(reported, (True, False), strict=True):
            pattern = DIFFERENCES[name].expected(is_training)
            assert text == RIGHT if pattern is None else re.search(pattern, text), (name, text)
        assert alone == (SAME if name in SUITED else NOT_TRIED), (name, alone)


def test_decoding() -> None:
    listed = {name: cells for name, *cells in rows("decoding")}
    assert list(listed) == list(DECODED)
    for name, (text, alone) in listed.items():
        assert re.search(DECODED[name].reported or "", text), (name, text)
        assert alone == (SAME if name in SUITED else NOT_TRIED), (name, alone)


def test_faults() -> None:
    listed = {name: cells for name, *cells in rows("faults")}
    assert list(listed) == list(SHOWN)
    for name, (_, others, alone) in listed.items():
        assert re.search(FAULTS[name].reported, others), (name, others)
        assert alone == SAME, (name, alone)
