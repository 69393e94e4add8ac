"""Checks what a registered kernel returns against the contract of `Kernel`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtensor_ring.compute.kernels.kernel import Gradients, Kernel, Result
from dtensor_ring.compute.kernels.launch import Launch
from dtensor_ring.compute.kernels.problem import Problem
from dtensor_ring.compute.kernels.saved import Saved
from dtensor_ring.compute.kernels.scores import Scores


class Expected(NamedTuple):
    """A tensor as the contract wants it; wider dtypes will do for lse only."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    or_wider: bool = False

    def __str__(self) -> str:
        wider = " or wider" if self.or_wider else ""
        return f"{self.name} {self.shape} {self.dtype}{wider} on {self.device}"

    def describes(self, x: object) -> bool:
        """Whether `x` is such a tensor."""
        # Strides are not compared: adapters may return views.
        if not isinstance(x, Tensor) or (tuple(x.shape), x.device) != (self.shape, self.device):
            return False
        is_wider = self.or_wider and torch.promote_types(x.dtype, self.dtype) == x.dtype
        return x.dtype == self.dtype or (is_wider and x.dtype.is_floating_point)


class CheckedKernel(Kernel):
    """A kernel whose first launch of each kind is checked.

    Kinds are forward and backward, of a tile and of segments, for each dtype. Later launches cost
    one look-up.

    Args:
        kernel: the kernel to check.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.wrapped = kernel
        self.name, self.has_segments = kernel.name, kernel.has_segments  # type: ignore[misc]
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
        # The dtype too: a kernel may cast for one and forget another.
        kind = "backward", launch.segments is None, q.dtype
        if kind not in self._seen:
            self._check(kind, result, _expected_gradients(q, k, v))
        return result

    def _check(
        self, kind: tuple[str, bool, torch.dtype], result: Any, expected: list[Expected]
    ) -> None:
        """Remember a kind whose result is right."""
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
    """`out` and `lse` of these queries."""
    *rows, _ = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    # Heads come first in the lse of segments, as in that of a tile.
    lse_shape = tuple(rows) if is_tile else (rows[1], rows[0])
    return [
        Expected("out", (*rows, value.shape[-1]), query.dtype, query.device),
        Expected("lse", lse_shape, wide, query.device, or_wider=True),
    ]


def _expected_gradients(query: Tensor, key: Tensor, value: Tensor) -> list[Expected]:
    """Gradients are like their tensors."""
    inputs = {"query": query, "key": key, "value": value}
    return [
        Expected(f"gradient of {name}", tuple(x.shape), x.dtype, x.device)
        for name, x in inputs.items()
    ]


def _described(result: object) -> str:
    """The result of a kernel, in the words of `Expected`."""
    if isinstance(result, Tensor):
        return f"{tuple(result.shape)} {result.dtype} on {result.device}"
    if isinstance(result, (tuple, list)):
        return f"({', '.join(map(_described, result))})"
    return type(result).__name__
