"""The most bytes that a call has alive at once: of tensors, of arrays and of Python's objects."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def peak_of(run: Callable[[], object]) -> int:
    """The most bytes that are alive beside those from before, whichever op or array made them."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
            run()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    found = traced.profiler.kineto_results.events()
    changes = sorted(
        (x.start_ns(), i, x.nbytes()) for i, x in enumerate(found) if x.name() == "[memory]"
    )
    tensors = max(accumulate(num_bytes for *_, num_bytes in changes), default=0)
    return tensors + peak - before


def slope_of(
    peak: Callable[[int, int], int], shards: tuple[int, int], worlds: tuple[int, int]
) -> float:
    """Bytes for each token of all ranks, by the peaks of four lengths.

    What grows with the tokens of a rank, or with the ranks, is in two of the peaks each, and drops
    out: what is left grows with their product.
    """
    (small, large), (few, many) = shards, worlds
    mixed = peak(large, many) - peak(small, many) - peak(large, few) + peak(small, few)
    return mixed / ((large - small) * (many - few))
