"""The paged kernels, and the function that selects one."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from dtensor_ring.compute.kernels.kernel import Launch, Problem, Result, Scores, no_gpu
from dtensor_ring.compute.kernels.paged_kernel import PagedKernel, Pages
from dtensor_ring.compute.kernels.reference import Reference
from dtensor_ring.compute.kernels.registry import KERNELS, first_able
from dtensor_ring.compute.kernels.varlen import VarlenKernel
from dtensor_ring.compute.memory import WHOLE
from dtensor_ring.compute.merge import has_triton
from dtensor_ring.paged.block_launches import launches_of
from dtensor_ring.planning.tile import FULL


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
        tables, found = pages.on(query.device)[0], []
        for table, length, q in zip(tables, pages.lengths.tolist(), query.split(1), strict=True):
            k, v = (x[table].flatten(0, 1)[:length] for x in (key_blocks, value_blocks))
            pair = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
            launch = Launch(WHOLE, WHOLE, FULL)
            found.append(Reference().forward(q.transpose(1, 2), *pair, launch, scores))
        outs, lses = zip(*found, strict=True)
        return torch.cat([out.transpose(1, 2) for out in outs]), torch.cat(lses)


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
PAGED: tuple[PagedKernel, ...] = (
    *(x.paged for x in KERNELS.values() if isinstance(x, VarlenKernel) and x.paged is not None),
    PagedTriton(),
    InPlace(),
    Gathered(),
)


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
