"""The table of block kernels, the choice for a problem, and checks of registered kernels.

Prebuilt kernels of the Hugging Face Hub are flash attention 2 and 3 of the original authors, built
for many versions of torch and CUDA; the `kernels` package downloads and loads them. A download is
code from elsewhere. So it happens only if a user names the kernel, and `HF_HUB_OFFLINE=1` restricts
it to earlier downloads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dtensor_ring.compute.kernels.cpu_flash import CpuFlash
from dtensor_ring.compute.kernels.cuda_flash import CudaFlash
from dtensor_ring.compute.kernels.cudnn import Cudnn
from dtensor_ring.compute.kernels.cudnn_flex import CudnnFlex
from dtensor_ring.compute.kernels.cudnn_sdpa import CudnnSdpa
from dtensor_ring.compute.kernels.emulated import WidenedKernel
from dtensor_ring.compute.kernels.flash_attn2 import FlashAttn2
from dtensor_ring.compute.kernels.flash_attn3 import FlashAttn3
from dtensor_ring.compute.kernels.flash_attn4 import FlashAttn4
from dtensor_ring.compute.kernels.kernel import (
    Determinism,
    Gradients,
    Kernel,
    Launch,
    PagedKernel,
    Problem,
    Result,
    Saved,
    Scores,
    determinism,
)
from dtensor_ring.compute.kernels.reference import Reference


def kernel_for(name: str | None, device_type: str, *facts: Any) -> Kernel:
    """Return the choice of `select_kernel` for `Problem(device_type, *facts)`, cached by facts."""
    return _kernel_for(name, _gpu(device_type), determinism(), device_type, *facts)


class Expected(NamedTuple):
    """A tensor as the contract requires it; only lse may have a wider dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    or_wider: bool = False

    def __str__(self) -> str:
        wider = " or wider" if self.or_wider else ""
        return f"{self.name} {self.shape} {self.dtype}{wider} on {self.device}"

    def describes(self, x: object) -> bool:
        """Return whether `x` meets the expectation."""
        # Strides are not compared: adapters may return views.
        if not isinstance(x, Tensor) or (tuple(x.shape), x.device) != (self.shape, self.device):
            return False
        is_wider = self.or_wider and torch.promote_types(x.dtype, self.dtype) == x.dtype
        return x.dtype == self.dtype or (is_wider and x.dtype.is_floating_point)


class CheckedKernel(Kernel):
    """A kernel whose first launch of each kind is checked.

    A kind is forward or backward, of a tile or of segments, for one dtype. Later launches cost one
    look-up.

    Args:
        kernel: the kernel to check.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.wrapped = kernel
        self.name, self.has_segments = kernel.name, kernel.has_segments  # type: ignore[misc]
        self.has_intervals = kernel.has_intervals  # type: ignore[misc]
        self.has_dropout, self.has_bias = kernel.has_dropout, kernel.has_bias  # type: ignore[misc]
        self.bitwise_by_block = kernel.bitwise_by_block  # type: ignore[misc]
        self._seen: set[tuple[str, bool, torch.dtype]] = set()

    def missing(self) -> str | None:
        return self.wrapped.missing()

    def supports(self, problem: Problem) -> str | None:
        return self.wrapped.supports(problem)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores) -> Result:
        result = self.wrapped.forward(q, k, v, launch, scores)
        kind = "forward", launch.segments is None, q.dtype
        if kind not in self._seen:
            self._check(kind, result, _expected_results(q, v, kind[1]))
        return result

    def backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores
    ) -> Gradients:
        result = self.wrapped.backward(saved, q, k, v, launch, scores)
        # A kind includes the dtype: a kernel may cast one dtype and forget another.
        kind = "backward", launch.segments is None, q.dtype
        if kind not in self._seen:
            self._check(kind, result, _expected_gradients(q, k, v))
        return result

    def _check(
        self, kind: tuple[str, bool, torch.dtype], result: Any, expected: list[Expected]
    ) -> None:
        """Raise `ValueError` if the result breaks the contract; otherwise remember its kind."""
        is_right = isinstance(result, (tuple, list)) and len(result) == len(expected)
        if not is_right or not all(map(Expected.describes, expected, result)):
            of_what = "a tile" if kind[1] else "segments"
            raise ValueError(
                f"kernel {self.name!r} breaks the contract of dtensor_ring.compute.kernels.Kernel: "
                f"{kind[0]} of {of_what} returned {_described(result)}, "
                f"expected ({', '.join(map(str, expected))})"
            )
        self._seen.add(kind)


def _expected_results(query: Tensor, value: Tensor, is_tile: bool) -> list[Expected]:
    """Return the form that `out` and `lse` of these queries must have."""
    *rows, _ = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    # Heads come first in the lse of segments, as in that of a tile.
    lse_shape = tuple(rows) if is_tile else (rows[1], rows[0])
    return [
        Expected("out", (*rows, value.shape[-1]), query.dtype, query.device),
        Expected("lse", lse_shape, wide, query.device, or_wider=True),
    ]


def _expected_gradients(query: Tensor, key: Tensor, value: Tensor) -> list[Expected]:
    """Return the form that gradients must have: that of their tensors."""
    inputs = {"query": query, "key": key, "value": value}
    return [
        Expected(f"gradient of {name}", tuple(x.shape), x.dtype, x.device)
        for name, x in inputs.items()
    ]


def _described(result: object) -> str:
    """Describe the result of a kernel in the format of `Expected`."""
    if isinstance(result, Tensor):
        return f"{tuple(result.shape)} {result.dtype} on {result.device}"
    if isinstance(result, (tuple, list)):
        return f"({', '.join(map(_described, result))})"
    return type(result).__name__


_ORDER = (
    FlashAttn3(),
    FlashAttn4(),
    Cudnn(),
    FlashAttn2(),
    CudaFlash(),
    CpuFlash(),
    CudnnFlex(),
    CudnnSdpa(),
    Reference(),
)

# The kernels by name, in order of preference, which follows published speed. Flash attention 3 runs
# on Hopper only. So 4 leads on Blackwell, and on Hopper if 3 is not installed. cuDNN comes next on
# both, and flash attention 2 serves older GPUs. `cudnn_flex` and `cudnn_sdpa` come before the
# reference only, as nobody has measured them. A kernel that cannot run gives a reason in
# `missing()` and is skipped.
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in _ORDER}


def register_kernel(kernel: Kernel, *, before: str | None = None) -> None:
    """Add a block kernel of your own.

    By default it comes after all kernels but `"cudnn_flex"` and `"cudnn_sdpa"`, which nobody has
    measured, and `"reference"`, which is slow and supports everything. So it is chosen by its
    name, or if no other kernel serves. Register the same kernels in the same order on all ranks,
    before the first attention.

    The first launch of each kind is checked: a result whose shape, dtype or device breaks the
    contract of `dtensor_ring.extension.Kernel` raises `ValueError`.

    Args:
        kernel: an instance of a subclass of `dtensor_ring.extension.Kernel`.
        before: name of the kernel that it precedes in the order of preference.

    Raises:
        TypeError: if `kernel` is not an instance of `Kernel`, or its name is not a string.
        ValueError: if a kernel of that name exists already, or no kernel is called `before`.

    Example:
        >>> from dtensor_ring.compute.kernels.reference import Reference
        >>> from dtensor_ring.compute.kernels.registry import unregister_kernel
        >>> class Mine(Reference):
        ...     name = "mine"
        >>> register_kernel(Mine(), before="cpu_flash")
        >>> list(available_kernels())[-5:]
        ['mine', 'cpu_flash', 'cudnn_flex', 'cudnn_sdpa', 'reference']
        >>> unregister_kernel("mine")
    """
    _check_registrable(kernel)
    check_kernel(before, "before", KERNELS)
    # A dict keeps the order of insertion, so the kernels after the new one move to the end.
    names = list(KERNELS)
    after = names[names.index(before or "cudnn_flex") :]
    KERNELS[kernel.name] = CheckedKernel(kernel)
    # The new kernel is last now. Remove and insert the others, so they follow it.
    for name in after:
        KERNELS[name] = KERNELS.pop(name)
    clear_kernel_cache()


def unregister_kernel(name: str) -> None:
    """Remove a registered kernel, for tests.

    Raises:
        ValueError: if `register_kernel` did not add a kernel of that name.
    """
    if not isinstance(KERNELS.get(name), CheckedKernel):
        registered = [x for x, kernel in KERNELS.items() if isinstance(kernel, CheckedKernel)]
        raise ValueError(f"{name!r} is not a registered kernel; registered: {registered}")
    del KERNELS[name]
    clear_kernel_cache()


def available_kernels() -> dict[str, str | None]:
    """Return `None` for each kernel that runs on this machine, else the reason; the best first.

    Prebuilt kernels such as `"hub:kernels-community/flash-attn3"` are not listed: they are
    downloaded only if an attention names them.

    >>> available_kernels()["reference"] is None
    True
    """
    return {name: missing_kernel(name) for name in KERNELS}


def missing_kernel(name: str) -> str | None:
    """Return why the named kernel cannot run on this machine, or `None`.

    Raises:
        ValueError: if there is no kernel of that name.
    """
    check_kernel(name)
    return _missing(
        named_kernel(name), torch.cuda.current_device() if torch.cuda.is_available() else None
    )


def check_kernel(
    name: str | None, argument: str = "kernel", known: Mapping[str, Kernel] | None = None
) -> None:
    """Check that a kernel of this name is known, by default among all kernels; `None` is valid.

    Raises:
        TypeError: if the name is not a string.
        ValueError: if there is no kernel of that name.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{argument} must be the name of a kernel, a str, got {name!r}")
    names = list({**KERNELS, **HUB_KERNELS} if known is None else known)
    if name is not None and name not in names:
        where = "" if argument == "kernel" else f" in {argument}"
        raise ValueError(f"unknown kernel {name!r}{where}; known kernels: {', '.join(names)}")


def named_kernel(name: str) -> Kernel:
    """Return the kernel of a name that `check_kernel` has accepted."""
    return KERNELS[name] if name in KERNELS else HUB_KERNELS[name]


def select_kernel(name: str | None, problem: Problem) -> Kernel:
    """Return the named kernel, or the first that runs here and serves the problem.

    The choice is cached for each problem and device, see `clear_kernel_cache`.

    Raises:
        ValueError: if there is no kernel of that name, or it cannot serve the problem.
    """
    return _select(name, problem, _gpu(problem.device_type))


def clear_kernel_cache() -> None:
    """Clear the cached answers of kernels, after packages or devices have changed."""
    _kernel_for.cache_clear()
    _select.cache_clear()
    _missing.cache_clear()


def _gpu(device_type: str) -> int | None:
    """Return the index of the current GPU if tensors are on a GPU, or `None`."""
    # `missing()` may differ between the GPUs of a machine.
    is_gpu = device_type == "cuda" and torch.cuda.is_available()
    return torch.cuda.current_device() if is_gpu else None


@lru_cache(maxsize=1024)
def _kernel_for(name: str | None, gpu: int | None, setting: Determinism, *facts: Any) -> Kernel:
    """Cache `_select` by facts, because comparing them is cheaper than building a problem."""
    return _select(name, Problem(*facts, determinism=setting), gpu)


@lru_cache(maxsize=1024)
def _select(name: str | None, problem: Problem, device: int | None) -> Kernel:
    check_kernel(name)
    asked = preferred(problem) if name is None else [named_kernel(name)]
    # Lazy: with a kernel that serves, those after it are neither asked nor imported.
    # `supports` comes first: it is cheap, while `missing` may import a package.
    answers = (
        (able, reason or _missing(kernel, device))
        for kernel in asked
        for able, reason in (able_kernel(kernel, problem),)
    )
    return first_able(name, answers, "serve this attention")


def preferred(problem: Problem) -> list[Kernel]:
    """Return all kernels in the order in which they are asked to serve a problem."""
    *kernels, reference = KERNELS.values()
    # The sort is stable: kernels without a rate follow those with one in the usual order. The
    # reference is left out: it serves everything, so nothing after it would ever be asked.
    for rate in () if problem.fleeting else _RATES:
        kernels.sort(key=lambda x: -(rate(x.name, problem) or 0.0))
    return [*kernels, reference]


# FLOPs per second of a named kernel at a problem, `None` if nobody has measured it.
Rate = Callable[[str, Problem], float | None]

# What `follow_rates` was given: nothing, or one function.
_RATES: list[Rate] = []


def follow_rates(rate: Rate | None) -> None:
    """Prefer kernels by their rates, the fastest first; `None` goes back to the usual order.

    Kernels without a rate come after those that have one. Attention to a cache keeps the order.
    """
    _RATES[:] = [] if rate is None else [rate]
    clear_kernel_cache()


AnyKernel = TypeVar("AnyKernel", Kernel, PagedKernel)


def first_able(
    name: str | None, answers: Iterable[tuple[AnyKernel, str | None]], act: str, hint: str = ""
) -> AnyKernel:
    """Return the first kernel that has no reason against it.

    Args:
        name: the name of the only kernel that was asked; `None` if all were.
        answers: each kernel, and the reason why it cannot.
        act: what they were asked to do, for the error.
        hint: the end of the error.

    Raises:
        ValueError: if no kernel can; says why.
    """
    reasons = []
    for kernel, reason in answers:
        if reason is None:
            return kernel
        reasons.append(f"{kernel.name}: {reason}")
    what = f"kernel {name!r} cannot" if name else "no kernel can"
    # All reasons: a user cannot know which kernel should have served.
    raise ValueError(f"{what} {act} ({'; '.join(reasons)}){hint}")


NO_DROPOUT = "it cannot drop weights by the positions of the whole sequence"
NO_BIAS = "it cannot add a bias by distance to scores"


def able_kernel(kernel: Kernel, problem: Problem) -> tuple[Kernel, str | None]:
    """Return the kernel, widened if the gradient of lse needs it, and why it cannot serve."""
    if problem.dropout and not kernel.has_dropout:
        return kernel, NO_DROPOUT
    if problem.biased and not kernel.has_bias:
        return kernel, NO_BIAS
    reason = kernel.supports(problem)
    # Asked last: the reason of a kernel itself tells a user more.
    if reason is None and problem.by_block and not kernel.bitwise_by_block:
        reason = 'its bits depend on what else is in a launch, and order="fixed" needs others'
    if reason is None or not problem.differentiable_lse:
        return kernel, reason
    widened = WidenedKernel(kernel)
    return widened, widened.supports(problem)


@lru_cache(maxsize=1024)
def _missing(kernel: Kernel, device: int | None) -> str | None:
    """Return why the kernel cannot run, or `None`; `device` is the current GPU, for the cache."""
    return kernel.missing()


def _check_registrable(kernel: object) -> None:
    """Check that `kernel` is a kernel with a new name."""
    if not isinstance(kernel, Kernel):
        got = f"the class {kernel.__name__}" if isinstance(kernel, type) else type(kernel).__name__
        raise TypeError(
            "kernel must be an instance of a subclass of dtensor_ring.compute.kernels.Kernel, got "
            f"{got}"
        )
    name = getattr(kernel, "name", None)
    if not isinstance(name, str) or not name:
        raise TypeError(
            f"the name of a kernel is a string, got {name!r}; set `name` in {_class(kernel)}"
        )
    if name in KERNELS or name in HUB_KERNELS:
        taken = _class(named_kernel(name))
        raise ValueError(
            f"the kernel name {name!r} of {_class(kernel)} is taken by {taken}; "
            "give the new kernel another name"
        )


def _class(kernel: Kernel) -> str:
    """Return the qualified name of a kernel's class."""
    found = type(kernel.wrapped if isinstance(kernel, CheckedKernel) else kernel)
    return f"{found.__module__}.{found.__qualname__}"


class Build(NamedTuple):
    """A repository of builds of one kernel, and its version, which fixes the signatures."""

    repository: str
    version: int

    def module(self) -> ModuleType:
        """Return the build for this torch and GPU, which is downloaded if necessary."""
        return _loaded(self.repository, self.version)

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
