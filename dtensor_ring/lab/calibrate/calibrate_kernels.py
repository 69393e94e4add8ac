"""Measures what one rank computes: tiles of attention, merges, copies and matrix products."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import cycle, product
from typing import NamedTuple

import torch
from torch import Tensor

from dtensor_ring.compute.accumulate import RunningOutput
from dtensor_ring.compute.kernels import Kernel, Saved, Scores, kernel_for
from dtensor_ring.compute.kernels.kernel import Launch
from dtensor_ring.compute.memory import TOKEN_MAJOR, WHOLE, empty, pack
from dtensor_ring.lab.calibrate.stopwatch import Call, Points, Series, Stopwatch
from dtensor_ring.lab.machine import FORMS, KernelSpeed
from dtensor_ring.ops.options import default_scale
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.tile import Tile

# Queries of a tile, and as many keys; and those where only the time of the host counts.
ROWS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FEW_ROWS = 8

# Head dims of models, of queries and keys and of values; 192 and 128 are those of latent attention
# (DeepSeek-AI, 2024, arXiv 2405.04434).
HEAD_DIMS = (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)


class CalibratedProblem(NamedTuple):
    """The attention that is measured, on each rank.

    Attributes:
        heads: number of query heads, and of key and value heads.
        head_dim: head dim of queries and keys.
        dtype: their dtype.
        kernel: name of a kernel; `None` takes the first that serves.
        value_dim: head dim of values; `None` for that of queries.
    """

    heads: tuple[int, int]
    head_dim: int
    dtype: torch.dtype
    kernel: str | None = None
    value_dim: int | None = None

    @property
    def head_dims(self) -> tuple[int, int]:
        """Head dim of queries and keys, and of values."""
        return self.head_dim, self.value_dim or self.head_dim

    @property
    def mean_dim(self) -> int:
        """The mean of both, by which FLOPs go: one product has the one, one the other."""
        return sum(self.head_dims) // 2

    def kernels(self, device: torch.device) -> list[Kernel]:
        """Return the kernels of attentions without a window and with one; often it is one kernel.

        Raises:
            ValueError: if the kernel is unknown, or does not serve this problem here.
        """
        if self.heads[0] % self.heads[1]:
            raise ValueError(
                f"the query heads must be a multiple of those of keys and values, got {self.heads}"
            )
        dims = *self.head_dims, default_scale(self.head_dim), 0.0
        is_grouped = self.heads[0] > self.heads[1]
        found = [
            kernel_for(self.kernel, device.type, self.dtype, *dims, False, windowed, is_grouped)
            for windowed in (False, True)
        ]
        return list(dict.fromkeys(found))

    def tiles(self, device: torch.device) -> list[tuple[Kernel, str]]:
        """Return the forms of tiles that each kernel serves, the preferred kernel first."""
        *plain, windowed = self.kernels(device)
        # The others have no windows: the kernel of windows would not be a second one if they had.
        forms = [(kernel, form) for kernel in plain for form in reversed(FORMS[1:])]
        return [*forms, *((windowed, form) for form in reversed(FORMS))]

    def with_fewer_heads(self) -> list[CalibratedProblem]:
        """Return this problem, and those of groups of 2 and 4 ranks after an all-to-all."""
        query, key = self.heads
        every = [(max(1, query // size), max(1, key // size)) for size in (1, 2, 4)]
        return [self._replace(heads=heads) for heads in dict.fromkeys(every)]

    def with_other_dims(self, device: torch.device) -> list[CalibratedProblem]:
        """Return this attention with each other head dim of `HEAD_DIMS` that a kernel serves."""
        every = (self._replace(head_dim=x, value_dim=y) for x, y in HEAD_DIMS)
        return [x for x in every if x.head_dims != self.head_dims and x._is_served(device)]

    def _is_served(self, device: torch.device) -> bool:
        try:
            return bool(self.kernels(device))
        except ValueError:
            return False

    def zeros(
        self, device: torch.device, num_rows: int, is_key: bool = False, is_value: bool = False
    ) -> Tensor:
        """Return a tensor `(1, N, R, H)` in the memory order of projections."""
        shape = 1, self.heads[is_key], num_rows, self.head_dims[is_value]
        like = torch.empty(0, device=device, dtype=self.dtype)
        return empty(like, shape, TOKEN_MAJOR).zero_()

    def tensors(self, num_rows: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return a random query, gradient of the output, key and value of a square tile."""
        sides = (False, False), (False, True), (True, False), (True, True)
        return tuple(
            self.zeros(device, num_rows, is_key, is_value).normal_() for is_key, is_value in sides
        )


class TileCalls(NamedTuple):
    """A tile, with the FLOPs of a forward, and calls of a kernel for it."""

    flops: float
    forward: Call
    backward: Call


def mask_of_form(form: str, num_rows: int) -> Mask:
    """Return the mask of a square tile of a form; a window sees half of the rows back.

    >>> mask_of_form("window", 64).left
    31
    """
    windowed = Mask.sliding(num_rows // 2 - 1)
    return {"full": Mask.full(), "causal": Mask.causal(), "window": windowed}[form]


# FLOPs of a visible pair, for each number of a head: two products forward, five backward (Dao,
# 2023, arXiv 2307.08691).
FORWARD_FLOPS, BACKWARD_FLOPS = 4, 10
DIRECTIONS = "forward", "backward"


class TileSeries(NamedTuple):
    """Square tiles of a form, by a kernel: what is measured at all sizes, in both directions."""

    problem: CalibratedProblem
    kernel: Kernel
    form: str

    def name(self, direction: str) -> str:
        """Return the name under which the times of a direction are kept."""
        heads, dims = self.problem.heads[0], self.problem.head_dims
        of = "/".join(map(str, dict.fromkeys(dims)))
        return f"{self.kernel.name} {self.form} {heads} heads of {of} {direction}"

    def calls(self, tensors: tuple[Tensor, ...]) -> TileCalls:
        """Return the tile of a query, gradient of the output, key and value."""
        (query, grad_out, key, value), problem = tensors, self.problem
        num_rows = query.shape[2]
        mask = mask_of_form(self.form, num_rows)
        launch, scores = Launch(WHOLE, WHOLE, mask), Scores(mask, default_scale(problem.head_dim))

        def forward() -> tuple[Tensor, Tensor]:
            return self.kernel.forward(query, key, value, launch, scores)

        kept: list[Saved] = []

        def backward() -> object:
            if not kept:
                out, lse = forward()
                kept.append(Saved(grad_out, out, lse))
            return self.kernel.backward(kept[0], query, key, value, launch, scores)

        area = Tile((0, num_rows), (0, num_rows), mask).area
        flops = FORWARD_FLOPS * area * problem.heads[0] * problem.mean_dim
        return TileCalls(float(flops), forward, backward)

    def points(self, direction: str, tensors: Callable[..., tuple[Tensor, ...]]) -> Points:
        """Yield the FLOPs of ever larger tiles, and their calls, for `Stopwatch.measure`."""
        for num_rows in ROWS:
            tile = self.calls(tensors(self.problem, num_rows))
            if direction == DIRECTIONS[0]:
                yield tile.flops, tile.forward
            else:
                yield tile.flops * BACKWARD_FLOPS / FORWARD_FLOPS, tile.backward

    def speed(self, times: Mapping[str, Series], launch: float) -> KernelSpeed:
        """Return what was measured, without the host's seconds of a launch in it."""
        problem = self.problem
        forward, backward = (times[self.name(x)].curve(launch) for x in DIRECTIONS)
        return KernelSpeed(
            kernel=self.kernel.name,
            dtype=name_of(problem.dtype),
            head_dim=problem.mean_dim,
            form=self.form,
            forward=forward,
            backward=backward,
            heads=problem.heads[0],
        )


def tile_series(
    problem: CalibratedProblem, others: Sequence[CalibratedProblem], device: torch.device
) -> list[TileSeries]:
    """Return what is measured, the preferred kernel of the problem first.

    Args:
        problem: the attention, which is measured with fewer heads, too.
        others: attentions with other head dims.
        device: where they run.

    Raises:
        ValueError: if no kernel serves the problem.
    """
    fewer = product(problem.tiles(device), problem.with_fewer_heads())
    found = [TileSeries(asked, kernel, form) for (kernel, form), asked in fewer]
    return found + [
        TileSeries(asked, kernel, form) for asked in others for kernel, form in asked.tiles(device)
    ]


def kernel_points(series: Sequence[TileSeries], device: torch.device) -> dict[str, Points]:
    """Return tiles by their FLOPs, for `Stopwatch.measure`."""
    # All forms and directions share the tensors of a size.
    tensors = cache(partial(CalibratedProblem.tensors, device=device))
    every = product(series, DIRECTIONS)
    return {x.name(direction): x.points(direction, tensors) for x, direction in every}


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def launch_seconds(watch: Stopwatch, problem: CalibratedProblem) -> float:
    """Return the time of the host for a launch that computes next to nothing."""
    kernel, tensors = problem.kernels(watch.device)[0], problem.tensors(FEW_ROWS, watch.device)
    return watch.host_seconds(TileSeries(problem, kernel, "full").calls(tensors).forward)


# Bytes that calls in turn read and write, so that caches keep nothing of the last time, and the
# largest number of these calls.
FOOTPRINT, MAX_TURNS = 2**26, 32


def in_turns(make: Callable[[], Call], num_bytes: int) -> tuple[float, Call]:
    """Return bytes that are read and written, and equal calls in turn, each with its own tensors.

    What an attention merges and copies was mostly written long before, or by another rank.
    """
    count = min(max(1, FOOTPRINT // num_bytes), MAX_TURNS)
    calls = cycle([make() for _ in range(count)])
    return float(num_bytes), lambda: next(calls)()


def merge_points(problem: CalibratedProblem, device: torch.device) -> Points:
    """Yield merges of the outputs of two launches, by the bytes read and written."""

    def merge(num_rows: int) -> Call:
        query, *outs = (problem.zeros(device, num_rows) for _ in range(3))
        wide = torch.promote_types(problem.dtype, torch.float32)
        lses = [query.new_zeros(query.shape[:3], dtype=wide) for _ in outs]

        def call() -> None:
            running = RunningOutput(query, problem.head_dim, room=1)
            for out, lse in zip(outs, lses, strict=True):
                running.add(WHOLE, out, lse)
            running.make_room()

        return call

    # Two outputs are read, and one is written that is at least float32.
    of_number = 2 * problem.dtype.itemsize + max(4, problem.dtype.itemsize)
    for num_rows in ROWS:
        num_bytes = problem.heads[0] * num_rows * problem.head_dim * of_number
        yield in_turns(partial(merge, num_rows), num_bytes)


def pack_points(problem: CalibratedProblem, device: torch.device) -> Points:
    """Yield copies of two ranges of columns to adjacent ones, by the bytes read and written."""

    def copy(num_rows: int) -> Call:
        half = num_rows // 2
        # A column between the ranges is left out, so that they do not join.
        x, cols = problem.zeros(device, num_rows + 1), [(0, half), (half + 1, num_rows + 1)]
        return partial(pack, problem.zeros(device, num_rows), x, Cols.union(cols))

    for num_rows in ROWS:
        num_bytes = 2 * problem.heads[0] * num_rows * problem.head_dim * problem.dtype.itemsize
        yield in_turns(partial(copy, num_rows), num_bytes)


# Rows and columns of the matrices that are multiplied, and bytes of those that are added, on a CPU
# and on a GPU.
MATRIX = 1024, 8192
ADDED = 2**26, 2**30


def measure_matrices(watch: Stopwatch, dtypes: list[torch.dtype]) -> dict[str, float]:
    """Return the FLOPs per second of matrix products, by the name of their dtype."""
    size, found = MATRIX[watch.on_gpu], {}
    for dtype in dict.fromkeys(dtypes):
        a, b, out = (torch.randn(size, size, device=watch.device).to(dtype) for _ in range(3))
        seconds = watch.seconds(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))
        found[name_of(dtype)] = 2.0 * size**3 / seconds
    return found


def measure_elements(watch: Stopwatch) -> float:
    """Return the numbers per second of a product that looks them up, as dtypes differ."""
    numel, of = ADDED[watch.on_gpu] // 4, (torch.bfloat16, torch.float32)
    a, b = (torch.ones(numel, device=watch.device, dtype=x) for x in of)
    out = torch.empty_like(b)
    return numel / watch.seconds(lambda: torch.mul(a, b, out=out))


def measure_memory(watch: Stopwatch) -> float:
    """Return the bytes per second that an addition reads and writes."""
    numel = ADDED[watch.on_gpu] // 4
    a, b, out = (torch.ones(numel, device=watch.device) for _ in range(3))
    return 3 * a.nbytes / watch.seconds(lambda: torch.add(a, b, out=out))
