"""cuDNN's ops with windows and packed sequences: what the tests of all adapters leave open."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from dtensor_ring import Contiguous, Mask, ZigZag
from dtensor_ring.compute.kernels import KERNELS, cudnn_sdpa
from dtensor_ring.compute.kernels.reference import Reference
from tests import sdpa_package
from tests.package_sources import arguments_of, parsed, plain_arguments
from tests.packages import packages
from tests.rings import Case as RingCase
from tests.rings import Ring
from tests.segments import PACKED, SegmentsCase, check_segments
from tests.test_played import Played, check_ring
from tests.tiles import CAUSAL, Case, check_tile

__all__ = ["packages"]  # a fixture

pytestmark = pytest.mark.usefixtures("packages")

SDPA = KERNELS["cudnn_sdpa"]


@pytest.mark.parametrize(
    ("case", "is_served"),
    [
        (Case(9, 8, Mask(2, 1)), False),
        (Case(9, 8, Mask(None, 1)), True),
        (Case(8, 8, Mask(2, 1)), True),
        (Case(8, 9, Mask(2, 1)), True),
        (Case(1, 9), False),
        (Case(9, 1), False),
    ],
)
def test_tiles_that_cudnn_does_not_take(
    case: Case, is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a single query or key, and windows of more queries than keys."""
    called: list[object] = []

    def others(query: Any, value: Any) -> Reference:
        called.append(query)
        return Reference()

    monkeypatch.setattr(cudnn_sdpa, "flash_or_reference", others)
    check_tile(SDPA, case, "cpu")
    assert len(called) == (0 if is_served else 2)


@pytest.fixture
def graphs() -> Iterator[set[tuple[Any, ...]]]:
    """Those that packed sequences would need."""
    sdpa_package.GRAPHS.clear()
    yield sdpa_package.GRAPHS
    sdpa_package.GRAPHS.clear()


def test_other_documents_need_few_other_graphs(graphs: set[tuple[Any, ...]]) -> None:
    """Forward and backward have one each; one takes cuDNN a tenth of a second or more."""
    generator = Random(0)
    for _ in range(40):
        cuts = (0, *sorted(generator.sample(range(1, 512), generator.randint(9, 15))), 512)
        check_segments(SDPA, SegmentsCase(cuts, cuts, CAUSAL), "cpu")
    assert len(graphs) <= 2 * 10


def test_segments_are_rounded_once() -> None:
    segments = PACKED["gaps"].launch.segments
    assert segments is not None
    assert cudnn_sdpa._rounded(segments) is cudnn_sdpa._rounded(segments)
    assert cudnn_sdpa._rounded(segments).rows == (0, 4, 4, 9, 15, 15, 15, 15, 15)


@pytest.mark.parametrize("layout", [Contiguous(), ZigZag()])
def test_rings_of_windows(layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SDPA.__class__, "missing", lambda self: None)
    ring = Ring(layout, 2, 256, Mask.sliding(40))
    for case in (RingCase(ring), RingCase(replace(ring, documents=((0, 50, 51, 180, 256),)))):
        check_ring(case, Played("cudnn_sdpa", "cpu", torch.float32), monkeypatch)


def test_schemas_are_those_of_the_package() -> None:
    tree = parsed("cudnn", "sdpa/fwd/torch_op.py", "nvidia-cudnn-frontend")
    calls = [x for x in ast.walk(tree) if isinstance(x, ast.Call)]
    defined = [x.args[0] for x in calls if ast.unparse(x.func) == "_lib.define"]
    found = [ast.literal_eval(x) for x in defined]
    assert found == [f"{name}{schema}" for name, schema in sdpa_package.SCHEMAS.items()]
    (function,) = [
        x.args
        for x in ast.walk(tree)
        if isinstance(x, ast.FunctionDef) and x.name == cudnn_sdpa.PADDED
    ]
    assert plain_arguments(function) == arguments_of(sdpa_package.PADDED)
