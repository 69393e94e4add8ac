"""Prebuilt kernels from the Hugging Face Hub; the `kernels` package downloads and loads them.

They are flash attention 2 and 3 of the original authors, built for many versions of torch and CUDA.
A download is code from elsewhere. So it happens only if a user names the kernel, and
`HF_HUB_OFFLINE=1` restricts it to earlier downloads.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

from dtensor_ring.compute.kernels.flash_attn2 import FlashAttn2
from dtensor_ring.compute.kernels.flash_attn3 import FlashAttn3
from dtensor_ring.compute.kernels.kernel import Kernel


class Build(NamedTuple):
    """A repository of builds of one kernel, and its version, which fixes the signatures."""

    repository: str
    version: int

    def module(self) -> ModuleType:
        """Return the build for this torch and GPU, which is downloaded if necessary."""
        return _loaded(*self)

    def missing(self) -> str | None:
        """Return why the build does not load, or `None`."""
        try:
            self.module()
        except Exception as error:  # from the network, the Hub, the build, or the loader
            if isinstance(error, ModuleNotFoundError) and error.name == "kernels":
                return "the kernels package is not installed: pip install kernels"
            what = f"version {self.version} of {self.repository}"
            return f"{what} does not load: {' '.join(str(error).split())}"
        return None


class HubFlashAttn3(FlashAttn3):
    """A build of flash attention 3, which registers its operators under its own namespace."""

    name = "hub:kernels-community/flash-attn3"
    build = Build("kernels-community/flash-attn3", 1)

    def operators(self) -> Any:
        return self.build.module()._ops.ops

    def missing_package(self) -> str | None:
        return self.build.missing()

    def build_flags(self) -> dict[str, bool]:
        return {}  # the builds on the Hub leave nothing out


class HubFlashAttn2(FlashAttn2):
    """A build of flash attention 2, with the functions of the flash-attn package."""

    name = "hub:kernels-community/flash-attn2"
    build = Build("kernels-community/flash-attn2", 3)

    def functions(self) -> Any:
        return self.build.module().flash_attn_interface

    def missing_package(self) -> str | None:
        return self.build.missing()


# Kernels that are used only by name, because the first use downloads them.
HUB_KERNELS: dict[str, Kernel] = {x.name: x for x in (HubFlashAttn3(), HubFlashAttn2())}


@lru_cache(maxsize=8)
def _loaded(repository: str, version: int) -> ModuleType:
    """Load a build, once for each process."""
    from kernels import get_kernel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # like `load` for other packages
        return get_kernel(repository, version=version)
