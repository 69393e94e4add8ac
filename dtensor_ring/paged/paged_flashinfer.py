"""FlashInfer's attention to keys in blocks, of the flashinfer-python package."""

from __future__ import annotations

import math
from inspect import signature
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from dtensor_ring.compute.capture import refuse_capture
from dtensor_ring.compute.kernels.kernel import (
    COMPILER,
    PagedKernel,
    Pages,
    Problem,
    Result,
    Scores,
    gpu_limits,
    load,
    no_gpu,
    one_head_dim,
)
from dtensor_ring.compute.kernels.packages import missing_package, too_old
from dtensor_ring.planning.lru import ByteStore

# Head dims that kernels are built for.
HEAD_DIMS = (64, 128, 256)


# Note [FlashInfer's plans]. This is read from the sources of version 0.7.4; no GPU has run it here.
#
# - A wrapper plans a launch on the host, from the blocks of all entries, and then runs it for any
#   number of layers. A plan overwrites memory of the wrapper, also pinned memory that a copy may
#   still read. So a wrapper that plans again waits for its last copy.
# - A decoded token is a prefill of one row: the package runs the same kernel for both, where it
#   uses tensor cores. Its heads of a group are rows of a tile. It is not causal here: a row sees
#   all keys.
# - lse is `(T, N)`, the logarithm to the base 2.
# - The backend `"fa2"` runs on all GPUs from compute capability 8.0 on. Others are chosen by GPU
#   and version, and not all say which base their lse has.
class PagedFlashInfer(PagedKernel):
    """Reads block tables by `BatchPrefillWithPagedKVCacheWrapper`, planned once for all layers."""

    name = "flashinfer"

    def missing(self) -> str | None:
        return no_gpu(8, 9, 10) or _missing_package()

    def supports(self, problem: Problem, block: int) -> str | None:
        if reason := gpu_limits(problem) or one_head_dim(problem, max(HEAD_DIMS)):
            return reason
        if problem.head_dim not in HEAD_DIMS:
            return f"it takes head dims of {HEAD_DIMS}, got {problem.head_dim}"
        return None

    def forward(
        self, query: Tensor, key_blocks: Tensor, value_blocks: Tensor, pages: Pages, scores: Scores
    ) -> Result:
        refuse_capture(
            query.device,
            "the paged kernel 'flashinfer' plans each launch on the host",
            "take kernel='paged_triton', which a graph can replay",
        )
        num_entries, num_rows = query.shape[:2]
        with COMPILER, torch.no_grad():
            wrapper = _wrappers_of(query, key_blocks, scores).planned(pages)
            rows = query.reshape((num_entries * num_rows, *query.shape[2:])).contiguous()
            out, lse = wrapper.run(rows, (key_blocks, value_blocks), return_lse=True)
        # FlashInfer's lse has base 2.
        lse = (lse * math.log(2)).unflatten(0, (num_entries, num_rows))
        return out.unflatten(0, (num_entries, num_rows)), lse.transpose(1, 2).contiguous()


class _Wrapper:
    """A wrapper of the package, and the blocks that it has planned for."""

    def __init__(self, made: Any) -> None:
        self.made = made
        self._pages: ref[Pages] | None = None
        self._copied: torch.cuda.Event | None = None

    def has(self, pages: Pages) -> bool:
        """Return whether the last plan is for these blocks."""
        return self._pages is not None and self._pages() is pages

    def plan(self, pages: Pages, num_rows: int, how: dict[str, Any]) -> None:
        """Plan launches with `num_rows` rows for each entry; `how` has the other arguments."""
        if self._copied is not None:
            self._copied.synchronize()
        rows, blocks, read, last = _table(pages, num_rows)
        self.made.plan(rows, blocks, read, last, **how)
        self._pages, device = ref(pages), self.made.device
        if device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(device))


# Bytes of a wrapper for the splits of keys, which the package recommends, and for its plan.
WORKSPACE, OF_PLAN = 2**27, 2**23

# Wrappers of one kind: layers with windows and layers without take turns at two plans or more.
WRAPPERS = 4


class _Wrappers:
    """Wrappers for calls that differ in their blocks only, the last used one at the end.

    Args:
        query: `(E, R, N, H)`.
        key_blocks: `(num_blocks, block, Nkv, H)`.
        scores: scale and softcap.
    """

    num_bytes = WORKSPACE + WRAPPERS * OF_PLAN

    def __init__(self, query: Tensor, key_blocks: Tensor, scores: Scores) -> None:
        (_, self._num_rows, heads, head_dim), block = query.shape, key_blocks.shape[1]
        self._how: dict[str, Any] = {
            "num_qo_heads": heads,
            "num_kv_heads": key_blocks.shape[2],
            "head_dim_qk": head_dim,
            "page_size": block,
            "causal": False,
            "sm_scale": scores.scale,
            "logits_soft_cap": scores.softcap,
            "q_data_type": query.dtype,
            "kv_data_type": key_blocks.dtype,
        }
        # Launches of a stream follow one another, so they share memory for their splits.
        self._workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=query.device)
        self._kept: list[_Wrapper] = []

    def planned(self, pages: Pages) -> Any:
        """Return a wrapper of the package that has planned for these blocks."""
        wrapper = next((x for x in self._kept if x.has(pages)), None)
        if wrapper is None:
            is_full = len(self._kept) == WRAPPERS
            wrapper = self._kept[0] if is_full else self._made()
            wrapper.plan(pages, self._num_rows, self._how)
        # The first one was used longest ago, and plans again when there are too many.
        self._kept = [x for x in self._kept if x is not wrapper] + [wrapper]
        return wrapper.made

    def _made(self) -> _Wrapper:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        return _Wrapper(BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="fa2"))


# By what a plan depends on beside the blocks, up to 512 MiB of memory on devices.
_WRAPPERS = ByteStore[_Wrappers](2**29, lambda wrappers: wrappers.num_bytes)


def _wrappers_of(query: Tensor, key_blocks: Tensor, scores: Scores) -> _Wrappers:
    device = query.device
    stream = torch.cuda.current_stream(device).cuda_stream if query.is_cuda else None
    sizes = *query.shape[1:], *key_blocks.shape[1:3]
    key = device, stream, query.dtype, key_blocks.dtype, sizes, scores.scale, scores.softcap
    return _WRAPPERS.get(key) or _WRAPPERS.put(key, _Wrappers(query, key_blocks, scores))


def _table(pages: Pages, num_rows: int) -> tuple[Tensor, ...]:
    """Return boundaries of rows and of blocks, the blocks, and the keys of each last block."""
    counts = -(-pages.lengths // pages.block)
    # FlashInfer takes the blocks of all rows in one list, without the padding of tables.
    read = pages.tables[np.arange(pages.tables.shape[1]) < counts[:, None]]
    last = pages.lengths - (counts - 1) * pages.block
    rows = np.arange(len(counts) + 1) * num_rows
    blocks = np.append(0, np.cumsum(counts))
    arrays = (rows, blocks, read, last)
    rows, blocks, read, last = (torch.from_numpy(x.astype(np.int32)) for x in arrays)
    return rows, blocks, read, last


# The package, the oldest version whose sources were read, and what its functions must take.
PACKAGE, OLDEST = "flashinfer-python", (0, 7)
SIZES = ("num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size")
PLANNED = (*SIZES, "causal", "sm_scale", "logits_soft_cap", "q_data_type")


def _missing_package() -> str | None:
    return missing_package(PACKAGE, _lacks)


def _lacks(found: str) -> str | None:
    if reason := too_old(PACKAGE, OLDEST, found):
        return reason
    wrapper = load("flashinfer").BatchPrefillWithPagedKVCacheWrapper
    absent = sorted({*PLANNED} - {*signature(wrapper.plan).parameters})
    if absent or "return_lse" not in signature(wrapper.run).parameters:
        return f"{PACKAGE} {found} takes no {', '.join(absent or ['return_lse'])}"
    return None
