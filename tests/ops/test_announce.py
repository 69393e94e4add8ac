"""What attention says of an axis and a batch: once, and with a warning where it is slow."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch

from dtensor_ring import Mask, Slices
from dtensor_ring.compute.kernels import Scores
from dtensor_ring.ops import checks
from dtensor_ring.ops.checks import CALLER, MANY, warn_of_boundaries, warn_of_tiles
from dtensor_ring.ops.options import Batch, Call, Place, PlanRequest, flatten
from dtensor_ring.ops.ring_op import ring_op
from dtensor_ring.planning.mask import as_documents
from dtensor_ring.planning.plan import plan
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.planning.strategy import Strategy
from tests.played_group import PlayedGroup, play_group

LINE = (
    "ring attention on rank {} of [0, 1]: kernel cpu_flash, layout zigzag, strategy ring, "
    "64 tokens, 2 steps, receives {} tokens ({} MiB) forward"
)


@pytest.mark.parametrize(
    ("level", "num_calls", "expected"),
    [(logging.WARNING, 1, []), (logging.INFO, 2, ["INFO"]), (logging.DEBUG, 2, ["INFO", "DEBUG"])],
)
def test_once_for_each_axis(
    level: int, num_calls: int, expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(level, "dtensor_ring")

    def run(group: PlayedGroup) -> None:
        query, key = torch.randn(1, 8, 32, 256), torch.randn(1, 4, 32, 256)
        place = Place("zigzag", "ring", 64, 64, group.group_name)
        call = Call(Batch(), Scores(Mask.causal(), 1.0, kernel="cpu_flash"), place)
        for _ in range(num_calls):
            ring_op(query, key, key, *flatten(call))

    play_group(2, run)
    # Nobody sees the last tokens, which are rank 0's.
    lines = {LINE.format(0, 32, "0.2"): 0, LINE.format(1, 16, "0.1"): 1}
    for line in lines:
        found = [record.levelname for record in caplog.records if record.message == line]
        assert found == expected, caplog.text
    assert len(caplog.records) == 2 * len(expected)


# Layouts that scatter documents, and boundaries of a shard, are warned of, others are not.

CAUSAL, SEQ_LEN = Mask.causal(), 2**14


def asked(layout: str, num_documents: int, world_size: int, as_slices: bool = False) -> PlanRequest:
    ends = [*range(0, SEQ_LEN, SEQ_LEN // num_documents), SEQ_LEN]
    documents = None if as_slices else as_documents(ends)
    slices = Slices.documents(ends, CAUSAL) if as_slices else None
    mask = Mask.full() if as_slices else CAUSAL
    where = as_layout(layout), mask, 0, world_size, SEQ_LEN, documents
    return PlanRequest(*where, SEQ_LEN, None, Strategy(), slices)


def warned(request: PlanRequest) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        warn_of_tiles(plan(*request), request)
    return [str(x.message) for x in caught]


@pytest.mark.parametrize("as_slices", [False, True], ids=["documents", "slices"])
@pytest.mark.parametrize(
    ("layout", "num_documents", "world_size", "expected"),
    [
        ("striped", 256, 8, "layout 'striped' cuts this attention into over 2,048 tiles"),
        ("striped", 64, 8, None),
        ("striped", 2048, 1, None),
        ("zigzag", 2048, 2, None),
        ("contiguous", 2048, 2, None),
    ],
)
def test_more_tiles_than_documents(
    layout: str, num_documents: int, world_size: int, expected: str | None, as_slices: bool
) -> None:
    request = asked(layout, num_documents, world_size, as_slices)
    (text,) = warned(request) or [None]
    assert (text is None) == (expected is None)
    if expected:
        assert text.startswith(f"the {expected}")
        assert "'balanced'" in text


def test_a_line_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = [asked("striped", n, 8) for n in (256, 255, 200, 512)]
    reported = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for place in ("train.py:7 in step", "train.py:9 in step"):
            monkeypatch.setattr(checks, "line_of", lambda _, place=place: place)
            for request in questions:
                assert sum(len(x.tiles) for x in plan(*request).steps) > MANY
                warn_of_tiles(plan(*request), request)
            reported.append(len(caught))
    assert reported == [3, 6], "once for each power of two"
    assert str(caught[0].message).startswith("train.py:7 in step: the layout")


@pytest.mark.parametrize(
    ("ends", "world_size", "layer", "is_warned"),
    [
        ((0, 20, 32), 2, "", True),
        ((0, 10, 16), 4, "", True),
        ((0, 20, 32), 1, "", False),
        ((0, 20, 33), 2, "", False),
        ((0, 20, 64), 2, "", False),
        ((0, 20, 32), 2, "layers.0", False),  # of a plan, from a padded batch
    ],
)
def test_boundaries_that_end_as_a_shard(
    monkeypatch: pytest.MonkeyPatch,
    ends: tuple[int, ...],
    world_size: int,
    layer: str,
    is_warned: bool,
) -> None:
    monkeypatch.setattr(CALLER, "layer", layer)
    where = as_layout("zigzag"), CAUSAL, 0, world_size, 64, as_documents(ends)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        warn_of_boundaries(PlanRequest(*where, 64, None, Strategy()))
    texts = [str(x.message) for x in caught]
    assert bool(texts) == is_warned
    if is_warned:
        assert f"is {ends[-1]}, the length of a rank's shard" in texts[0]
