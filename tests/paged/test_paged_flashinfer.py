"""The adapter of FlashInfer, with a stand-in: results, how often it plans, and its signatures."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dtensor_ring import Mask
from dtensor_ring.compute.kernels import Problem, packages
from dtensor_ring.compute.kernels.kernel import Scores
from dtensor_ring.paged import api, paged_flashinfer
from dtensor_ring.paged.paged_flashinfer import WRAPPERS, PagedFlashInfer
from tests import flashinfer_package
from tests.flashinfer_package import Wrapper
from tests.package_sources import arguments_of, parsed, plain_arguments
from tests.paged.test_paged_triton import CASES
from tests.paged_attention import PagedCase, check_paged

KERNEL = PagedFlashInfer()
PROBLEM = Problem("cuda", torch.bfloat16, 64, 64)


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many wrappers there are, and how many plans they made."""
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_package.package())
    paged_flashinfer._WRAPPERS.clear()
    Wrapper.made[:] = [0, 0]
    yield Wrapper.made
    paged_flashinfer._WRAPPERS.clear()


@pytest.mark.parametrize(
    "case",
    [
        PagedCase(lengths=(30, 70, 3, 16)),
        PagedCase(lengths=(30, 70), world_size=2, num_tokens=5),
        PagedCase(lengths=(70, 60), mask=Mask.sliding(30), num_tokens=3),
        PagedCase(lengths=(30,), heads=(2, 2), softcap=1.5),
    ],
    ids=["decode", "ranks", "window", "softcap"],
)
def test_sequences(case: PagedCase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "paged_kernel", lambda *_: KERNEL)
    check_paged(replace(case, block=16, head_dims=(64, 64), dtype=torch.float32))


def test_a_plan_serves_all_layers(made: list[int]) -> None:
    """As long as the blocks are the same; what is planned for is told apart by identity."""
    case = replace(CASES["shared blocks"], head_dims=(64, 64), dtype=torch.float32)
    steps = [replace(case) for _ in range(WRAPPERS + 1)]
    for _ in range(2):
        for step in steps[:2]:
            for _ in range(3):
                out, lse = KERNEL.forward(*step.tensors("cpu"), step.pages, step.scores)
                wanted, wanted_lse = step.expected()
                torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)
    assert made == [2, 2]
    for step in steps:
        KERNEL.forward(*step.tensors("cpu"), step.pages, step.scores)
    assert made == [WRAPPERS, WRAPPERS + 1], "the one that was used longest ago plans again"
    KERNEL.forward(*steps[1].tensors("cpu"), steps[1].pages, steps[1].scores)
    assert made == [WRAPPERS, WRAPPERS + 1]
    other = Scores(Mask.full(), 0.7)
    KERNEL.forward(*steps[1].tensors("cpu"), steps[1].pages, other)
    assert made == [WRAPPERS + 1, WRAPPERS + 2], "another scale is another kind"


def test_no_plan_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay would read what a later plan wrote."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    query: Any = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(RuntimeError, match="take kernel='paged_triton', which a graph can replay"):
        KERNEL.forward(query, query, query, CASES[""].pages, CASES[""].scores)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (PROBLEM, None),
        (replace(PROBLEM, softcap=3.0, head_dim=256, value_head_dim=256), None),
        (
            replace(PROBLEM, head_dim=96, value_head_dim=96),
            r"head dims of \(64, 128, 256\), got 96",
        ),
        (replace(PROBLEM, value_head_dim=128), "one head dim"),
        (replace(PROBLEM, dtype=torch.float32), "bfloat16 and float16"),
    ],
)
def test_what_it_supports(problem: Problem, reason: str | None) -> None:
    found = KERNEL.supports(problem, 5)
    assert found is None if reason is None else re.search(reason, found or "")


def test_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(packages, "version", missing)
    assert paged_flashinfer._missing_package() == "the flashinfer-python package is not installed"
    for found, is_old in {"0.6.9": True, "0.7.4": False, "1.0": False}.items():
        monkeypatch.setattr(packages, "version", lambda _, found=found: found)
        expected = f"it needs flashinfer-python 0.7 or later, found {found}"
        assert paged_flashinfer._missing_package() == (expected if is_old else None)
    monkeypatch.setattr(
        Wrapper,
        "plan",
        lambda self, num_qo_heads, num_kv_heads, head_dim_qk, page_size, causal, sm_scale: None,
    )
    reason = "flashinfer-python 1.0 takes no logits_soft_cap, q_data_type"
    assert paged_flashinfer._missing_package() == reason
    monkeypatch.setattr(paged_flashinfer, "load", lambda module: 1 / 0)
    assert "does not load: division by zero" in (paged_flashinfer._missing_package() or "")


def test_signatures_are_those_of_the_package() -> None:
    tree = parsed("flashinfer", "prefill.py", "flashinfer-python")
    name = "BatchPrefillWithPagedKVCacheWrapper"
    (wrapper,) = (x for x in ast.walk(tree) if isinstance(x, ast.ClassDef) and x.name == name)
    # Overloads of a method come before it.
    found = {x.name: x.args for x in wrapper.body if isinstance(x, ast.FunctionDef)}
    for name, text in flashinfer_package.SIGNATURES.items():
        assert plain_arguments(found[name]) == arguments_of(text), name
