"""Which kernels a machine can run, best first, why others are missing, what is downloaded."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dtensor_ring import available_kernels, register_kernel
from dtensor_ring.compute.kernels import (
    KERNELS,
    Problem,
    check_kernel,
    clear_kernel_cache,
    cudnn_flex,
    cudnn_sdpa,
    flash_attn2,
    flash_attn3,
    flash_attn4,
    missing_kernel,
    select_kernel,
)
from dtensor_ring.compute.kernels import packages as installed
from dtensor_ring.compute.kernels.reference import Reference
from tests import flex_package, sdpa_package
from tests.hub import REPOSITORIES, Hub
from tests.packages import packages
from tests.tiles import GPU, HUB, TILES, check_tile

NEWER = ["flash_attn4", "cudnn", "flash_attn2", "cuda_flash", "cpu_flash"]
NEWER += ["cudnn_flex", "cudnn_sdpa"]
"""Kernels of Hopper and Blackwell."""
FRONTEND, FRONTENDS = "nvidia-cudnn-frontend 1.32 or later", "1.9.0 1.31.0 | 1.32.0 2.0"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes believe that there is a GPU of that capability, and a version of cuDNN."""

    def install(major: int, minor: int, cudnn: int = 91500) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: cudnn > 0)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, minor))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        for module in (cudnn_flex, cudnn_sdpa, flash_attn2, flash_attn3, flash_attn4):
            monkeypatch.setattr(module, "_missing_package", lambda: None)
        clear_kernel_cache()

    yield install
    clear_kernel_cache()


@pytest.mark.parametrize(
    ("capability", "running"),
    [
        ((7, 5), ["cpu_flash"]),
        ((8, 0), ["flash_attn2", "cuda_flash", "cpu_flash"]),
        ((8, 9), ["flash_attn2", "cuda_flash", "cpu_flash"]),
        ((9, 0), ["flash_attn3", *NEWER]),
        ((10, 0), NEWER),
        ((10, 3), NEWER),
        ((12, 0), ["flash_attn2", "cuda_flash", "cpu_flash"]),
    ],
)
def test_kernels_of_a_gpu_best_first(
    capability: tuple[int, int], running: list[str], gpu: Callable[..., None]
) -> None:
    gpu(*capability)
    found = [name for name, reason in available_kernels().items() if reason is None]
    assert found == [*running, "reference"]


def test_missing_gpu_features(gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(7, 5)
    for name, capability in {
        "flash_attn3": "9.x",
        "flash_attn4": "9.x or 10.x",
        "cudnn": "9.x or 10.x",
        "flash_attn2": "8.0",
        "cuda_flash": "8.0",
    }.items():
        reason = f"it needs compute capability {capability}, this GPU has 7.5"
        assert KERNELS[name].missing() == reason
    gpu(9, 0, cudnn=8907)
    assert KERNELS["cudnn"].missing() == "it needs cuDNN 9, found version 8907"
    gpu(9, 0, cudnn=0)
    assert KERNELS["cudnn"].missing() == "this PyTorch was built without cuDNN"
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert KERNELS["cuda_flash"].missing() == "this PyTorch was built without flash attention"


def test_head_dims_without_gradients(gpu: Callable[..., None]) -> None:
    for capability, head_dim, is_served in (
        ((8, 9), 224, False),
        ((12, 0), 200, False),
        ((8, 9), 256, True),
        ((8, 9), 192, True),
        ((9, 0), 224, True),
    ):
        gpu(*capability)
        problem = Problem("cuda", torch.bfloat16, head_dim, head_dim)
        assert (KERNELS["cuda_flash"].supports(problem) is None) == is_served


def test_available_kernels() -> None:
    available = available_kernels()
    assert list(available) == [*GPU[:-2], "cpu_flash", *GPU[-2:], "reference"]
    assert available["cpu_flash"] is available["reference"] is None
    if not torch.cuda.is_available():
        assert all(available[name] == "no CUDA device" for name in GPU)


def not_installed(package: str) -> str:
    raise PackageNotFoundError(package)


def check_versions(
    monkeypatch: pytest.MonkeyPatch, reason: Callable[[], str | None], needs: str, known: str
) -> None:
    """Versions that are too old, or too new, stand before the bar, those that serve after it."""
    others, serve = (x.split() for x in known.split("|"))
    for version in others + serve:
        monkeypatch.setattr(installed, "version", lambda _, version=version: version)
        expected = f"it needs {needs}, found {version}" if version in others else None
        assert reason() == expected, version


def test_missing_flash_attn2(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_loading(module: str) -> None:
        raise ImportError(f"{module} was built for another torch")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(flash_attn2, "load", lambda module: None)
    monkeypatch.setattr(installed, "version", not_installed)
    assert KERNELS["flash_attn2"].missing() == "the flash-attn package is not installed"
    known = "2.6.3 3.0.0 | 2.7.0 2.10.0.post1"
    check_versions(
        monkeypatch, KERNELS["flash_attn2"].missing, "flash-attn 2.7 or a later 2.x", known
    )
    monkeypatch.setattr(installed, "version", lambda _: "2.8.0")
    monkeypatch.setattr(flash_attn2, "load", not_loading)
    assert "does not load: flash_attn.flash_attn_interface was" in KERNELS["flash_attn2"].missing()


def test_missing_flash_attn4(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_loading(module: str) -> None:
        raise ImportError(f"{module} needs another cutlass")

    def reason() -> str | None:
        return flash_attn4._missing_package()

    function = SimpleNamespace(_flash_attn_fwd=lambda q, return_lse, max_seqlen_q: None)
    monkeypatch.setattr(flash_attn4, "load", lambda module: function)
    monkeypatch.setattr(installed, "version", not_installed)
    assert reason() == "the flash-attn-4 package is not installed"
    known = "4.0.0b9 4.0.0b27 5.0.0 | 4.0.0b28 4.0.0b36.dev1+g12 4.0.0 4.1.2"
    check_versions(monkeypatch, reason, "flash-attn-4 4.0.0b28 or a later 4.x", known)
    monkeypatch.setattr(installed, "version", lambda _: "4.0.0")
    monkeypatch.setattr(flash_attn4, "load", not_loading)
    assert "does not load: flash_attn.cute.interface needs another" in (reason() or "")


def test_missing_cudnn_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what the package lacks, of which a version says little."""

    modules = {
        module: SimpleNamespace(
            **{
                name: eval(f"lambda {signature}: None")
                for name, (signature, _) in flex_package.FUNCTIONS[module].items()
            }
        )
        for module in flex_package.FUNCTIONS
    }
    monkeypatch.setattr(cudnn_flex, "load", modules.__getitem__)
    monkeypatch.setattr(installed, "version", not_installed)
    assert cudnn_flex._missing_package() == "the nvidia-cudnn-frontend package is not installed"
    check_versions(monkeypatch, cudnn_flex._missing_package, FRONTEND, FRONTENDS)
    monkeypatch.setattr(installed, "version", lambda _: "1.40.0")
    execution = modules[flex_package.EXECUTION]
    for function, lacks in ((lambda q: None, "dlse_tensor"), (None, "dlse_tensor")):
        monkeypatch.setattr(execution, "_flex_attention_backward", function)
        reason = cudnn_flex._missing_package() or ""
        assert reason.endswith(f"1.40.0 has no _flex_attention_backward that takes {lacks}")
    monkeypatch.setattr(cudnn_flex, "load", lambda module: 1 / 0)
    assert "does not load: division by zero" in (cudnn_flex._missing_package() or "")


def test_missing_cudnn_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what the package and cuDNN itself lack."""

    def reason() -> str | None:
        return cudnn_sdpa._missing_package()

    def op(schema: str) -> Any:
        names = [SimpleNamespace(name=x) for x in re.findall(r"(\w+)[=,]", schema)]
        return SimpleNamespace(default=SimpleNamespace(_schema=SimpleNamespace(arguments=names)))

    ops = SimpleNamespace(**{name: op(x) for name, x in sdpa_package.SCHEMAS.items()})
    versions = {"cudnn": SimpleNamespace(backend_version=lambda: 91900)}
    modules = versions | {sdpa_package.OPS: SimpleNamespace(thd_lse_to_padded=None)}
    monkeypatch.setattr(cudnn_sdpa, "cudnn", ops)
    monkeypatch.setattr(cudnn_sdpa, "load", modules.__getitem__)
    monkeypatch.setattr(installed, "version", not_installed)
    assert reason() == "the nvidia-cudnn-frontend package is not installed"
    check_versions(monkeypatch, reason, FRONTEND, FRONTENDS)
    versions["cudnn"].backend_version = lambda: 91400
    assert reason() == "it needs cuDNN 9.15 or later, found version 91400"
    del modules[sdpa_package.OPS].thd_lse_to_padded
    assert reason() == "nvidia-cudnn-frontend 2.0 has no thd_lse_to_padded"
    ops.sdpa_bwd = op("Tensor q, ")
    assert reason() == "nvidia-cudnn-frontend 2.0 has no op sdpa_bwd that takes cu_seqlens_kv"
    monkeypatch.setattr(cudnn_sdpa, "load", lambda module: 1 / 0)
    assert "does not load: division by zero" in (reason() or "")


def test_missing_flash_attn3(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(error: ImportError) -> Callable[[str], None]:
        def import_module(module: str) -> None:
            raise error

        return import_module

    def reason() -> str | None:
        return flash_attn3._missing_package()

    name, operators = "flash_attn_interface", SimpleNamespace(fwd=None, bwd=None)
    for importing, flash, expected in (
        (
            raising(ModuleNotFoundError(name=name)),
            operators,
            f"the module {name}, is not installed",
        ),
        (raising(ModuleNotFoundError("no flash_attn_3._C", name="x")), operators, "load: no flash"),
        (raising(ImportError("undefined symbol")), operators, "does not load: undefined symbol"),
        (lambda module: None, SimpleNamespace(fwd=None), "it registers no torch.ops.flash_attn_3"),
        (lambda module: None, operators, None),
    ):
        monkeypatch.setattr(flash_attn3, "load", importing)
        monkeypatch.setattr(flash_attn3, "flash", flash)
        found = reason()
        assert found is None if expected is None else expected in (found or ""), found


def test_flash_attn_that_has_overwritten_flash_attn4(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version says nothing of it."""
    older = SimpleNamespace(_flash_attn_fwd=lambda q, k, v, cu_seqlens_q=None: None)
    monkeypatch.setattr(installed, "version", lambda _: "4.0.0b36")
    monkeypatch.setattr(flash_attn4, "load", lambda module: older)
    reason = flash_attn4._missing_package() or ""
    assert "takes no max_seqlen_q, return_lse" in reason
    assert "install flash-attn-4 again, after flash-attn" in reason


def test_a_warning_is_no_reason_not_to_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All warnings are errors here."""
    text = "import warnings; warnings.warn('old', DeprecationWarning)"
    (tmp_path / "flash_attn_interface.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    monkeypatch.setattr(flash_attn3, "flash", SimpleNamespace(fwd=None, bwd=None))
    assert flash_attn3._missing_package() is None
    monkeypatch.delitem(sys.modules, "flash_attn_interface")


@pytest.mark.parametrize(("active", "is_served"), [(None, True), ("FA2", True), ("FA4", False)])
def test_another_implementation_in_place_of_atens(
    active: str | None, is_served: bool, gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(9, 0)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: active)
    reason = KERNELS["cuda_flash"].missing()
    assert (reason is None) == is_served
    assert is_served or "activate_flash_attention_impl('FA4') has replaced" in (reason or "")


def flags(**disabled: bool) -> SimpleNamespace:
    """What a build of flash attention 3 says of itself."""
    names = {f"FLASHATTENTION_DISABLE_{name}": value for name, value in disabled.items()}
    return SimpleNamespace(CONFIG={"build_flags": names})


@pytest.mark.parametrize(
    ("disabled", "problem", "reason"),
    [
        ((), {"windowed": True, "softcap": 2.0}, None),
        (("LOCAL",), {"windowed": True}, "built with FLASH_ATTENTION_DISABLE_LOCAL"),
        (("LOCAL",), {}, None),
        (("SOFTCAP",), {"softcap": 2.0}, "FLASH_ATTENTION_DISABLE_SOFTCAP"),
        (("FP16",), {"dtype": torch.float16}, "FLASH_ATTENTION_DISABLE_FP16"),
        (("HDIM64", "HDIM96"), {}, None),
        (("HDIM192", "HDIM256"), {"head_dim": 128, "value_head_dim": 128}, None),
        (
            ("HDIM192", "HDIM256"),
            {"head_dim": 136, "value_head_dim": 136},
            r"head dims of \[64, 96, 128\], got 136",
        ),
    ],
    ids=str,
)
def test_builds_of_flash_attn3_without_a_feature(
    disabled: tuple[str, ...],
    problem: dict[str, Any],
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = flags(**dict.fromkeys(("CLUSTER", *disabled), True))
    monkeypatch.setattr(flash_attn3, "load", lambda module: found)
    given = replace(Problem("cuda", torch.bfloat16, 64, 64), **problem)
    said = KERNELS["flash_attn3"].supports(given)
    assert said is None if reason is None else re.search(reason, said or "")


@pytest.mark.parametrize("feature", ["VARLEN", "BACKWARD"])
def test_builds_of_flash_attn3_that_no_ring_can_use(
    feature: str, gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(9, 0)
    monkeypatch.setattr(flash_attn3, "load", lambda module: flags(**{feature: True}))
    assert f"DISABLE_{feature}; build" in (KERNELS["flash_attn3"].missing() or "")


# Prebuilt kernels: what is downloaded when, and what is said where it cannot be.

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
