"""The paged kernels of any device: one copies an entry's blocks together, one reads in place."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from dtensor_ring.compute.kernels.kernel import Kernel, Result
from dtensor_ring.compute.kernels.launch import Launch
from dtensor_ring.compute.kernels.paged import PagedKernel, Pages
from dtensor_ring.compute.kernels.problem import Problem
from dtensor_ring.compute.kernels.reference import Reference
from dtensor_ring.compute.kernels.registry import kernel_for
from dtensor_ring.compute.kernels.scores import Scores
from dtensor_ring.compute.memory import WHOLE, region
from dtensor_ring.compute.partial import Partial
from dtensor_ring.planning.tile import FULL


class _ByEntry(PagedKernel):
    """Runs a block kernel entry by entry."""

    def missing(self) -> str | None:
        return None

    def supports(self, problem: Problem, block: int) -> str | None:
        return Reference().supports(problem)

    def forward(
        self, query: Tensor, key_blocks: Tensor, value_blocks: Tensor, pages: Pages, scores: Scores
    ) -> Result:
        # As one long row of tokens: a range of them is a view.
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
        """`out` `(1, N, R, Hv)` and `lse` `(1, N, R)` of an entry.

        Args:
            query: `(1, N, R, H)`.
            keys: all tokens of the pool `(num_blocks * block, Nkv, H)`.
            values: `(num_blocks * block, Nkv, Hv)`.
            pages: which blocks the entries read.
            entry: which of them.
            scores: scale and softcap.
        """


class Gathered(_ByEntry):
    """The paged kernel that defines the semantics: it copies the keys of an entry together."""

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
    """Reads ranges of neighbouring blocks where they are, by a block kernel, and merges by lse."""

    name = "in_place"

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, pages: Pages, entry: int, scores: Scores
    ) -> Result:
        kernel = block_kernel(query, keys.shape[1], values.shape[2], scores)
        partial = Partial(query, values.shape[2])
        rows = region(None, (0, query.shape[2]))
        for begin, end in pages.stretches[entry]:
            k, v = _by_head(keys[begin:end]), _by_head(values[begin:end])
            out, lse = kernel.forward(query, k, v, Launch(WHOLE, WHOLE, FULL), scores)
            partial.add(rows, out, lse)
        return partial.result()


def block_kernel(query: Tensor, num_kv_heads: int, value_head_dim: int, scores: Scores) -> Kernel:
    """The best block kernel for tiles of a query `(B, N, R, H)`."""
    facts = query.dtype, query.shape[3], value_head_dim, scores.scale, scores.softcap
    is_grouped = num_kv_heads < query.shape[1]
    return kernel_for(None, query.device.type, *facts, False, True, is_grouped)


def _by_head(tokens: Tensor) -> Tensor:
    """`(C, Nkv, H)` to `(1, Nkv, C, H)`."""
    return tokens.transpose(0, 1).unsqueeze(0)
