"""Which kernel serves a problem, also of block tables, and why the others cannot."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from dtensor_ring import BlockPool, Mask
from dtensor_ring.compute.kernels import (
    KERNELS,
    Kernel,
    Problem,
    Scores,
    clear_kernel_cache,
    cuda_flash,
    flash_attn2,
    flash_attn3,
    select_kernel,
)
from dtensor_ring.ops import options
from dtensor_ring.paged import api, kernels
from dtensor_ring.paged.api import PagedBatch, PagedCache
from dtensor_ring.paged.kernels import PAGED, paged_kernel
from dtensor_ring.planning.plan import plan
from dtensor_ring.planning.run_table import as_layout
from tests.packages import packages
from tests.paged_attention import PagedCase, check_paged
from tests.tiles import GPU

FLASH_ATTN = ("flash_attn3", "flash_attn4", "flash_attn2")

PROBLEM = Problem("cpu", torch.float32, 8, 8)
GPU_PROBLEM = replace(PROBLEM, device_type="cuda", dtype=torch.bfloat16)


def head_dims(head_dim: int, value_head_dim: int | None = None) -> Problem:
    return replace(GPU_PROBLEM, head_dim=head_dim, value_head_dim=value_head_dim or head_dim)


def latent() -> Problem:
    return head_dims(192, 128)


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
        ("cuda_flash", replace(GPU_PROBLEM, softcap=1.0), "it has no softcap"),
        *((name, replace(head_dims(64), softcap=1.0, windowed=True), None) for name in FLASH_ATTN),
        ("flash_attn4", latent(), None),
        ("flash_attn4", replace(latent(), softcap=1.0), None),
        ("flash_attn4", replace(latent(), grouped=True), "192 and 128 without grouped-query only"),
        ("flash_attn4", replace(latent(), dtype=torch.float32), "takes bfloat16 and float16, not"),
        ("flash_attn4", head_dims(128), None),
        ("flash_attn4", head_dims(32), None),
        ("flash_attn4", head_dims(16), "gradients are wrong below a head dim of 32, got 16"),
        ("flash_attn4", head_dims(136), "multiple of 8 up to 128, got 136"),
        ("cudnn_flex", replace(latent(), windowed=True, packed=True), None),
        ("cudnn_flex", replace(latent(), grouped=True), "192 and 128 without grouped-query only"),
        ("cudnn_flex", replace(head_dims(256), grouped=True, determinism="strict"), None),
        ("cudnn_flex", replace(head_dims(256), differentiable_lse=True), "no gradient of lse for"),
        ("cudnn_flex", head_dims(136), "multiple of 8 up to 128, got 136"),
        ("cudnn_flex", head_dims(56, 128), "one head dim .*, got 56 and 128"),
        ("cudnn_flex", replace(GPU_PROBLEM, softcap=1.0), "it has no softcap"),
        ("cudnn_sdpa", replace(head_dims(64, 128), windowed=True, packed=True), None),
        ("cudnn_sdpa", replace(head_dims(64), determinism="warn"), "no deterministic gradients"),
        ("cudnn_sdpa", replace(GPU_PROBLEM, softcap=1.0), "it has no softcap"),
        ("cudnn", replace(head_dims(64, 128), grouped=True), None),
        ("cudnn", latent(), "head dims that are multiples of 8 up to 128, got 192, 128"),
        ("cudnn", head_dims(64, 20), "head dims that are multiples of 8 up to 128, got 64, 20"),
        ("cudnn", replace(GPU_PROBLEM, windowed=True), "it has no windows"),
        ("cudnn", replace(GPU_PROBLEM, packed=True), "it has no segments, and each document"),
        ("cudnn", replace(GPU_PROBLEM, softcap=1.0), "it has no softcap"),
        *(
            (name, problem, reason)
            for name in GPU
            for problem, reason in (
                (PROBLEM, "it runs on CUDA, the tensors are on cpu"),
                (replace(GPU_PROBLEM, dtype=torch.float32), "takes bfloat16 and float16, not"),
                (head_dims(12), "multiples? of 8 .*, got 12"),
                (head_dims(264), "up to (128|256), got 264"),
                (replace(GPU_PROBLEM, scale=-1.0), "it needs a positive scale, got -1.0"),
                (
                    replace(GPU_PROBLEM, differentiable_lse=True),
                    None if name == "cudnn_flex" else "it has no gradient of lse",
                ),
                (replace(head_dims(64), grouped=True), None),
            )
        ),
        *(
            (name, problem, reason)
            for name in ("flash_attn3", "flash_attn2", "cuda_flash")
            for problem, reason in (
                (head_dims(256), None),
                (head_dims(8, 16), "one head dim .*, got 8 and 16"),
                (latent(), "one head dim .*, got 192 and 128"),
            )
        ),
    ],
)
def test_what_a_kernel_supports(name: str, problem: Problem, reason: str | None) -> None:
    found = KERNELS[name].supports(problem)
    assert found is None if reason is None else re.search(reason, found or ""), found


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("flash_attn3", head_dims(200)),
        ("flash_attn3", replace(GPU_PROBLEM, grouped=True)),
        ("cudnn", GPU_PROBLEM),
    ],
)
def test_gradients_that_are_not_deterministic(name: str, problem: Problem) -> None:
    assert KERNELS[name].supports(problem) is None
    strict = replace(problem, determinism="strict")
    assert "deterministic" in (KERNELS[name].supports(strict) or "")
    assert KERNELS["flash_attn3"].supports(replace(head_dims(192), determinism="strict")) is None
    warned = KERNELS[name].supports(replace(problem, determinism="warn"))
    assert (warned is None) == (name == "cudnn"), "which runs with a warning of PyTorch's"


@pytest.mark.parametrize(("setting", "warn_only"), [("off", 0), ("warn", 1), ("strict", 0)])
def test_a_problem_knows_the_setting_of_determinism(setting: str, warn_only: bool) -> None:
    torch.use_deterministic_algorithms(setting != "off", warn_only=bool(warn_only))
    try:
        assert Problem("cpu", torch.float32, 8, 8).determinism == setting
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("problem", "chosen"),
    [
        (PROBLEM, "cpu_flash"),
        (replace(PROBLEM, scale=-1.0), "reference"),
        (replace(PROBLEM, value_head_dim=4), "reference"),
        (replace(PROBLEM, softcap=1.0), "reference"),
        (replace(PROBLEM, differentiable_lse=True), "cpu_flash"),
        (replace(PROBLEM, differentiable_lse=True, value_head_dim=4), "reference"),
    ],
)
def test_the_first_kernel_that_can_is_chosen(problem: Problem, chosen: str) -> None:
    assert select_kernel(None, problem).name == chosen
    assert select_kernel("reference", problem).name == "reference"


WINDOWED = replace(head_dims(64), windowed=True)


@pytest.mark.parametrize(
    ("problem", "name", "chosen"),
    [
        (head_dims(64), None, "flash_attn4"),
        (head_dims(64), "cudnn_flex", "cudnn_flex"),
        (WINDOWED, None, "flash_attn4"),
        (replace(head_dims(64), packed=True), None, "flash_attn4"),
        (replace(WINDOWED, differentiable_lse=True), None, "flash_attn4"),
        (replace(WINDOWED, fleeting=True), "cudnn_flex", "cudnn_flex"),
        (head_dims(256), None, "cudnn_flex"),
        (replace(head_dims(256), fleeting=True), None, "cudnn_flex"),
        (replace(head_dims(256), softcap=1.0), None, "reference"),
    ],
)
def test_what_nobody_has_measured_comes_before_the_reference_only(
    problem: Problem, name: str | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kernel in KERNELS.values():
        runs = kernel.name in ("cudnn_flex", "flash_attn4", "reference")
        answer = None if runs else "not here"
        monkeypatch.setattr(type(kernel), "missing", lambda self, answer=answer: answer)
    clear_kernel_cache()
    assert select_kernel(name, problem).name == chosen
    clear_kernel_cache()


@pytest.mark.parametrize(
    ("mask", "windowed"),
    [
        (Mask.full(), False),
        (Mask.causal(), False),
        (Mask.sliding(3), True),
        (Mask.local(2, 1), True),
        (Mask.local(None, 2), False),
        (Mask.prefix_causal(2), False),
    ],
)
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_what_a_ring_asks_for(
    mask: Mask, windowed: bool, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Problem] = []

    def select(name: str | None, *facts: Any) -> Kernel:
        asked.append(Problem(*facts))
        return KERNELS["reference"]

    monkeypatch.setattr(options, "kernel_for", select)
    call = options.Call(options.Batch(), Scores(mask, 0.5), options.Place())
    shapes = (1, 2, 8, 4), (1, kv_heads, 8, 4), (1, kv_heads, 8, 6)
    call.select(*map(torch.empty, shapes))
    expected = Problem("cpu", torch.float32, 4, 6, 0.5, windowed=windowed, grouped=kv_heads == 1)
    assert asked == [expected]
    # Only a window has tiles that are neither full nor causal.
    for layout in ("zigzag", "striped", "contiguous"):
        steps = [
            step for rank in range(2) for step in plan(as_layout(layout), mask, rank, 2, 24).steps
        ]
        bands = {tile.mask for step in steps for tile in step.tiles}
        assert windowed or bands <= {Mask.full(), Mask.causal()}


@pytest.mark.parametrize(
    ("name", "problem", "message"),
    [
        ("flash9", PROBLEM, "unknown kernel 'flash9'; known kernels: flash_attn3, flash_attn4, "),
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


# Kernels that read block tables: adapters against dense attention, and which one is taken.

__all__ = ["packages"]  # a fixture

OF_PAGES = {kernel.name: kernel for kernel in PAGED}
PAGED_GPU = ["flash_attn3", "flash_attn2", "varlen_attn"]


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("name", PAGED_GPU)
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
    if reason := OF_PAGES[name].supports(problem, 256):
        assert (name, reason) == ("varlen_attn", "it has no softcap")
        return
    monkeypatch.setattr(api, "paged_kernel", lambda *_: OF_PAGES[name])
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
    assert "reads no block tables" in (OF_PAGES["varlen_attn"].missing() or "")


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
