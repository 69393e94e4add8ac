"""The launches of a step."""

from __future__ import annotations

from unittest.mock import NonCallableMock

import torch

from dtensor_ring.compute.accumulate import RunningOutput
from dtensor_ring.compute.execute import forward_step
from dtensor_ring.compute.kernels import Scores
from dtensor_ring.compute.trace import Label
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.plan import Step
from dtensor_ring.planning.tile import FULL, Tile


def test_kernels_get_no_empty_batch() -> None:
    """Which some take for an error, and others return nothing for."""
    query = torch.empty(0, 2, 4, 8)
    step = Step(0, 0, Cols(((0, 4),)), (Tile((0, 4), (0, 4), FULL),))
    kernel, scores = NonCallableMock(has_segments=False), Scores(FULL, 1.0)
    running = RunningOutput(query, 8)
    label = Label("forward", 0, 0)
    forward_step(step, query, (query, query), running, kernel, scores, label)
    assert running.result()[0].shape == query.shape
