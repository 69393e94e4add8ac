"""Prebuilt kernels of the Hugging Face Hub, which the `kernels` package downloads and loads.

They are flash attention 2 and 3 as their authors wrote them, built for many versions of torch and
CUDA, so that nobody has to compile. A download is code from elsewhere: it happens only where a user
names the kernel, and `HF_HUB_OFFLINE=1` restricts it to what was downloaded before.
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
    """A repository of builds of one kernel, and its version: functions change with a version."""

    repository: str
    version: int

    def module(self) -> ModuleType:
        """The build for this torch and this GPU, downloaded unless it is there."""
        return _loaded(*self)

    def missing(self) -> str | None:
        """The reason why it does not load, or `None`."""
        try:
            self.module()
        except Exception as error:  # of the network, the Hub, the build, or the loader
            if isinstance(error, ModuleNotFoundError) and error.name == "kernels":
                return "the kernels package is not installed: pip install kernels"
            what = f"version {self.version} of {self.repository}"
            return f"{what} does not load: {' '.join(str(error).split())}"
        return None


class HubFlashAttn3(FlashAttn3):
    """A build of flash attention 3: each registers its operators under another namespace."""

    name = "hub:kernels-community/flash-attn3"
    build = Build("kernels-community/flash-attn3", 1)

    def operators(self) -> Any:
        return self.build.module()._ops.ops

    def missing_package(self) -> str | None:
        return self.build.missing()

    def build_flags(self) -> dict[str, bool]:
        return {}  # their sources leave nothing out


class HubFlashAttn2(FlashAttn2):
    """A build of flash attention 2, with the functions of the flash-attn package."""

    name = "hub:kernels-community/flash-attn2"
    build = Build("kernels-community/flash-attn2", 3)

    def functions(self) -> Any:
        return self.build.module().flash_attn_interface

    def missing_package(self) -> str | None:
        return self.build.missing()


HUB_KERNELS: dict[str, Kernel] = {x.name: x for x in (HubFlashAttn3(), HubFlashAttn2())}
"""Kernels that serve by their names only, since the first use of one downloads it."""


@lru_cache(maxsize=8)
def _loaded(repository: str, version: int) -> ModuleType:
    """Load a build, once for each process."""
    from kernels import get_kernel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as `load` of other packages
        return get_kernel(repository, version=version)
