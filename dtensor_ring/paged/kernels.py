"""The paged kernels, and the function that selects one."""

from __future__ import annotations

from abc import abstractmethod
from functools import lru_cache

import torch
from torch import Tensor

from dtensor_ring.compute.accumulate import RunningOutput
from dtensor_ring.compute.kernels.kernel import Kernel, Launch, Problem, Result, Scores
from dtensor_ring.compute.kernels.paged_kernel import PagedKernel, Pages
from dtensor_ring.compute.kernels.reference import Reference
from dtensor_ring.compute.kernels.registry import KERNELS, first_able, kernel_for
from dtensor_ring.compute.kernels.varlen import VarlenKernel
from dtensor_ring.compute.memory import WHOLE, region
from dtensor_ring.planning.tile import FULL


class _ByEntry(PagedKernel):
    """A paged kernel that computes one entry at a time."""

    def missing(self) -> str | None:
        return None

    def supports(self, problem: Problem, block: int) -> str | None:
        return Reference().supports(problem)

    def forward(
        self, query: Tensor, key_blocks: Tensor, value_blocks: Tensor, pages: Pages, scores: Scores
    ) -> Result:
        # One long row of tokens: any range of neighbouring blocks is a view.
        keys, values = key_blocks.flatten(0, 1), value_blocks.flatten(0, 1)
        found = [
            self.attend(
                query[entry : entry + 1].transpose(1, 2), keys, values, pages, entry, scores
            )
            for entry in range(len(query))
        ]
        outs, lses = zip(*found, strict=True)
        return torch.cat([out.transpose(1, 2) for out in outs]), torch.cat(lses)

    @abstractmethod
    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, pages: Pages, entry: int, scores: Scores
    ) -> Result:
        """Return `out` `(1, N, R, Hv)` and `lse` `(1, N, R)` of an entry.

        Args:
            query: `(1, N, R, H)`.
            keys: all tokens of the pool `(num_blocks * block, Nkv, H)`.
            values: `(num_blocks * block, Nkv, Hv)`.
            pages: the blocks that the entries read.
            entry: the index of the entry.
            scores: scale and softcap.
        """


class Gathered(_ByEntry):
    """Copies the keys of an entry together. This kernel defines the semantics of the others."""

    name = "gathered"

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, pages: Pages, entry: int, scores: Scores
    ) -> Result:
        table, length = pages.on(keys.device)[0][entry], int(pages.lengths[entry])
        k, v = (
            _by_head(x.unflatten(0, (-1, pages.block))[table].flatten(0, 1)[:length])
            for x in (keys, values)
        )
        return Reference().forward(query, k, v, Launch(WHOLE, WHOLE, FULL), scores)


class InPlace(_ByEntry):
    """Runs a block kernel on ranges of neighbouring blocks in place, and merges by lse."""

    name = "in_place"

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, pages: Pages, entry: int, scores: Scores
    ) -> Result:
        kernel = block_kernel(query, keys.shape[1], values.shape[2], scores)
        partial = RunningOutput(query, values.shape[2])
        rows = region(None, (0, query.shape[2]))
        for begin, end in pages.stretches[entry]:
            partial.make_room()
            k, v = _by_head(keys[begin:end]), _by_head(values[begin:end])
            out, lse = kernel.forward(query, k, v, Launch(WHOLE, WHOLE, FULL), scores)
            partial.add(rows, out, lse)
        return partial.result()


def block_kernel(query: Tensor, num_kv_heads: int, value_head_dim: int, scores: Scores) -> Kernel:
    """Return the best block kernel for tiles of a query `(B, N, R, H)`."""
    facts = query.dtype, query.shape[3], value_head_dim, scores.scale, scores.softcap
    is_grouped = num_kv_heads < query.shape[1]
    return kernel_for(None, query.device.type, *facts, False, True, is_grouped)


def _by_head(tokens: Tensor) -> Tensor:
    """Transpose `(C, Nkv, H)` to `(1, Nkv, C, H)`."""
    return tokens.transpose(0, 1).unsqueeze(0)


# In the order of the registry, whose paged kernels are for GPUs; then those that run anywhere.
PAGED: tuple[PagedKernel, ...] = (
    *(x.paged for x in KERNELS.values() if isinstance(x, VarlenKernel) and x.paged is not None),
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
