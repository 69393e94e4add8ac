"""The paged kernels, the choice of one, and block kernels that compute many entries in a launch.

Where a block kernel reads blocks, they are the rows of a batch, and the partial results of an
entry's blocks are merged by lse: the splits of keys in flash-decoding (Dao et al., 2023). So no key
is copied, lengths may differ, and one long sequence keeps a whole GPU busy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from dtensor_ring.compute.kernels.emulated import fold_heads, unfold_heads
from dtensor_ring.compute.kernels.kernel import (
    Kernel,
    Launch,
    PagedKernel,
    Pages,
    Problem,
    Result,
    Scores,
    no_gpu,
)
from dtensor_ring.compute.kernels.reference import Reference
from dtensor_ring.compute.kernels.registry import KERNELS, first_able, kernel_for
from dtensor_ring.compute.kernels.varlen import VarlenKernel
from dtensor_ring.compute.memory import WHOLE, Numbers
from dtensor_ring.compute.merge import has_triton, merge_ragged
from dtensor_ring.paged.paged_flashinfer import PagedFlashInfer
from dtensor_ring.planning.ranges import Span
from dtensor_ring.planning.tile import FULL


@lru_cache(maxsize=256)
def paged_kernel(name: str | None, problem: Problem, block: int) -> PagedKernel:
    """Return the named kernel, or the first that runs here and supports the problem.

    Args:
        name: the name of the kernel; `None` selects the first that fits.
        problem: the facts of the call, with the capability of the current GPU.
        block: keys of a block.

    Raises:
        ValueError: if the name is unknown, or no kernel supports the problem and the blocks.
    """
    known = {kernel.name: kernel for kernel in PAGED}
    if name is not None and name not in known:
        raise ValueError(f"unknown paged kernel {name!r}; known kernels: {', '.join(known)}")
    asked = known.values() if name is None else (known[name],)
    # `supports` first: it is cheap, but `missing` may import a package.
    answers = ((kernel, kernel.supports(problem, block) or kernel.missing()) for kernel in asked)
    hint = "" if name is None else "; leave kernel out, or take 'in_place', which reads any blocks"
    return first_able(name, answers, "read these blocks", hint)


@dataclass(frozen=True)
class BlockLaunch:
    """Blocks that equally many entries read, in one launch of a block kernel.

    Attributes:
        blocks: the blocks, as a range of neighbours or by their indices `(P,)`.
        readers: the entries that read each block, `(P, r)`.
    """

    blocks: Span | Numbers
    readers: Numbers

    def attend(
        self, query: Tensor, key_blocks: Tensor, value_blocks: Tensor, scores: Scores
    ) -> Result:
        """Return `out` `(P * r, R, N, Hv)` and `lse` `(P * r, R, N)` of each block and reader."""
        keys, values = (self._read(x).transpose(1, 2) for x in (key_blocks, value_blocks))
        (readers,) = self.readers.on(query.device)
        # The rows of a tile are the queries of all readers of a block, and of all heads that share
        # a key head: so a key is read once.
        queries = fold_heads(query[readers].flatten(1, 2).transpose(1, 2), keys.shape[1])
        kernel = block_kernel(queries, values.shape[3], scores)
        found = kernel.forward(queries, keys, values, Launch(WHOLE, WHOLE, FULL), scores)
        out, lse = (unfold_heads(x, query.shape[2]) for x in found)
        rows = readers.numel(), query.shape[1]
        return out.transpose(1, 2).reshape((*rows, *out.shape[1::2])), lse.mT.reshape((*rows, -1))

    def _read(self, x: Tensor) -> Tensor:
        """Return the blocks: without a copy if they are neighbours."""
        if isinstance(self.blocks, Numbers):
            return x[self.blocks.on(x.device)[0]]
        return x[self.blocks[0] : self.blocks[1]]


@dataclass(frozen=True)
class BlockLaunches:
    """All blocks that some entries read, each once.

    Attributes:
        parts: the launches.
        numbers: where the results of each entry are among those of all launches, entry by entry;
            the entry of each of these; and the number of blocks of each entry, at least 1.
    """

    parts: tuple[BlockLaunch, ...]
    numbers: Numbers

    def attend(
        self, query: Tensor, key_blocks: Tensor, value_blocks: Tensor, scores: Scores
    ) -> Result:
        """Return `out` `(E, R, N, Hv)` and `lse` `(E, R, N)` of queries `(E, R, N, H)`."""
        found = [x.attend(query, key_blocks, value_blocks, scores) for x in self.parts]
        outs, lses = (x[0] if len(x) == 1 else torch.cat(x) for x in zip(*found, strict=True))
        places, entries, counts = self.numbers.on(query.device)
        return merge_ragged(outs[places], lses[places], entries, counts)


def launches_of(pages: Pages) -> BlockLaunches:
    """Return the launches for the blocks that some entries read in full, made once for all layers.

    The time is that of a sort of all pairs of an entry and a block.
    """
    found = _MADE.get(pages)
    if found is None:
        found = _MADE[pages] = _launches(pages.tables, pages.lengths // pages.block)
    return found


# The launches of each table of blocks. The keys are weak, so launches live as long as their plan.
_MADE: WeakKeyDictionary[Pages, BlockLaunches] = WeakKeyDictionary()


# Blocks between those that are read are computed, too, unless most of a range is not read: that
# costs less than a copy of the others.
MOST_COMPUTED = 2


def _launches(tables: np.ndarray, counts: np.ndarray) -> BlockLaunches:
    entries = np.repeat(np.arange(len(counts)), counts)
    read = tables[np.arange(tables.shape[1]) < counts[:, None]]
    # All readers of a block side by side: it is read once, with the queries of all of them.
    # Entry 0 reads the blocks 3 and 5, entry 1 the blocks 3 and 7. Two launches:
    #     one reader     blocks 5 6 7 as a range; what reader 0 gets of 6 is not used
    #     two readers    block 3, with the queries of both
    order = np.argsort(read, kind="stable")
    blocks, firsts, num_readers = np.unique(read[order], return_index=True, return_counts=True)
    # Powers of two, so that few launches serve all: some queries are computed twice.
    widths = 1 << np.ceil(np.log2(num_readers)).astype(int)
    parts, places, num_rows = [], np.empty(len(read), dtype=np.int64), 0
    for width in np.unique(widths):
        some = widths == width
        begin, end = blocks[some].min(), blocks[some].max() + 1
        is_range = end - begin <= MOST_COMPUTED * some.sum()
        # Of a range, blocks that nobody reads have reader 0, and no place takes their results.
        at = blocks[some] - begin if is_range else np.arange(some.sum())
        readers = np.zeros((end - begin if is_range else len(at), width), dtype=np.int64)
        # Rows up to the power of two repeat the last reader; both copies are the same result.
        numbers = np.minimum(np.arange(width), num_readers[some, None] - 1)
        pairs = order[firsts[some, None] + numbers]
        readers[at] = entries[pairs]
        places[pairs] = num_rows + at[:, None] * width + numbers
        num_rows += readers.size
        where = (int(begin), int(end)) if is_range else _numbers(blocks[some])
        parts.append(BlockLaunch(where, _numbers(readers)))
    return BlockLaunches(tuple(parts), _numbers(places, entries, counts))


def _numbers(*arrays: np.ndarray) -> Numbers:
    return Numbers(torch.int64, *map(torch.from_numpy, arrays))


def block_kernel(query: Tensor, value_head_dim: int, scores: Scores) -> Kernel:
    """Return the best block kernel for tiles of a query `(B, Nkv, R, H)`, one head a key head."""
    facts = query.dtype, query.shape[3], value_head_dim, scores.scale, scores.softcap
    rest = False, False, False, True  # not packed, no dropout, no blocks; other tiles each call
    return kernel_for(None, query.device.type, *facts, False, True, False, *rest)


class Anywhere(PagedKernel):
    """A paged kernel that needs no package and no GPU, for all problems of the reference."""

    def missing(self) -> str | None:
        return None

    def supports(self, problem: Problem, block: int) -> str | None:
        return Reference().supports(problem)


class Gathered(Anywhere):
    """Copies the keys of an entry together. This kernel defines the semantics of the others."""

    name = "gathered"

    def forward(
        self, query: Tensor, key_blocks: Tensor, value_blocks: Tensor, pages: Pages, scores: Scores
    ) -> Result:
        tables, outs, lses = pages.on(query.device)[0], [], []
        for table, length, q in zip(tables, pages.lengths.tolist(), query.split(1), strict=True):
            k, v = (x[table].flatten(0, 1)[:length] for x in (key_blocks, value_blocks))
            k, v = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
            launch = Launch(WHOLE, WHOLE, FULL)
            out, lse = Reference().forward(q.transpose(1, 2), k, v, launch, scores)
            outs.append(out.transpose(1, 2))
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses)


class PagedTriton(PagedKernel):
    """Reads block tables in one launch, and merges splits of keys in another if there are some."""

    name = "paged_triton"

    def missing(self) -> str | None:
        return no_gpu() or (None if has_triton() else "Triton is not installed")

    def supports(self, problem: Problem, block: int) -> str | None:
        if problem.device_type != "cuda":
            return f"it runs on CUDA, the tensors are on {problem.device_type}"
        if problem.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"it takes bfloat16, float16 and float32, not {problem.dtype}"
        dims = problem.head_dim, problem.value_head_dim
        # Of 16 keys, the fewest of a step, which must fit registers and shared memory.
        largest = 128 if problem.dtype == torch.float32 else 512
        if max(dims) > largest:
            return (
                f"it takes head dims up to {largest} of {problem.dtype}, got {dims[0]} and "
                f"{dims[1]}"
            )
        return None

    def forward(
        self, query: Tensor, key_blocks: Tensor, value_blocks: Tensor, pages: Pages, scores: Scores
    ) -> Result:
        from dtensor_ring.paged.paged_triton import attend

        # Rows of blocks lie side by side; those that a model made may not.
        return attend(query, key_blocks.contiguous(), value_blocks.contiguous(), pages, scores)


class InPlace(Anywhere):
    """Runs a block kernel on all blocks of all entries at once, and merges by lse.

    Blocks are the rows of a batch, as the splits of keys in flash-decoding (Dao et al., 2023). A
    block that several entries share is read once, with the queries of all of them.
    """

    name = "in_place"
    whole_blocks = True

    def forward(
        self, query: Tensor, key_blocks: Tensor, value_blocks: Tensor, pages: Pages, scores: Scores
    ) -> Result:
        out, lse = launches_of(pages).attend(query, key_blocks, value_blocks, scores)
        return out.to(query.dtype), lse.transpose(1, 2)


# In the order of the registry, whose paged kernels are for GPUs; then those that run anywhere.
# FlashInfer comes after ours, as nobody has measured it.
PAGED: tuple[PagedKernel, ...] = (
    *(x.paged for x in KERNELS.values() if isinstance(x, VarlenKernel) and x.paged is not None),
    PagedTriton(),
    PagedFlashInfer(),
    InPlace(),
    Gathered(),
)
