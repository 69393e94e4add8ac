"""Which kernel serves a problem, and why the others cannot."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from dtensor_ring import available_kernels
from dtensor_ring.kernels import KERNELS, Problem, flash_attn2, select_kernel

GPU = ("flash_attn2", "cuda_flash")

PROBLEM = Problem("cpu", torch.float32, 8, 8)
GPU_PROBLEM = replace(PROBLEM, device_type="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "problem", "reason"),
    [
        ("reference", replace(PROBLEM, softcap=2.0, differentiable_lse=True), None),
        ("reference", replace(PROBLEM, device_type="cuda"), None),
        ("reference", replace(PROBLEM, dtype=torch.int32), "floating dtype of 16 bits or more"),
        ("reference", replace(PROBLEM, dtype=torch.float8_e4m3fn), "got torch.float8_e4m3fn"),
        ("cpu_flash", PROBLEM, None),
        ("cpu_flash", replace(PROBLEM, dtype=torch.float64), None),
        ("cpu_flash", GPU_PROBLEM, "it runs on a CPU, the tensors are on cuda"),
        ("cpu_flash", replace(PROBLEM, dtype=torch.int64), "not torch.int64"),
        ("cpu_flash", replace(PROBLEM, value_head_dim=4), "one head dim .*, got 8 and 4"),
        ("cpu_flash", replace(PROBLEM, scale=0.0), "it needs a positive scale, got 0.0"),
        ("cpu_flash", replace(PROBLEM, differentiable_lse=True), "it has no gradient of lse"),
        ("cpu_flash", replace(PROBLEM, softcap=1.0), "it has no softcap"),
        ("cuda_flash", GPU_PROBLEM, None),
        ("cuda_flash", replace(GPU_PROBLEM, scale=-1.0), "it needs a positive scale, got -1.0"),
        ("cuda_flash", replace(GPU_PROBLEM, softcap=1.0), "it has no softcap"),
        ("flash_attn2", replace(GPU_PROBLEM, softcap=1.0), None),
        *(
            (name, problem, reason)
            for name in GPU
            for problem, reason in (
                (PROBLEM, "it runs on CUDA, the tensors are on cpu"),
                (replace(GPU_PROBLEM, dtype=torch.float32), "takes bfloat16 and float16, not"),
                (replace(GPU_PROBLEM, value_head_dim=16), "one head dim .*, got 8 and 16"),
                (replace(GPU_PROBLEM, head_dim=12, value_head_dim=12), "multiple of 8 .*, got 12"),
                (replace(GPU_PROBLEM, head_dim=264, value_head_dim=264), "up to 256, got 264"),
                (replace(GPU_PROBLEM, differentiable_lse=True), "it has no gradient of lse"),
            )
        ),
    ],
)
def test_what_a_kernel_supports(name: str, problem: Problem, reason: str | None) -> None:
    found = KERNELS[name].supports(problem)
    assert found is None if reason is None else re.search(reason, found or ""), found


def test_missing_gpu_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    for name in GPU:
        assert KERNELS[name].missing() == "it needs compute capability 8.0, this GPU has 7.5"


def test_available_kernels() -> None:
    available = available_kernels()
    assert list(available) == ["flash_attn2", "cuda_flash", "cpu_flash", "reference"]
    assert available["cpu_flash"] is available["reference"] is None
    if not torch.cuda.is_available():
        assert available["flash_attn2"] == available["cuda_flash"] == "no CUDA device"


def test_missing_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    def not_loading(module: str) -> None:
        raise ImportError(f"{module} was built for another torch")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(flash_attn2, "import_module", lambda module: None)
    monkeypatch.setattr(flash_attn2, "version", missing)
    flash_attn2._missing_package.cache_clear()
    assert KERNELS["flash_attn2"].missing() == "the flash-attn package is not installed"
    for version, reason in {
        "2.6.3": "it needs flash-attn 2.7 or a later 2.x, found 2.6.3",
        "2.7.0": None,
        "2.10.0.post1": None,
        "3.0.0": "it needs flash-attn 2.7 or a later 2.x, found 3.0.0",
    }.items():
        monkeypatch.setattr(flash_attn2, "version", lambda _, version=version: version)
        flash_attn2._missing_package.cache_clear()
        assert KERNELS["flash_attn2"].missing() == reason
    monkeypatch.setattr(flash_attn2, "version", lambda _: "2.8.0")
    monkeypatch.setattr(flash_attn2, "import_module", not_loading)
    flash_attn2._missing_package.cache_clear()
    assert "does not load: flash_attn.flash_attn_interface was" in KERNELS["flash_attn2"].missing()
    flash_attn2._missing_package.cache_clear()


@pytest.mark.parametrize(
    ("problem", "chosen"),
    [
        (PROBLEM, "cpu_flash"),
        (replace(PROBLEM, scale=-1.0), "reference"),
        (replace(PROBLEM, value_head_dim=4), "reference"),
        (replace(PROBLEM, softcap=1.0), "reference"),
        (replace(PROBLEM, differentiable_lse=True), "reference"),
    ],
)
def test_the_first_kernel_that_can_is_chosen(problem: Problem, chosen: str) -> None:
    assert select_kernel(None, problem).name == chosen
    assert select_kernel("reference", problem).name == "reference"


@pytest.mark.parametrize(
    ("name", "problem", "message"),
    [
        ("flash9", PROBLEM, "unknown kernel 'flash9'; known kernels: flash_attn2, cuda_flash, cpu"),
        (
            "cpu_flash",
            replace(PROBLEM, softcap=1.0),
            "kernel 'cpu_flash' cannot serve this attention (cpu_flash: it has no softcap)",
        ),
        (
            "cuda_flash",
            PROBLEM,
            "kernel 'cuda_flash' cannot serve this attention (cuda_flash: "
            "it runs on CUDA, the tensors are on cpu)",
        ),
        (
            "cuda_flash",
            GPU_PROBLEM,
            "kernel 'cuda_flash' cannot serve this attention (cuda_flash: no CUDA device)",
        ),
        (None, replace(PROBLEM, dtype=torch.int32), "no kernel can serve this attention (flash_"),
        (None, replace(PROBLEM, dtype=torch.int32), "; reference: it needs a floating dtype of 16"),
    ],
)
def test_select_kernel_refuses(
    name: str | None, problem: Problem, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=re.escape(message)):
        select_kernel(name, problem)
