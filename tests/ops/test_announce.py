"""The first attention of an axis says what it runs as."""

from __future__ import annotations

import logging

import pytest
import torch

from dtensor_ring import Mask
from dtensor_ring.compute.kernels import Scores
from dtensor_ring.ops.options import Batch, Call, Place, flatten
from dtensor_ring.ops.ring_op import ring_op
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
