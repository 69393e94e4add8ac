"""Kernels that read block tables: adapters against dense attention, and which one is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from dtensor_ring import BlockPool, Mask
from dtensor_ring.compute.kernels import Problem, cuda_flash, flash_attn2, flash_attn3
from dtensor_ring.paged import api, kernels
from dtensor_ring.paged.api import PagedBatch, PagedCache
from dtensor_ring.paged.kernels import PAGED, paged_kernel
from tests.packages import packages
from tests.paged_attention import PagedCase, check_paged

__all__ = ["packages"]  # a fixture

KERNELS = {kernel.name: kernel for kernel in PAGED}
GPU = ["flash_attn3", "flash_attn2", "varlen_attn"]


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("name", GPU)
@pytest.mark.parametrize(
    "case",
    [
        PagedCase(lengths=(300, 700, 3)),
        PagedCase(lengths=(300, 700), world_size=2, num_tokens=5),
        PagedCase(lengths=(700, 600), mask=Mask.sliding(300), num_tokens=3),
        PagedCase(lengths=(300,), heads=(2, 2), softcap=1.5),
    ],
    ids=["decode", "ranks", "window", "softcap"],
)
def test_adapter(name: str, case: PagedCase, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(case, block=256, dtype=torch.float32)
    problem = Problem("cuda", torch.bfloat16, 8, 8, 0.3, case.softcap)
    if reason := KERNELS[name].supports(problem, 256):
        assert (name, reason) == ("varlen_attn", "it has no softcap")
        return
    monkeypatch.setattr(api, "paged_kernel", lambda *_: KERNELS[name])
    check_paged(case)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes believe that there is a GPU of that capability, with all packages."""

    def install(major: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
        for module in (flash_attn2, flash_attn3):
            monkeypatch.setattr(module, "_missing_package", lambda: None)
        monkeypatch.setattr(kernels, "has_triton", lambda: True)
        paged_kernel.cache_clear()

    yield install
    paged_kernel.cache_clear()


@pytest.mark.parametrize(
    ("major", "block", "softcap", "expected"),
    [
        (9, 256, 0.0, "flash_attn3"),
        (9, 64, 0.0, "flash_attn3"),
        (8, 256, 0.0, "flash_attn2"),
        (8, 64, 0.0, "paged_triton"),
        (7, 256, 0.0, "in_place"),
    ],
)
def test_the_best_kernel_is_taken(
    gpu: Callable[..., None], major: int, block: int, softcap: float, expected: str
) -> None:
    gpu(major)
    problem = Problem("cuda", torch.bfloat16, 64, 64, 0.1, softcap)
    assert paged_kernel(None, problem, block).name == expected


def test_any_gpu_reads_blocks_without_triton(
    gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(8)
    monkeypatch.setattr(kernels, "has_triton", lambda: False)
    problem = Problem("cuda", torch.bfloat16, 64, 64, 0.1)
    assert paged_kernel(None, problem, 64).name == "in_place"


def test_varlen_attn_is_taken_without_packages(
    gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(8)
    monkeypatch.setattr(flash_attn2, "_missing_package", lambda: "not installed")
    problem = Problem("cuda", torch.bfloat16, 64, 64, 0.1)
    assert paged_kernel(None, problem, 256).name == "varlen_attn"
    monkeypatch.setattr(cuda_flash, "signature", lambda _: type("", (), {"parameters": {}})())
    assert "reads no block tables" in (KERNELS["varlen_attn"].missing() or "")


@pytest.mark.parametrize("name", ["flash_attn2", "varlen_attn"])
def test_pages_of_other_sizes_are_refused_by_name(gpu: Callable[..., None], name: str) -> None:
    gpu(8)
    problem = Problem("cuda", torch.bfloat16, 64, 64, 0.1)
    with pytest.raises(ValueError, match=rf"kernel '{name}' cannot read these blocks") as raised:
        paged_kernel(name, problem, 300)
    assert "it reads blocks of a multiple of 256 keys, got 300" in str(raised.value)
    assert "make the pool with block=512" in str(raised.value)
    assert "'in_place', which reads any blocks" in str(raised.value)
    assert paged_kernel(name, problem, 512).name == name


def test_a_kernel_that_cannot_is_refused_before_anything_is_computed() -> None:
    cache = PagedCache(BlockPool(2, 4), 1, 8, 1, dtype=torch.int64)
    sequence = cache.pool.add([1])
    with pytest.raises(ValueError, match=r"no kernel can read these blocks .* floating dtype"):
        PagedBatch(cache, [sequence]).attend(0, torch.zeros(1, 1, 1, 8, dtype=torch.int64))
