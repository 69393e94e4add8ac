"""Prebuilt kernels: what is downloaded when, and what is said where it cannot be."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dtensor_ring import available_kernels, register_kernel
from dtensor_ring.compute.kernels import Problem, check_kernel, missing_kernel, select_kernel
from dtensor_ring.compute.kernels.reference import Reference
from tests.compute.kernels.test_missing_kernels import gpu
from tests.hub import REPOSITORIES, Hub
from tests.packages import packages
from tests.tiles import HUB, TILES, check_tile

__all__ = ["gpu", "packages"]  # fixtures

ON_GPU = Problem("cuda", torch.bfloat16, 64, 64)


@pytest.fixture
def hopper(packages: Hub, gpu: Callable[..., None]) -> Hub:
    """A GPU that both kernels run on, and what was asked of the Hub."""
    gpu(9, 0)
    return packages


def test_one_that_is_named_is_loaded_once(hopper: Hub) -> None:
    for name in HUB:
        for _ in range(2):
            assert select_kernel(name, ON_GPU).name == name
            check_tile(select_kernel(name, ON_GPU), TILES["causal"], "cpu")
    assert hopper.asked == [name.removeprefix("hub:") for name in HUB]


def test_nothing_is_downloaded_unless_it_is_named(hopper: Hub) -> None:
    assert not set(available_kernels()) & set(HUB)
    select_kernel(None, ON_GPU)
    for name in HUB:
        check_kernel(name)
        with pytest.raises(ValueError, match="it runs on CUDA, the tensors are on cpu"):
            select_kernel(name, Problem("cpu", torch.bfloat16, 64, 64))
    assert not hopper.asked


def test_nothing_is_downloaded_without_a_gpu(packages: Hub) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for name in HUB:
        assert missing_kernel(name) == "no CUDA device"
    assert not packages.asked


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            ValueError("Cannot find a build\n\n  torch29-cu128"),
            "of kernels-community/flash-attn. does not load: Cannot find a build torch29-cu128$",
        ),
        (OSError("offline"), "version . of kernels-community/flash-attn. does not load: offline"),
        (ModuleNotFoundError("No module named 'einops'", name="einops"), "load: .*'einops'"),
        (ModuleNotFoundError(name="kernels"), "is not installed: pip install kernels$"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", HUB)
def test_one_that_does_not_load(name: str, error: Exception, reason: str, hopper: Hub) -> None:
    hopper.error = error
    said = missing_kernel(name) or ""
    assert re.search(reason, said)
    with pytest.raises(ValueError, match=re.escape(said)):
        select_kernel(name, ON_GPU)


def test_the_package_is_not_installed(hopper: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kernels", None)
    assert missing_kernel(HUB[0]) == "the kernels package is not installed: pip install kernels"


class Named(Reference):
    def __init__(self, name: str) -> None:
        self.name: Any = name


def test_names(packages: Hub) -> None:
    assert {f"hub:{repository}" for repository in REPOSITORIES} == set(HUB)
    with pytest.raises(ValueError, match=f"known kernels: .*reference, {HUB[0]}, {HUB[1]}"):
        check_kernel("hub:somebody/flash-attn3")
    with pytest.raises(ValueError, match=f"unknown kernel '{HUB[0]}' in before"):
        register_kernel(Named("mine"), before=HUB[0])
    with pytest.raises(ValueError, match=f"the kernel name '{HUB[0]}' of .* is taken by"):
        register_kernel(Named(HUB[0]))
