"""The most bytes that a call has alive at once: of tensors, and of arrays and Python's objects."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from torch.profiler import ProfilerActivity, profile


class Peak(NamedTuple):
    """Bytes that are alive beside those from before, whoever made them."""

    tensors: int
    objects: int


def peak_of(run: Callable[[], object]) -> Peak:
    """The peak of a call on a CPU."""
    gc.collect()
    gc.disable()  # else the peak depends on when Python finds cycles
    tracemalloc.start()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
            run()
        _, objects = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    result = traced.profiler
    assert result is not None
    changes = [x for x in result.kineto_results.events() if x.name() == "[memory]"]
    sizes = [x.nbytes() for x in sorted(changes, key=lambda x: x.start_ns())]
    return Peak(max(accumulate(sizes), default=0), objects)


class Slope(NamedTuple):
    """Bytes of a peak for each token of all ranks."""

    tensors: float
    objects: float


def slope_of(
    peak: Callable[[int, int], Peak],
    shards: tuple[int, int],
    worlds: tuple[int, int],
    limit: Slope | None = None,
) -> Slope:
    """By the peaks of four batches, of two numbers of a rank's tokens and two of ranks.

    A slope over a limit is measured again: what Python makes once is in the first run only.
    """
    peak(shards[0] // 2, worlds[0])  # imports what is imported late; each other peak plans anew
    found = _slope_of(peak, shards, worlds)
    is_over = limit and (found.tensors > limit.tensors or found.objects > limit.objects)
    return _slope_of(peak, shards, worlds) if is_over else found


def _slope_of(
    peak: Callable[[int, int], Peak], shards: tuple[int, int], worlds: tuple[int, int]
) -> Slope:
    """Tensors are compared where only the number of ranks differs: the larger growth of the two.

    Planning keeps objects for each rank, which is much where ranks have few tokens: what grows with
    the ranks alone is in the peaks of both numbers of tokens, and drops out.
    """
    (small, large), (few, many) = shards, worlds
    grown = []
    for num_tokens in shards:
        before, after = peak(num_tokens, few), peak(num_tokens, many)
        grown.append(Peak(after.tensors - before.tensors, after.objects - before.objects))
    num_ranks = many - few
    tensors = (x.tensors / num_tokens for x, num_tokens in zip(grown, shards, strict=True))
    objects = (grown[1].objects - grown[0].objects) / (large - small)
    return Slope(max(tensors) / num_ranks, objects / num_ranks)
